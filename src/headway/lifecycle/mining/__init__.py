"""Mining: which images to label next, which sets share images, and which labels look wrong.

In: a data set that `headway.data.opening.open` opens, and trained runs. Out: a folder with a list of images, the images
themselves and a page.

Open `mine.py` first: it goes from a pool to a folder of picks. `choose.py` makes the choice from arrays alone, by
`scores.py`, `k_center.py` and `badge.py`; `copies_out.py` finds the images that are out before; `leak.py` and
`label_errors.py` examine sets that have labels already.
"""
