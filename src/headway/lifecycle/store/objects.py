"""Objects: the shards of a store, named by the SHA-256 of their bytes. Each appears only when whole, and never changes.

They lie in the folder of the store (`local_objects.py`), or at an address (`remote_objects.py`). In both cases each has
one file in `objects/`, its entry: the shard itself, or a note about it. An object is there if its entry is; the time of
the entry says to the garbage collection when somebody was last about to use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from headway.data.formats import recordio
from headway.data.store_address import OBJECTS
from headway.data.store_objects import EXTENSION


class Objects(ABC):
    """The objects of one store. Any thread, and any process of this machine, may call."""

    @abstractmethod
    def keep(self, path: Path, digest: str) -> None:
        """Makes a staged file, which is on the disk already, an object.

        Raises:
            OSError: the store cannot be written.
            HeadwayError: the address cannot be written.
        """

    @abstractmethod
    def measure(self, digest: str) -> int | None:
        """Returns the size of an object in bytes; None: it is not there."""

    @abstractmethod
    def list_entries(self) -> Iterator[Path]:
        """Yields the entries of all objects, sorted; the stem of each is the SHA-256."""

    @abstractmethod
    def remove_entry(self, entry: Path, trash: Path) -> None:
        """Removes an entry at once, so that nobody can use the object any more. Raises OSError."""

    @abstractmethod
    def expect_owner(self, *, is_moved: bool) -> None:
        """Expects that no other store needs these objects.

        Args:
            is_moved: the user says that this store is the only one, though its folder was copied.

        Raises:
            UsageError: another store may need them.
            HeadwayError: the address cannot be reached.
        """

    @abstractmethod
    def sweep(self) -> None:
        """Removes what `remove_entry`, and processes that were killed, have left of objects without an entry.

        Raises HeadwayError if the address cannot be written; the next call goes on.
        """

    @abstractmethod
    def read(self, digest: str, start: int, length: int) -> bytes:
        """Returns bytes of an object; fewer if it ends before. Raises DataError if it cannot be read."""

    @abstractmethod
    def open(self, digest: str) -> AbstractContextManager[memoryview]:
        """Returns a context with all bytes of an object. Raises DataError if it cannot be read."""


def get_object_path(store: Path, digest: str) -> Path:
    """Returns the path of a shard in the folder of a store; what is known of it lies beside it, also if it is remote.

    The first two digits are a folder, so that no folder gets too long to list.
    """
    return store / OBJECTS / digest[:2] / f"{digest}{EXTENSION}"


def read_stored_image(objects: Objects, digest: str, offset: int, length: int, *, is_split: bool) -> bytes:
    """Returns the stored bytes of a sample.

    Args:
        digest: of its shard.
        offset, length: where its bytes are there, or its record, and their number.
        is_split: the record holds them in several parts.

    Raises DataError if they cannot be read, or are damaged.
    """
    most = recordio.compute_split_record_bound(length) if is_split else length
    return read_view(memoryview(objects.read(digest, offset, most)), 0, length, is_split=is_split)


def read_view(view: memoryview, offset: int, length: int, *, is_split: bool) -> bytes:
    """Returns the stored bytes of a sample out of its shard. Raises DataError if the record is damaged."""
    return recordio.join_record(view, offset, length) if is_split else bytes(view[offset : offset + length])
