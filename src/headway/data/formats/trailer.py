"""Trailer of shards that are not RecordIO: 16 bytes, a signature and the number of the pack.

Readers of tar, LMDB and `.npy` stop before it. It prevents shards of two packs from being mixed.
"""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.files import open_regular

TRAILER_BYTES = 16
_MARK = b"headway\n"


def build_trailer(pack_id: int) -> bytes:
    """Builds the trailer of a shard of this pack."""
    return _MARK + pack_id.to_bytes(8, "little")


def parse_pack_id(end: bytes | memoryview) -> int | None:
    """Returns the pack number in the last bytes of a shard; None if there is none."""
    trailer = bytes(end[-TRAILER_BYTES:])
    return int.from_bytes(trailer[8:], "little") if trailer.startswith(_MARK) else None


def read_pack_id(path: Path) -> int | None:
    """Returns a shard's pack number; None if the file is not a shard of a pack. Raises OSError if it cannot be read."""
    with open_regular(path) as file:
        # Only the end is read: shards may be large.
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TRAILER_BYTES))
        return parse_pack_id(file.read())
