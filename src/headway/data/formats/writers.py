"""What writes a pack's shards: one writer for each format that can be written.

Whatever the format, an image's bytes lie in one piece of a shard, at an offset and of a length that the columns hold
(RecordIO's split records excepted), so that all packs are read alike: as stretches of mapped files.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from headway.data.formats import recordio
from headway.data.formats.arrays_writer import ArraysWriter
from headway.data.formats.lmdb_writer import LmdbWriter
from headway.data.formats.recordio import RecordPlace
from headway.data.formats.tar_writer import TarWriter


class ShardWriter(Protocol):
    """Writes one shard. Nothing is certain to be on the disk before `close`; after an error, `abandon` it.

    Raises OSError from any method, as the file system does.
    """

    size_bytes: int
    """Of the shard as far as it is written; exact after `close`."""

    def append(self, image: Any, label: Any, index: int) -> RecordPlace:
        """Appends an image: the bytes of its file, or (raw) its pixels, uint8 [h, w, c]. `index` counts through all
        shards; `label` is a number, or float32 [k]."""

    def close(self) -> NDArray[np.uint64] | None:
        """Brings the shard to the disk. Returns the offsets of its images where `append` could not know them."""

    def abandon(self) -> None: ...


WRITERS: dict[str, tuple[str, Callable[[Path, int], ShardWriter]]] = {
    "recordio": (".rec", lambda path, pack_id: recordio.RecordioWriter(path, path.with_suffix(".idx"), pack_id)),
    "tar": (".tar", TarWriter),
    "lmdb": (".lmdb", LmdbWriter),
    "raw": (".npy", ArraysWriter),
}
"""Of each format, the ending of its shards, and what makes a writer of a shard's path and the pack's number."""
