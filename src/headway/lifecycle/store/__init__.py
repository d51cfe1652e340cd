"""Store: data sets with versions, over shards that all versions share.

In: images with labels, and changes to them. Out: versions that `headway.open("store:cars@v3/train")` reads like packs.

Open `store.py` first: one method for each thing to do. `rows.py` are the samples of a version as arrays;
`change_rows.py`, `differences.py` and `merging.py` compute new ones, without any file. `manifest.py` says what a
version is, `version_files.py` writes its folder, `shard_objects.py` keeps the shards, `ingest.py` packs new images,
`history.py` is the database, `garbage.py` and `verify_store.py` look after it all. The layout of the folder is in
`headway.data.store_address`.
"""
