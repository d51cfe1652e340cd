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
from typing import NamedTuple, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.data.columns import FLAG_SPLIT
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.foreign_records import ForeignRecords, build_records, infer_labels

MAGIC = 0xCED7230A
MAX_RECORD_BYTES = 1 << 29
"""A payload's length has 29 bits."""

_MAGIC_BYTES = struct.pack("<I", MAGIC)
_FRAME = struct.Struct("<II")
_HEADER = struct.Struct("<IfQQ")
_COMPLETE, _FIRST, _MIDDLE, _LAST = range(4)
_PADDING = (b"", b"\0\0\0", b"\0\0", b"\0")
_WRITE_BUFFER_BYTES = 1 << 20

Lengths = TypeVar("Lengths", int, NDArray[np.int64])
Label = float | NDArray[np.float32]
"""A scalar, or a vector of shape [k]."""


class RecordPlace(NamedTuple):
    """Place of an image in its shard: `offset` of its first byte, or of its record if that is `split` into parts."""

    offset: int
    length: int
    split: bool


class ImageRecord(NamedTuple):
    """One image record; `id` is the number of the sample, `id2` that of its pack."""

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
        self._rec = open(rec_path, "wb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115
        self._idx = open(idx_path, "wb", buffering=_WRITE_BUFFER_BYTES)  # noqa: SIM115
        self._pack_id = pack_id
        self.size_bytes = 0

    def append(self, image: bytes, label: Label, index: int) -> RecordPlace:
        """Appends one image and returns its place. Raises DataError if it has 512 MiB (the limit) or more."""
        # A vector label follows the header, and `flag` is its length.
        if isinstance(label, np.ndarray):
            header = _HEADER.pack(label.size, 0.0, index, self._pack_id) + label.astype("<f4").tobytes()
        else:
            header = _HEADER.pack(0, label, index, self._pack_id)
        length = len(header) + len(image)
        if length >= MAX_RECORD_BYTES:
            raise DataError(f"an image of {len(image):,} bytes does not fit into a record (limit 512 MiB)")
        start = self.size_bytes
        # The header is a multiple of 4 bytes long, so no aligned magic number lies across its end.
        is_split = bool(_find_magic_numbers(header) or _find_magic_numbers(image))
        if is_split:
            self.size_bytes += self._rec.write(_encode_split_record(header + image))
        else:
            # The usual record: image and header are written without being joined in memory.
            padding = _PADDING[length % 4]
            self._rec.write(_FRAME.pack(MAGIC, length) + header)
            self._rec.write(image)
            self._rec.write(padding)
            self.size_bytes += _FRAME.size + length + len(padding)
        # MXNet reads records in random order through this index.
        self._idx.write(b"%d\t%d\n" % (index, start))
        # Readers map the bytes of an unsplit image directly.
        return RecordPlace(start if is_split else start + _FRAME.size + len(header), len(image), is_split)

    def close(self) -> None:
        """Flushes both files to the disk (fsync) and closes them."""
        for file in (self._rec, self._idx):
            file.flush()
            os.fsync(file.fileno())
            file.close()

    def abandon(self) -> None:
        """Closes both files and ignores errors; for files that will be removed."""
        for file in (self._rec, self._idx):
            with contextlib.suppress(OSError):
                file.close()


def read_record(view: memoryview, start: int, name: str = "RecordIO") -> tuple[ImageRecord, int]:
    """Returns the record that begins at byte `start`, and the offset of the next one; `name` is for messages.

    Raises DataError if no whole image record begins there.
    """
    payload, end = _read_payload(view, start, name)
    flag, scalar, sample_id, id2 = _read_header(payload, start, name)
    image_begin = _HEADER.size + 4 * flag
    label: Label = scalar if flag == 0 else np.frombuffer(payload[_HEADER.size : image_begin], "<f4").astype(np.float32)
    return ImageRecord(label, sample_id, id2, bytes(payload[image_begin:])), end


def compute_record_start(offset: int, labels: int) -> int:
    """Returns the start of the unsplit record whose image is at `offset`.

    Args:
        labels: length of a vector label; 0 for a scalar.
    """
    return offset - _FRAME.size - _HEADER.size - 4 * labels


def compute_split_record_bound(length: Lengths) -> Lengths:
    """Returns an upper bound of the bytes of a split record with an image of `length` bytes; also for an array."""
    # A part has 8 bytes of header for 4 of magic number; 1 MiB more holds the record's own header and labels.
    return 2 * length + (1 << 20)


def join_record(view: memoryview, offset: int, length: int) -> bytes:
    """Returns the image of `length` bytes of the split record at `offset`. Raises DataError if there is none."""
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

    Labels are class numbers if all are non-negative integers; see `infer_labels`.

    Raises:
        DataError: a file is not RecordIO, is damaged, or its labels differ in length.
    """
    image_places: list[tuple[int, int, int, int]] = []
    labels: list[Label] = []
    for shard, path in enumerate(paths):
        view = map_path(path)
        next_start = 0
        # Checked apart from the records, so that the message is about the file.
        if view[:4] != _MAGIC_BYTES:
            fix = "RecordIO begins with the number 0xced7230a. Name a file of records, or copy this one again."
            raise DataError("this is not a RecordIO file", where=str(path), fix=fix)
        while next_start < len(view):
            start = next_start
            payload, next_start = _read_payload(view, start, str(path))
            flag, label, _, _ = _read_header(payload, start, str(path))
            image_begin = _HEADER.size + 4 * flag
            # Parts were joined in memory, so the record must be read again each time.
            is_split = isinstance(payload, bytearray)
            offset = start if is_split else start + _FRAME.size + image_begin
            image_places.append((shard, offset, len(payload) - image_begin, FLAG_SPLIT * is_split))
            labels.append(np.frombuffer(payload[_HEADER.size : image_begin], "<f4") if flag else label)
    if len({np.shape(label) for label in labels}) > 1:
        raise DataError("its labels differ in length", where=str(paths[0]))
    return build_records("recordio", paths, image_places, infer_labels(np.array(labels, np.float64), str(paths[0])))


def _find_magic_numbers(payload: bytes) -> list[int]:
    """Returns the offsets of the magic number at multiples of 4 bytes."""
    # bytes.find is fast, and the magic number is rare: once in 4 GB of random bytes.
    offsets = []
    offset = payload.find(_MAGIC_BYTES)
    while offset >= 0:
        if offset % 4 == 0:
            offsets.append(offset)
        offset = payload.find(_MAGIC_BYTES, offset + 1)
    return offsets


def _encode_split_record(payload: bytes) -> bytes:
    """Returns the record of a payload that contains the magic number, in parts."""
    record = bytearray()
    part_begin = 0
    # Each split drops the 4 bytes of the magic number, which readers put back.
    for magic_offset in _find_magic_numbers(payload):
        kind = _MIDDLE if record else _FIRST
        record += _FRAME.pack(MAGIC, kind << 29 | magic_offset - part_begin) + payload[part_begin:magic_offset]
        part_begin = magic_offset + 4
    last = payload[part_begin:]
    return bytes(record + _FRAME.pack(MAGIC, _LAST << 29 | len(last)) + last + _PADDING[len(last) % 4])


def _read_payload(view: memoryview, start: int, name: str) -> tuple[memoryview | bytearray, int]:
    """Returns the payload of the record at `start` (a view, or joined parts), and the offset of the next record."""
    joined_payload = bytearray()
    offset = start
    allowed_kinds = (_COMPLETE, _FIRST)
    while True:
        if offset + _FRAME.size > len(view):
            raise DataError("the file ends inside a record", where=f"{name}, byte {start}", fix="Copy it again.")
        magic, word = _FRAME.unpack_from(view, offset)
        # 3 bits of kind, 29 bits of length.
        kind, length = word >> 29, word & (MAX_RECORD_BYTES - 1)
        if magic != MAGIC or kind not in allowed_kinds:
            raise DataError("this is not a RecordIO record", where=f"{name}, byte {offset}")
        begin, end = offset + _FRAME.size, offset + _FRAME.size + length
        if end > len(view):
            raise DataError("the file ends inside a record", where=f"{name}, byte {start}", fix="Copy it again.")
        offset = end + len(_PADDING[length % 4])
        # No copy: the payload is a view of the file.
        if kind == _COMPLETE:
            return view[begin:end], offset
        joined_payload += view[begin:end]
        if kind == _LAST:
            return joined_payload, offset
        # The magic number between two parts was left out when they were split.
        joined_payload += _MAGIC_BYTES
        allowed_kinds = (_MIDDLE, _LAST)


def _read_header(payload: memoryview | bytearray, start: int, name: str) -> tuple[int, float, int, int]:
    if len(payload) >= _HEADER.size:
        flag, label, sample_id, id2 = _HEADER.unpack_from(payload)
        # A damaged flag would claim more labels than there are bytes.
        if len(payload) >= _HEADER.size + 4 * flag:
            return flag, label, sample_id, id2
    raise DataError("the record is too short for an image", where=f"{name}, byte {start}")
