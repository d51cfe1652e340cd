"""RecordIO, the record format of dmlc and MXNet: `.rec` holds records, `.idx` the offset of each.

A record is a u32 magic number, a u32 of (kind << 29 | length), the payload, and zeros up to a multiple of 4 bytes, all
little-endian. A payload with the magic number at a multiple of 4 bytes is split there into parts of kind 1 (first), 2
(middle) and 3 (last). The magic number between parts is left out, and readers put it back; so it occurs only at the
start of a record, and a reader that lost its place finds the next one. The payload of an image record is u32 flag, f32
label, u64 id, u64 id2, then `flag` more f32 labels, then the bytes of the image file.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import FLAG_SPLIT
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.foreign_records import ForeignRecords, build_records, infer_labels

MAGIC = 0xCED7230A
RECORD_LIMIT_BYTES = 1 << 29
"""A payload's length has 29 bits."""

_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")
_BUFFER_BYTES = 1 << 20

Label = float | NDArray[np.float32]
"""A scalar, or a vector of shape [k]."""


class RecordPlace(NamedTuple):
    """The place of an image: `offset` of its first byte, or of its record if that is `split` into parts."""

    offset: int
    length: int
    split: bool


class ImageRecord(NamedTuple):
    """One image record; `id2` is the number of its pack."""

    label: Label
    id: int
    id2: int
    image: bytes


@final
class RecordioWriter:
    """Writes one shard: records to `rec_path`, and a line `index<tab>offset of the record` for each to `idx_path`.

    Data may not be on the disk before `close`. After an error, call `abandon`. All methods raise OSError.
    """

    def __init__(self, rec_path: Path, idx_path: Path, pack_id: int) -> None:
        self._rec = open(rec_path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._idx = open(idx_path, "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115
        self._pack_id = pack_id
        self.size_bytes = 0

    def append(self, image: bytes, label: Label, index: int) -> RecordPlace:
        """Appends one image. Raises DataError for one of 512 MiB or more, which a record cannot hold."""
        # A vector label follows the header, and `flag` is its length.
        if isinstance(label, np.ndarray):
            head = _HEADER.pack(label.size, 0.0, index, self._pack_id) + label.astype("<f4").tobytes()
        else:
            head = _HEADER.pack(0, label, index, self._pack_id)
        length = len(head) + len(image)
        if length >= RECORD_LIMIT_BYTES:
            raise DataError(f"an image of {len(image):,} bytes does not fit into a record (limit 512 MiB)")
        start = self.size_bytes
        # The header is a multiple of 4 bytes long, so no aligned magic number lies across its end.
        split = bool(_find_magic_numbers(head) or _find_magic_numbers(image))
        if split:
            self.size_bytes += self._rec.write(_split_record(head + image))
        else:
            # The usual record: image and header are written without being joined in memory.
            padding = _PADDING[length % 4]
            self._rec.write(_FRAME.pack(MAGIC, length) + head)
            self._rec.write(image)
            self._rec.write(padding)
            self.size_bytes += _FRAME.size + length + len(padding)
        # MXNet reads records in random order through this index.
        self._idx.write(b"%d\t%d\n" % (index, start))
        # Readers map the bytes of an unsplit image directly.
        return RecordPlace(start if split else start + _FRAME.size + len(head), len(image), split)

    def close(self) -> None:
        """Brings both files to the disk and closes them."""
        for file in (self._rec, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def abandon(self) -> None:
        """Closes both files in any state, for files that will be removed."""
        for file in (self._rec, self._idx):
            with contextlib.suppress(OSError):
                file.close()


def read_record(view: memoryview, start: int, name: str = "RecordIO") -> tuple[ImageRecord, int]:
    """Returns the record that begins at byte `start`, and the offset of the next one; `name` is for messages.

    Raises DataError if no whole image record begins there.
    """
    # A view of the file, or joined parts.
    payload, end = _read_payload(view, start, name)
    flag, scalar, sample_id, id2 = _read_header(payload, start, name)
    begin = _HEADER.size + 4 * flag
    label: Label = scalar if flag == 0 else np.frombuffer(payload[_HEADER.size : begin], "<f4").astype(np.float32)
    return ImageRecord(label, sample_id, id2, bytes(payload[begin:])), end


def compute_record_start(offset: int, labels: int) -> int:
    """Returns the start of the unsplit record whose image is at `offset`; `labels` is 0 for a scalar, or a count."""
    return offset - _FRAME.size - _HEADER.size - 4 * labels


def join_record(view: memoryview, offset: int, length: int) -> bytes:
    """Returns the image of `length` bytes of the split record at `offset`. Raises DataError if it is not there."""
    image = read_record(view, offset)[0].image
    if len(image) != length:
        raise DataError(f"the record holds an image of {len(image)} bytes, not {length}", where=f"byte {offset}")
    return image


def read_pack_id(path: Path) -> int:
    """Returns a shard's pack number from its first record. Raises DataError if it is not a RecordIO file."""
    payload, _ = _read_payload(map_path(path), 0, str(path))
    return _read_header(payload, 0, str(path))[3]


def open_shards(paths: Sequence[Path]) -> ForeignRecords:
    """Returns the images of RecordIO files, in order; an index (`.idx`) is not needed.

    Labels are class numbers if all are whole and not negative; see `infer_labels`. Raises DataError.
    """
    places: list[tuple[int, int, int, int]] = []
    labels: list[Label] = []
    for number, path in enumerate(paths):
        view, at = map_path(path), 0
        # Checked apart from the records, so that the message is about the file.
        if view[:4] != _MAGIC_BYTES:
            fix = "RecordIO begins with the number 0xced7230a. Name a file of records, or copy this one again."
            raise DataError("this is not a RecordIO file", where=str(path), fix=fix)
        while at < len(view):
            start = at
            payload, at = _read_payload(view, start, str(path))
            flag, label, _, _ = _read_header(payload, start, str(path))
            begin = _HEADER.size + 4 * flag
            # Parts were joined in memory, so the record must be read again each time.
            split = isinstance(payload, bytearray)
            offset = start if split else start + _FRAME.size + begin
            places.append((number, offset, len(payload) - begin, FLAG_SPLIT * split))
            labels.append(np.frombuffer(payload[_HEADER.size : begin], "<f4") if flag else label)
    if len({np.shape(label) for label in labels}) > 1:
        raise DataError("its labels differ in length", where=str(paths[0]))
    return build_records("recordio", paths, places, infer_labels(np.array(labels, np.float64), str(paths[0])))


def _find_magic_numbers(payload: bytes) -> list[int]:
    """Returns the offsets of the magic number at multiples of 4 bytes."""
    # bytes.find is fast, and the magic number is rare: once in 4 GB of random bytes.
    positions, at = [], payload.find(_MAGIC_BYTES)
    while at >= 0:
        if at % 4 == 0:
            positions.append(at)
        at = payload.find(_MAGIC_BYTES, at + 1)
    return positions


def _split_record(payload: bytes) -> bytes:
    record, begin = bytearray(), 0
    # Each cut drops the 4 bytes of the magic number, which readers put back.
    for cut in _find_magic_numbers(payload):
        kind = _MIDDLE if record else _FIRST
        record += _FRAME.pack(MAGIC, kind << 29 | cut - begin) + payload[begin:cut]
        begin = cut + 4
    last = payload[begin:]
    return bytes(record + _FRAME.pack(MAGIC, _LAST << 29 | len(last)) + last + _PADDING[len(last) % 4])


def _read_payload(view: memoryview, start: int, name: str) -> tuple[memoryview | bytearray, int]:
    joined, at, allowed = bytearray(), start, (_WHOLE, _FIRST)
    while True:
        if at + _FRAME.size > len(view):
            raise DataError("the file ends inside a record", where=f"{name}, byte {start}", fix="Copy it again.")
        magic, word = _FRAME.unpack_from(view, at)
        # 3 bits of kind, 29 bits of length.
        kind, length = word >> 29, word & (RECORD_LIMIT_BYTES - 1)
        if magic != MAGIC or kind not in allowed:
            raise DataError("this is not a RecordIO record", where=f"{name}, byte {at}")
        begin, end = at + _FRAME.size, at + _FRAME.size + length
        if end > len(view):
            raise DataError("the file ends inside a record", where=f"{name}, byte {start}", fix="Copy it again.")
        at = end + len(_PADDING[length % 4])
        # No copy: the payload is a view of the file.
        if kind == _WHOLE:
            return view[begin:end], at
        joined += view[begin:end]
        if kind == _LAST:
            return joined, at
        # The magic number between two parts was left out when they were split.
        joined += _MAGIC_BYTES
        allowed = (_MIDDLE, _LAST)


def _read_header(payload: memoryview | bytearray, start: int, name: str) -> tuple[int, float, int, int]:
    if len(payload) >= _HEADER.size:
        flag, label, sample_id, id2 = _HEADER.unpack_from(payload)
        # A damaged flag would claim more labels than there are bytes.
        if len(payload) >= _HEADER.size + 4 * flag:
            return flag, label, sample_id, id2
    raise DataError("the record is too short for an image", where=f"{name}, byte {start}")
