"""Formats: reads foreign data sets and writes the shards of packs.

In: a file, a folder or a pattern of shards. Out: `ForeignRecords` (offsets, lengths and labels of the samples in their
files), a `PackSource` (images to pack), or a shard written by a `ShardWriter`.

Open `detect.py` first: it recognises a format and calls the module that reads it. To add a format, write a module that
returns `ForeignRecords` and name it there; `writers.py` lists the formats that a pack can be written in.
"""
