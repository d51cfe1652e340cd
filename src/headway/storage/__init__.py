"""Storage: reads and writes files at URLs; serves data sets, stores and checkpoints.

In: the URL of a folder (http://, https://, or any that fsspec supports) and the name of a file in it.
Out: bytes of that file, with retries and a check that the file has not changed meanwhile.

Open `remote_folder.py` first. `transport.py` makes single attempts by HTTP or fsspec; `writable_folder.py` writes and
deletes; `addresses.py` distinguishes URLs from paths and finds the cache folder.
"""
