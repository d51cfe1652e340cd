from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.data._packs import read_records

from headway.core.errors import DataError
from headway.data.formats import recordio

PACK_ID = 0xFEDC_BA98_7654_3210
MAGIC = struct.pack("<I", 0xCED7230A)

# Payloads in which the magic number stands aligned, unaligned, at either end, twice in a row and cut off.
images = st.lists(st.sampled_from([MAGIC, MAGIC[:3], MAGIC[1:], b"\0", b"ab", b"abcd"]) | st.binary(max_size=9)).map(
    b"".join
)
floats = st.floats(width=32, allow_nan=False)
labels = floats | st.lists(floats, min_size=1, max_size=4).map(lambda row: np.array(row, np.float32))
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def written(folder: Path, items: list[tuple[bytes, recordio.Label]]) -> tuple[Path, list[recordio.RecordPlace]]:
    path = folder / "a.rec"
    writer = recordio.RecordioWriter(path, path.with_suffix(".idx"), PACK_ID)
    placed = [writer.append(image, label, number) for number, (image, label) in enumerate(items)]
    writer.close()
    assert writer.size_bytes == path.stat().st_size
    return path, placed


@in_one_folder
@given(items=st.lists(st.tuples(images, labels), min_size=1, max_size=8))
def test_what_is_written_is_read(tmp_path: Path, items: list[tuple[bytes, recordio.Label]]) -> None:
    path, placed = written(tmp_path, items)
    records = list(read_records(path))
    assert [record.image for record in records] == [image for image, _ in items]
    assert [(record.id, record.id2) for record in records] == [(number, PACK_ID) for number in range(len(items))]
    for record, (_, label) in zip(records, items, strict=True):
        assert type(record.label) is type(label)
        np.testing.assert_array_equal(record.label, label)
    data = memoryview(path.read_bytes())
    starts = [int(line.split("\t")[1]) for line in path.with_suffix(".idx").read_text().splitlines()]
    for (image, label), place, start in zip(items, placed, starts, strict=True):
        if place.split:
            assert place.offset == start
            assert recordio.join_record(data, place.offset, place.length) == image
        else:
            assert data[place.offset : place.offset + place.length] == image
            assert (
                recordio.compute_record_start(place.offset, np.size(label) if isinstance(label, np.ndarray) else 0)
                == start
            )
    assert recordio.read_pack_id(path) == PACK_ID


@in_one_folder
@given(items=st.lists(st.tuples(images, labels), min_size=1, max_size=8))
def test_the_magic_number_stands_aligned_only_where_a_part_begins(
    tmp_path: Path, items: list[tuple[bytes, recordio.Label]]
) -> None:
    data = written(tmp_path, items)[0].read_bytes()
    found = {at for at in range(0, len(data), 4) if data[at : at + 4] == MAGIC}
    at, heads = 0, set()
    while at < len(data):
        heads.add(at)
        at += 8 + -(-(struct.unpack_from("<I", data, at + 4)[0] & (1 << 29) - 1) // 4) * 4
    assert found == heads


def test_the_bytes_of_a_plain_record(tmp_path: Path) -> None:
    path, placed = written(tmp_path, [(b"first", 2.5), (b"2nd!", np.array([1, -2], np.float32))])
    first = struct.pack("<IIIfQQ", 0xCED7230A, 24 + 5, 0, 2.5, 0, PACK_ID) + b"first" + b"\0\0\0"
    second = struct.pack("<IIIfQQff", 0xCED7230A, 24 + 8 + 4, 2, 0.0, 1, PACK_ID, 1, -2) + b"2nd!"
    assert path.read_bytes() == first + second
    assert path.with_suffix(".idx").read_bytes() == f"0\t0\n1\t{len(first)}\n".encode()
    assert placed == [(32, 5, False), (len(first) + 40, 4, False)]


def test_the_bytes_of_a_split_record(tmp_path: Path) -> None:
    """Three parts, of kinds 1, 2 and 3; the magic numbers between them are left out."""
    path, placed = written(tmp_path, [(b"abcd" + MAGIC + b"efgh" + MAGIC + b"xyz", 1.0)])
    parts = struct.pack("<IIIfQQ", 0xCED7230A, 1 << 29 | 28, 0, 1.0, 0, PACK_ID) + b"abcd"
    parts += struct.pack("<II", 0xCED7230A, 2 << 29 | 4) + b"efgh"
    parts += struct.pack("<II", 0xCED7230A, 3 << 29 | 3) + b"xyz\0"
    assert path.read_bytes() == parts
    assert placed == [(0, 19, True)]


def test_a_split_record_is_joined_at_any_offset(tmp_path: Path) -> None:
    image = b"abcd" + MAGIC + b"x"
    path, placed = written(tmp_path, [(b"before", 0.0), (image, 0.0), (b"after", 0.0)])
    data = memoryview(path.read_bytes())
    assert recordio.join_record(data, placed[1].offset, len(image)) == image
    with pytest.raises(DataError, match="an image of 9 bytes, not 8"):
        recordio.join_record(data, placed[1].offset, len(image) - 1)
    with pytest.raises(DataError, match="not a RecordIO record"):
        recordio.join_record(data, placed[1].offset + 4, len(image))


def test_a_file_that_is_cut_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path, _ = written(tmp_path, [(b"abcd" + MAGIC + b"wxyz", 0.0)])
    data = path.read_bytes()
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(DataError, match=f"{path}, byte 0: the file ends inside a record"):
            list(read_records(path))


def test_what_is_no_shard_has_no_pack(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    with pytest.raises(DataError, match="No such file"):
        recordio.read_pack_id(path)
    for data, reason in (
        (b"", "the file is empty"),
        (b"\xff\xd8\xff\xe0 a JPEG", "not a RecordIO record"),
        (MAGIC, "ends inside a record"),
        (MAGIC + struct.pack("<I", 3 << 29 | 24) + bytes(24), "not a RecordIO record"),  # the last part of a split one
        (MAGIC + struct.pack("<I", 4) + b"text", "too short for an image"),
        (MAGIC + struct.pack("<IIfQQ", 24, 9, 0, 0, 0), "too short for an image"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=reason):
            recordio.read_pack_id(path)


def test_an_image_too_large_for_a_record_is_refused(tmp_path: Path) -> None:
    writer = recordio.RecordioWriter(tmp_path / "a.rec", tmp_path / "a.idx", PACK_ID)
    with pytest.raises(DataError, match="does not fit into a record"):
        writer.append(bytes(1 << 29), 0.0, 0)
    writer.abandon()
