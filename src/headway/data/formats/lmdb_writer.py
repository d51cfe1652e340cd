"""Writes LMDB shards: one file each, with the keys of the tar layout, `000000012.jpg` and `000000012.cls`.

A shard is written once and never changed, so a value keeps its offset in the file. The columns hold these offsets, and
a pack is read without the lmdb package. A trailer follows the last page.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data.formats import lmdb
from headway.data.formats.recordio import RecordPlace
from headway.data.formats.tar_writer import encode_label, guess_extension
from headway.data.formats.trailer import build_trailer

_MAP_SIZE_BYTES = 1 << 40
"""Address space, not disk space: larger than any shard."""
_MAX_TRANSACTION_BYTES = 16 << 20
"""Pages of an open transaction are in memory, so it is committed at this size."""
_ENTRY_OVERHEAD_BYTES = 64
"""Estimated size of an entry without its value."""


@final
class LmdbWriter:
    """Writes one LMDB shard; see `ShardWriter`. Raises UsageError if the lmdb package is missing."""

    def __init__(self, path: Path, pack_id: int) -> None:
        self._lmdb = _import_lmdb()
        self._path = path
        self._pack_id = pack_id
        self._names: list[str] = []
        self._uncommitted_bytes = 0
        self.size_bytes = 0
        with self._convert_errors():
            # No sync and no lock: `close` syncs once, and no other process opens an unfinished shard.
            self._env = self._lmdb.open(str(path), subdir=False, map_size=_MAP_SIZE_BYTES, lock=False, sync=False)
            self._txn = self._env.begin(write=True)

    def append(self, image: bytes, label: Any, index: int) -> RecordPlace:
        """Appends an image file and the file of its label; its offset is 0 until `close` returns it."""
        label_extension, label_text = encode_label(label)
        name = f"{index:09d}.{guess_extension(image)}"
        self._names.append(name)
        with self._convert_errors():
            # `append=True` needs keys in order, and then fills pages completely.
            for key, value in sorted([(name, image), (f"{index:09d}.{label_extension}", label_text)]):
                self._txn.put(key.encode(), value, append=True)
            size_bytes = len(image) + len(label_text) + 2 * _ENTRY_OVERHEAD_BYTES
            self.size_bytes += size_bytes
            self._uncommitted_bytes += size_bytes
            if self._uncommitted_bytes > _MAX_TRANSACTION_BYTES:
                self._txn.commit()
                self._txn = self._env.begin(write=True)
                self._uncommitted_bytes = 0
        return RecordPlace(0, len(image), False)

    def close(self) -> NDArray[np.uint64]:
        """Flushes the file to the disk (fsync). Returns the offsets of all images, uint64 [n], in order of `append`."""
        with self._convert_errors():
            self._txn.commit()
            self._env.close()
        # Offsets are final only now: LMDB moves values between pages until the last commit.
        members = {member.name: member.offset for member in lmdb.read_entries(self._path)}
        with self._path.open("ab") as file:
            # Readers of LMDB ignore bytes after the last page.
            file.write(build_trailer(self._pack_id))
            file.flush()
            os.fsync(file.fileno())
            self.size_bytes = file.tell()
        return np.array([members[name] for name in self._names], np.uint64)

    def abandon(self) -> None:
        """Discards the shard; see `ShardWriter`."""
        with contextlib.suppress(self._lmdb.Error, OSError):
            self._txn.abort()
            self._env.close()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Converts LMDB's errors in the block to OSError; LMDB reports a short write on a full disk as EIO."""
        try:
            yield
        except self._lmdb.Error as error:
            # Less free space than two commits need: the disk is full.
            is_full = error.code == errno.EIO and shutil.disk_usage(self._path.parent).free < 2 * _MAX_TRANSACTION_BYTES
            raise OSError(errno.ENOSPC if is_full else error.code, str(error)) from error


def _import_lmdb() -> Any:
    try:
        import lmdb as package
    except ImportError as error:
        fix = "Install it: pip install lmdb."
        raise UsageError("writing LMDB needs the lmdb package, which is not installed", fix=fix) from error
    return package
