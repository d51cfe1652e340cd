"""Writes tar shards in the WebDataset layout, `KEY.jpg` and `KEY.cls`, which the webdataset package reads.

KEY is the sample's number in nine digits: source names may contain dots and slashes, which have a meaning in that
layout. `encode_label` writes labels. A trailer follows the blocks of zeros that end an archive.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.data.formats.recordio import RecordPlace
from headway.data.formats.trailer import build_trailer

_BLOCK = tarfile.BLOCKSIZE
_WRITE_BUFFER_BYTES = 1 << 20

_SIGNATURES = (
    (b"\xff\xd8\xff", 0, "jpg"),
    (b"\x89PNG", 0, "png"),
    (b"GIF8", 0, "gif"),
    (b"BM", 0, "bmp"),
    (b"WEBP", 8, "webp"),
    (b"II", 0, "tif"),
    (b"MM", 0, "tif"),
)


def guess_extension(image: bytes) -> str:
    """Returns the extension, without a dot, of the image file with these bytes."""
    # The rest of the formats that Pillow reads here is PPM.
    return next(
        (extension for signature, offset, extension in _SIGNATURES if image.startswith(signature, offset)), "ppm"
    )


def encode_label(label: Any) -> tuple[str, bytes]:
    """Returns the extension (without a dot) and the content of a label's file.

    A class number is text in a `cls` file; another number, or a vector, is JSON.
    """
    if isinstance(label, int | np.integer):
        return "cls", str(int(label)).encode()
    numbers = np.asarray(label, np.float32)
    # 9 digits restore a float32 exactly.
    values = [float(f"{number:.9g}") for number in numbers.ravel().tolist()]
    return "json", json.dumps(values if numbers.ndim else values[0]).encode()


@final
class TarWriter:
    """Writes one tar shard; see `ShardWriter`."""

    def __init__(self, path: Path, pack_id: int) -> None:
        self._file = open(path, "wb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115
        self._pack_id = pack_id
        self.size_bytes = 0

    def append(self, image: bytes, label: Any, index: int) -> RecordPlace:
        """Appends an image file, followed by the file of its label; returns where the image is stored."""
        offset = self._add(f"{index:09d}.{guess_extension(image)}", image)
        label_extension, label_text = encode_label(label)
        self._add(f"{index:09d}.{label_extension}", label_text)
        return RecordPlace(offset, len(image), False)

    def close(self) -> None:
        """Ends the archive and flushes it to the disk (fsync)."""
        # The trailer is padded to a whole block, so the archive stays a multiple of 512 bytes.
        self.size_bytes += self._file.write(bytes(2 * _BLOCK) + build_trailer(self._pack_id).rjust(_BLOCK, b"\0"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Closes the file and ignores errors; see `ShardWriter`."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _add(self, name: str, data: bytes) -> int:
        # TarInfo writes headers without times or owners, so equal packs are equal bytes.
        header = tarfile.TarInfo(name)
        header.size = len(data)
        self.size_bytes += self._file.write(header.tobuf(tarfile.USTAR_FORMAT))
        offset = self.size_bytes
        self.size_bytes += self._file.write(data) + self._file.write(bytes(-len(data) % _BLOCK))
        return offset
