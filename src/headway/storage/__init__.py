"""Storage: reads files at remote addresses; serves data sets and checkpoints.

In: the address of a folder (http://, https://, or any that fsspec knows) and the name of a file in it.
Out: bytes of that file, with retries and a check that the file has not changed meanwhile.

Open `remote_folder.py` first. `transport.py` makes single attempts by HTTP or fsspec; `addresses.py` tells addresses
from paths and finds the cache folder.
"""
