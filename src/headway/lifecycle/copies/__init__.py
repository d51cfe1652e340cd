"""Copies: which images show the same picture. Used by mining, and by the store for splits.

In: a data set that `headway.data.opening.open` opens. Out: for each image, the image that is kept in its place.

Open `near_copies.py` first, which compares hashes. `hash_images.py` makes them, `hash_cache.py` keeps those of a
store beside its shards, and `hash_search.py` finds hashes that differ in few bits.
"""
