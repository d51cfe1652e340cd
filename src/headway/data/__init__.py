"""Input pipeline: bytes on a disk become batches on a device.

In: a folder or file that `open` understands, an `Order` (which sample is served at which position), and the options of
a `LoaderSpec`. Out: a `Loader`, an iterator over `Batch`es.

Read `dataset` first (an index over records), then `order`, `loader` (prefetching), `fill` (one batch), `decode` (the
native core or Pillow) and `augment` (random changes on the device). `formats/` reads foreign data, `pack` writes
Headway's own, `tiers/` keeps samples in memory, on the device or on the local disk.
"""
