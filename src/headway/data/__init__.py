"""Data: from files to batches on the device.

In: a packed data set, foreign data or an address; and `data` of a recipe. Out: batches of images and labels.

Open `opening.py` first: it returns a `Dataset`, whose columns locate each sample in the shards. `pack.py` writes packs;
`formats/` reads foreign data and writes shards; `tiers/` keeps records near (device, memory, disk). `order.py` chooses
the samples of a batch, `decode.py` turns records into pixels, and `loader.py` runs it all ahead of the training loop.
"""
