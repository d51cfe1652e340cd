"""Opens the objects of a store, wherever they lie."""

from __future__ import annotations

from pathlib import Path

from headway.data.store_objects import read_objects_address
from headway.lifecycle.store.local_objects import LocalObjects
from headway.lifecycle.store.objects import Objects
from headway.lifecycle.store.remote_objects import RemoteStoreObjects


def open_objects(store: Path) -> Objects:
    """Returns the objects of a store.

    Raises DataError if the file with their address cannot be read.
    """
    if (place := read_objects_address(store)) is None:
        return LocalObjects(store)
    return RemoteStoreObjects(store, place)
