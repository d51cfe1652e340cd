"""Data: from files to batches on the device.

In: a folder or file that `opening.open` understands, an `Order` (the sample of each position), and the options of a
`LoaderSpec`. Out: a `Loader`, an iterator over `Batch`es.

Open `opening.py` first: it returns a `Dataset`, whose columns locate each sample in the shards. `pack.py` writes packs;
`formats/` reads foreign data and writes shards; `tiers/` keeps records near (device, memory, disk). `order.py` chooses
the samples of a batch, `decode.py` turns records into pixels, and `loader.py` runs it all ahead of the training loop.
"""
