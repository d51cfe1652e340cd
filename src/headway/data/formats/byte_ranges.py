"""ByteRange: a whole file, or a member of an archive, read in place."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import DataError, HeadwayError
from headway.core.files import open_regular
from headway.data.mapping import map_file


@final
@dataclass(frozen=True)
class ByteRange:
    """`size` bytes of a file from `offset` on; `member` is the name in an archive, empty for a whole file."""

    path: Path
    offset: int
    size: int
    member: str = ""

    @staticmethod
    def from_file(path: Path) -> ByteRange:
        """Returns the range of a whole file. Raises DataError if it does not exist."""
        try:
            return ByteRange(path, 0, path.stat().st_size)
        except OSError as error:
            raise build_read_error(path, error) from error

    @property
    def name(self) -> str:
        """Name of the member or the file, without folders."""
        return os.path.basename(self.member) or self.path.name

    def view(self) -> memoryview:
        """Returns the bytes, mapped. Raises DataError if the file is empty or cannot be read."""
        # A slice of the view keeps the whole mapping alive.
        return map_path(self.path)[self.offset : self.offset + self.size]

    def __str__(self) -> str:
        return f"{self.path}, {self.member}" if self.member else str(self.path)


@final
class FolderFiles(Mapping[str, ByteRange]):
    """Files of one folder by name. Each is examined when looked up, so a dangling link does not affect the others.

    Looking up a file that cannot be read raises DataError.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self._folder = folder
        self._names = frozenset(names)

    def __getitem__(self, name: str) -> ByteRange:
        if name not in self._names:
            raise KeyError(name)
        return ByteRange.from_file(self._folder / name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def map_path(path: Path) -> memoryview:
    """Returns the bytes of a file, mapped as long as the view or a slice of it lives; see `headway.data.mapping`.

    Raises DataError if the file is empty or cannot be read, or HeadwayError if too many files are open.
    """
    try:
        with open_regular(path) as file:
            # The descriptor is closed at once; the mapping stays.
            return map_file(file, path)
    except ValueError as error:
        # mmap refuses an empty file.
        raise DataError("the file is empty", where=str(path), fix="Copy it again, or leave it out.") from error
    except OSError as error:
        raise build_read_error(path, error) from error


def build_read_error(path: Path, error: OSError) -> HeadwayError:
    """Builds the error for a file that cannot be opened."""
    # The limit of open files is a setting of the machine, not damage.
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "Allow more (ulimit -n), or pack the data into fewer, larger shards."
        return HeadwayError("too many files are open", where=str(path), fix=fix)
    return DataError(f"the file cannot be read ({error.strerror})", where=str(path))


def read_head(path: Path, count: int) -> bytes:
    """Returns the first `count` bytes of a file. Raises DataError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return file.read(count)
    except OSError as error:
        raise build_read_error(path, error) from error
