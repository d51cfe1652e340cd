"""Writers of shards, one for each format of a pack.

In every format, an image's bytes are contiguous in a shard, at the offset and length in the columns (except RecordIO's
split records), so all packs are read alike, as ranges of mapped files.
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
    """Writes one shard. Data may not be on the disk before `close`; after an error, call `abandon`.

    All methods raise OSError.
    """

    size_bytes: int
    """Bytes written so far; exact after `close`."""

    def append(self, image: Any, label: Any, index: int) -> RecordPlace:
        """Appends an image: the bytes of its file, or (raw) its pixels, uint8 [h, w, c].

        Args:
            label: a number, or float32 [k].
            index: number of the sample in the set, through all shards.

        Returns:
            where the image is stored.
        """

    def close(self) -> NDArray[np.uint64] | None:
        """Flushes the shard to the disk (fsync). Returns the offsets of its images if `append` could not know them."""

    def abandon(self) -> None:
        """Closes the file and ignores errors; for a shard that will be removed."""


WRITERS: dict[str, tuple[str, Callable[[Path, int], ShardWriter]]] = {
    "recordio": (".rec", lambda path, pack_id: recordio.RecordioWriter(path, path.with_suffix(".idx"), pack_id)),
    "tar": (".tar", TarWriter),
    "lmdb": (".lmdb", LmdbWriter),
    "raw": (".npy", ArraysWriter),
}
"""By format: the extension of the shards, and the function that builds a writer from a shard's path and the pack's
number.
"""
