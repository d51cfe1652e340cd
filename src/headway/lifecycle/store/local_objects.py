"""LocalObjects: shards in the folder of a store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.files import open_regular, sync_folder
from headway.data.formats.byte_ranges import build_read_error, map_path
from headway.data.store_address import OBJECTS
from headway.data.store_objects import EXTENSION
from headway.lifecycle.store.objects import Objects, get_object_path


@final
class LocalObjects(Objects):
    """Objects in the folder of the store: each entry is the shard."""

    def __init__(self, store: Path) -> None:
        self._store = store

    def keep(self, path: Path, digest: str) -> None:
        """Moves the file to its place; see `Objects.keep`."""
        target = get_object_path(self._store, digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Nobody may write into a shard that several versions share.
        path.chmod(0o444)
        # Its time says to the garbage collection that somebody is about to use it.
        os.utime(path)
        # Also over one that is there: it has the same bytes, or it is damaged. Who has mapped it keeps what it has.
        os.replace(path, target)
        # Both, although another process may have made the folder: it may not have come so far.
        sync_folder(target.parent)
        sync_folder(target.parent.parent)

    def measure(self, digest: str) -> int | None:
        """Returns the size of the shard; see `Objects.measure`."""
        try:
            return get_object_path(self._store, digest).stat().st_size
        except OSError:
            return None

    def list_entries(self) -> Iterator[Path]:
        """Yields the paths of the shards; see `Objects.list_entries`."""
        yield from sorted((self._store / OBJECTS).glob(f"??/*{EXTENSION}"))

    def remove_entry(self, entry: Path, trash: Path) -> None:
        """Moves the shard away; see `Objects.remove_entry`."""
        os.rename(entry, trash / entry.name)

    def expect_owner(self, *, is_moved: bool) -> None:
        """Does nothing: the shards belong to the folder. Raises UsageError if it is said to be moved."""
        if is_moved:
            what = "--moved is for stores whose shards lie at an address, and this one has them in its folder"
            raise UsageError(what, where=str(self._store), fix="Leave it out.")

    def sweep(self) -> None:
        """Does nothing: an entry is all that there is of an object."""

    def read(self, digest: str, start: int, length: int) -> bytes:
        """Reads bytes of the shard; see `Objects.read`."""
        path = get_object_path(self._store, digest)
        try:
            with open_regular(path, buffering=0) as file:
                return os.pread(file.fileno(), length, start)
        except OSError as error:
            raise build_read_error(path, error) from error

    def open(self, digest: str) -> AbstractContextManager[memoryview]:
        """Maps the shard; see `Objects.open`."""
        return nullcontext(map_path(get_object_path(self._store, digest)))
