from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load, save

from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data import opening
from headway.data.columns import COLUMN_TYPES, COLUMNS_FILE, FLAG_NOT_JPEG, FLAG_SPLIT, DatasetDescription, Shard
from headway.data.data_recipe import VerifyMode
from headway.data.dataset import Dataset
from headway.data.formats import recordio
from headway.data.pack import pack
from headway.data.shards import MappedShards, PreadShards

MAGIC = struct.pack("<I", recordio.MAGIC)
SIZES = ((8, 8), (9, 5), (16, 3))
in_one_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def jpeg(seed: int, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
    channels = len(mode)
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), np.uint8)
    buffer = io.BytesIO()
    Image.frombytes(mode, size, values.tobytes()).save(buffer, "JPEG")
    return buffer.getvalue()


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Images of two classes: JPEGs of several sizes, a PNG, and one that holds RecordIO's magic number."""
    out = {f"{name}/{number}.jpg": jpeg(number, SIZES[number % 3]) for name in ("cat", "dog") for number in range(9)}
    png = io.BytesIO()
    Image.new("RGB", (5, 4), (1, 2, 3)).save(png, "PNG")
    out["cat/n\u00e4me.png"] = png.getvalue()
    split = jpeg(77)
    out["dog/split.jpg"] = split + bytes(-len(split) % 4) + MAGIC * 3 + b"tail"
    return out


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> Path:
    root = tmp_path_factory.mktemp("dataset")
    pack(folder_of(root / "src", files), root / "dst", shard_bytes=4000, mode="keep")
    return root / "dst"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def place_of(data: Dataset, name: str) -> int:
    return next(place for place in range(len(data)) if data.name(place) == name)


def change(folder: Path, columns: dict[str, Any] | None = None, **description: Any) -> None:
    """Writes the columns file anew with some columns or parts of its description changed."""
    path = folder / COLUMNS_FILE
    with safe_open(path, framework="numpy") as file:
        metadata = json.loads(file.metadata()["headway"])
    tensors = {**load(path.read_bytes()), **(columns or {})}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    path.write_bytes(save(tensors, metadata={"headway": json.dumps({**metadata, **description})}))


# What a good pack gives


def test_every_sample_is_read_as_it_was_packed(packed: Path, files: dict[str, bytes]) -> None:
    data = opening.open(packed)
    assert len(data) == len(files)
    assert sorted(data.name(place) for place in range(len(data))) == sorted(files)
    ids = np.random.default_rng(0).permutation(len(data))
    for place, found in zip(ids, data.read(ids), strict=True):
        name = data.name(place)
        assert bytes(found) == files[name]
        with Image.open(io.BytesIO(files[name])) as image:
            assert (data.width[place], data.height[place]) == image.size
        assert data.classes[data.label[place]] == name.split("/")[0]
        assert data.crc32c[place] == crc32c(files[name])
        assert data.length[place] == len(files[name])
        assert bool(data.flags[place] & FLAG_NOT_JPEG) == name.endswith(".png")
        assert bool(data.flags[place] & FLAG_SPLIT) == (name == "dog/split.jpg")
    assert len(data.read([])) == 0
    assert len(data.description.shards) > 2


def test_records_in_one_piece_are_views_of_the_mapping_and_outlive_it(packed: Path, files: dict[str, bytes]) -> None:
    data = opening.open(packed)
    places = [place_of(data, "cat/0.jpg"), place_of(data, "dog/3.jpg")]
    first, again = data.read(places), data.read(places)
    assert (first.address == again.address).all()
    assert first[0].readonly
    data.close()
    assert bytes(first[0]) == files["cat/0.jpg"]
    assert bytes(data.read(places)[1]) == files["dog/3.jpg"]  # opened again
    view = data.read(places)[0]  # of Records that nobody else holds
    data.close()
    del data
    gc.collect()
    assert bytes(view) == files["cat/0.jpg"]


def test_the_description_comes_back_as_it_went(packed: Path) -> None:
    found = opening.open(packed).description
    assert DatasetDescription.from_metadata(found.to_metadata()) == found
    assert (found.classes, found.class_counts) == (("cat", "dog"), (10, 10))
    assert (found.channels, found.common_size, found.label_kind) == (3, None, "class")
    assert opening.open(packed).fingerprint == found.fingerprint
    assert opening.open(packed).classes == found.classes


def test_a_set_of_equal_gray_images_says_so(tmp_path: Path) -> None:
    files = {f"{name}/{number}.jpg": jpeg(number, (6, 4), "L") for name in "ab" for number in range(3)}
    pack(folder_of(tmp_path / "src", files), tmp_path / "dst")
    found = opening.open(tmp_path / "dst").description
    assert (found.channels, found.common_size) == (1, (6, 4))


def test_columns_are_mapped_and_cannot_be_written(packed: Path) -> None:
    data = opening.open(packed)
    for name in (*COLUMN_TYPES, "label"):
        column = getattr(data, name)
        assert len(column) == len(data)
        assert not column.flags.writeable
        assert not column.flags.owndata


def test_a_pack_without_names_gives_numbers(copy: Path) -> None:
    change(copy, {"name": None, "name_offset": None})
    assert opening.open(copy).name(3) == "3"


def test_labels_may_be_vectors_and_numbers(copy: Path) -> None:
    several = np.random.default_rng(0).random((20, 4), np.float32)
    for label in (several, several[:, 0].copy()):
        change(copy, {"label": label})
        assert (opening.open(copy).label == label).all()


# Reading by pread, as on a network


@pytest.mark.parametrize("mapped", [False, True])
def test_mapped_or_not_the_bytes_are_the_same(packed: Path, files: dict[str, bytes], mapped: bool) -> None:
    data = opening.open(packed, mapped=mapped)
    ids = np.arange(len(data))
    for _ in range(2):
        names = [data.name(place) for place in range(len(data))]
        records = data.read(ids)
        assert [bytes(record) for record in records] == [files[name] for name in names]
        assert records.length.tolist() == [len(files[name]) for name in names]
        data.close()
        data.close()


@settings(in_one_folder, max_examples=40)
@given(parts=st.lists(st.sampled_from([MAGIC, b"abcd", b"ab"]), max_size=300), labels=st.integers(0, 3000))
@pytest.mark.parametrize("kind", [MappedShards, PreadShards])
def test_a_split_record_is_joined_whatever_it_holds(
    tmp_path: Path, kind: type[MappedShards | PreadShards], parts: list[bytes], labels: int
) -> None:
    image = b"".join([*parts, b"\0" * (-sum(map(len, parts)) % 4), MAGIC])
    writer = recordio.RecordioWriter(tmp_path / "a.rec", tmp_path / "a.idx", 1)
    label = np.frombuffer(MAGIC * labels, np.float32) if labels else 0.0
    placed = [writer.append(image, label, 0) for _ in range(2)]
    writer.close()
    assert placed[1].split
    source = kind(tmp_path, [Shard(name="a.rec", size=writer.size_bytes)], columns_of(placed))
    assert [bytes(record) for record in source.read(np.array([1, 0, 1]))] == [image] * 3
    source.close()


def columns_of(placed: list[recordio.RecordPlace]) -> dict[str, Any]:
    return {
        "shard": np.zeros(len(placed), np.uint16),
        "offset": np.array([place.offset for place in placed], np.uint64),
        "length": np.array([place.length for place in placed], np.uint32),
        "flags": np.array([FLAG_SPLIT * place.split for place in placed], np.uint8),
    }


@pytest.mark.parametrize("mapped", [False, True])
def test_damaged_columns_lead_nowhere(copy: Path, mapped: bool) -> None:
    """A record that lies outside of its shard, or in a shard that does not exist, is empty; its neighbours are not."""
    data = opening.open(copy)
    whole = [bytes(record) for record in data.read(range(20))]
    good = {name: np.array(getattr(data, name)) for name in ("shard", "offset", "length")}  # the file is written anew
    size = np.array([data.description.shards[shard].size for shard in good["shard"]], np.uint64)
    for name, damaged in (
        ("offset", size),
        ("offset", size - good["length"] + np.uint64(1)),
        ("offset", np.full(20, (1 << 64) - 1, np.uint64)),
        ("length", (size + np.uint64(1)).astype(np.uint32)),
        ("length", np.full(20, (1 << 32) - 1, np.uint32)),
        ("shard", np.full(20, len(data.description.shards), np.uint16)),
        ("shard", np.full(20, (1 << 16) - 1, np.uint16)),
    ):
        for ids in ([3], [3, 7], range(0, 20, 3)):
            column = good[name].copy()
            column[ids] = damaged[ids]
            change(copy, {name: column})
            found = [bytes(record) for record in opening.open(copy, mapped=mapped).read(range(20))]
            assert found == [b"" if place in ids else whole[place] for place in range(20)]
            change(copy, {name: good[name]})


def test_a_shard_that_is_cut_after_opening_gives_short_records(copy: Path) -> None:
    data, slow = opening.open(copy), opening.open(copy, mapped=False)
    path = copy / data.description.shards[0].name
    size = path.stat().st_size
    os.truncate(path, size - 100)
    last = int(np.flatnonzero(data.shard == 0)[-1])
    assert len(data.read([last])[0]) == 0
    assert len(slow.read([last])[0]) < data.length[last]
    path.unlink()
    data.close()
    with pytest.raises(DataError, match="cannot be read"):
        data.read([last])


@pytest.mark.check
def test_no_descriptor_is_left_open(packed: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    shards = len(opening.open(packed).description.shards)
    for mapped in (False, True):
        for close in (False, True):
            data = opening.open(packed, mapped=mapped)
            records = data.read(range(len(data)))
            assert descriptors() == before + 1 + shards  # one a mapping, that of the columns too
            if close:
                data.close()
                del records
                assert descriptors() == before + 1
            del data
            records = None
    assert descriptors() == before


# Checksums


def flip_a_byte(folder: Path, data: Dataset, sample: int, at: int = 30) -> None:
    with (folder / data.description.shards[data.shard[sample]].name).open("r+b") as file:
        file.seek(int(data.offset[sample]) + at)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x40]))


def test_a_checksum_is_looked_at_first_always_or_never(copy: Path) -> None:
    data = opening.open(copy)
    ids = np.arange(len(data))

    def damaged(verify: VerifyMode, data: Dataset = data) -> list[int]:
        records, look = data.read(ids), data.select_unchecked(ids, verify)
        good = np.array([crc32c(record) for record in records]) == data.crc32c
        data.mark_checked(ids[look & good])
        return np.flatnonzero(look & ~good).tolist()

    flip_a_byte(copy, data, 4)
    assert damaged("never") == []
    assert damaged("first") == [4]
    assert damaged("first") == [4]  # a bad one is never taken for seen
    flip_a_byte(copy, data, 9)
    assert damaged("first") == [4]  # 9 was seen while it was good
    assert damaged("always") == [4, 9]
    flip_a_byte(copy, data, 4)
    flip_a_byte(copy, data, 9)
    assert damaged("first") == []  # both are mended
    flip_a_byte(copy, data, 4)
    assert damaged("first") == []
    assert damaged("always") == [4]
    assert damaged("first", opening.open(copy)) == [4]  # another opening looks for itself


@pytest.mark.parametrize("mapped", [False, True])
def test_a_split_record_that_does_not_fit_together_is_empty(copy: Path, files: dict[str, bytes], mapped: bool) -> None:
    data = opening.open(copy, mapped=mapped)
    sample = place_of(data, "dog/split.jpg")
    flip_a_byte(copy, data, sample, at=0)  # of its magic number
    other = (sample + 1) % len(data)
    assert [bytes(record) for record in data.read([sample, other])] == [b"", files[data.name(other)]]


# What does not open


def refusal(folder: Path, kind: type[HeadwayError] = DataError) -> str:
    with pytest.raises(kind) as refused:
        opening.open(folder)
    assert type(refused.value) is kind
    assert refused.value.fix
    return str(refused.value)


def test_what_is_no_pack_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    assert refusal(tmp_path / "no", UsageError) == (
        f"{tmp_path}/no: there is no such file or folder. Pack one: headway pack SRC DST."
    )
    folder_of(tmp_path / "src", files)
    pack(tmp_path / "src", tmp_path / "dst", split=0.2)
    assert refusal(tmp_path / "dst", UsageError) == (
        f"{tmp_path}/dst: this folder holds several packs. Name one: {tmp_path}/dst/train."
    )


def test_a_pack_of_a_later_format_is_refused(copy: Path) -> None:
    change(copy, format="origami")
    assert "the pack format 'origami' is not known" in refusal(copy)


@pytest.mark.parametrize("kept", [0, 3, 8, 100, -1])
def test_a_truncated_columns_file_is_refused(copy: Path, kept: int) -> None:
    path = copy / COLUMNS_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    cut = f"the columns file is cut: {len(whole) - 1} of {len(whole)} bytes"
    said = cut if kept < 0 else "the columns file is damaged"
    found = refusal(copy)
    assert found.startswith(f"{path}: {said}")
    assert found.endswith(". Pack the data again, or copy the folder again.")


@pytest.mark.parametrize(
    "header",
    [
        b"garbage",
        b"3",
        b"[]",
        b"{}",
        b"null",
        b'{"__metadata__": {}}',
        b'{"__metadata__": {}, "label": 3}',
        b"\xff" * 20,
    ],
)
def test_columns_of_garbage_are_refused(copy: Path, header: bytes) -> None:
    for data in (header, struct.pack("<Q", len(header)) + header, struct.pack("<Q", len(header)) + header + bytes(100)):
        (copy / COLUMNS_FILE).write_bytes(data)
        assert "the columns file is " in refusal(copy)


@in_one_folder
@given(data=st.data())
def test_no_change_of_the_header_makes_anything_but_a_sentence(copy: Path, data: st.DataObject) -> None:
    path = copy / COLUMNS_FILE
    whole = path.read_bytes()
    changed = bytearray(whole)
    end = 8 + struct.unpack_from("<Q", whole)[0]
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from(b'0123456789{}[]",:-.eUIF\0\xff a'))
    path.write_bytes(changed)
    with contextlib.suppress(HeadwayError):
        opening.open(copy)
    path.write_bytes(whole)


def test_columns_that_do_not_belong_together_are_refused(copy: Path) -> None:
    intact = (copy / COLUMNS_FILE).read_bytes()
    for columns, said in [
        ({"width": None}, "columns are missing or of another type: width"),
        ({"width": None, "flags": None}, "columns are missing or of another type: width, flags"),
        ({"label": None}, "columns are missing or of another type: label"),
        ({"offset": np.zeros(20, np.uint32)}, "columns are missing or of another type: offset"),
        ({"flags": np.zeros(19, np.uint8)}, "its columns have different lengths"),
        ({"label": np.zeros(21, np.int64)}, "its columns have different lengths"),
        ({"label": np.zeros((), np.int64)}, "columns have the wrong number of dimensions: label"),
        ({"label": np.zeros(20, np.float64)}, "the columns file is damaged"),
    ]:
        (copy / COLUMNS_FILE).write_bytes(intact)
        change(copy, columns)
        assert f"{COLUMNS_FILE}: {said}. Pack the data again" in refusal(copy)


@pytest.mark.parametrize("mapped", [False, True])
def test_an_empty_split_record_of_a_shard_that_does_not_exist_is_empty(copy: Path, mapped: bool) -> None:
    columns = {"shard": 999, "offset": 0, "length": 0, "flags": FLAG_SPLIT}
    data = opening.open(copy)
    change(copy, {name: np.full_like(getattr(data, name), value) for name, value in columns.items()})
    assert [bytes(record) for record in opening.open(copy, mapped=mapped).read(range(20))] == [b""] * 20


def test_a_shard_that_is_no_plain_file_is_refused(copy: Path) -> None:
    shards = [{"name": shard.name, "size": shard.size} for shard in opening.open(copy).description.shards]
    os.mkfifo(copy / "pipe")
    for name, said in (("pipe", "is not a regular file"), ("a" * 5000, "cannot be opened"), ("a\0b", "as shards, not")):
        change(copy, shards=[shards[0] | {"name": name}, *shards[1:]])
        assert said in refusal(copy)


def test_a_missing_or_short_shard_is_named(copy: Path) -> None:
    path = copy / "shard-00001.rec"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    said = f"{path}: the shard has {len(whole) - 5} bytes and should have {len(whole)}. Copy it again, or pack again."
    assert refusal(copy) == said
    path.write_bytes(whole + b"x")
    assert f"{path}: the shard has {len(whole) + 1} bytes" in refusal(copy)
    for data, said in (
        (b"", "the file is empty"),
        (whole[:20], "the file ends inside a record"),
        (bytes(900), "not a Rec"),
    ):
        path.write_bytes(data)
        with pytest.raises(DataError, match=said) as refused:
            opening.open(copy)
        assert str(path) in str(refused.value)
    path.unlink()
    assert refusal(copy) == f"{path}: a shard is missing. Copy the folder again, or pack again."


def test_shards_of_two_packs_do_not_mix(tmp_path: Path) -> None:
    """Both packs have the same numbers, names and sizes; only which file holds which class differs."""
    image = jpeg(0)
    for name, classes in (("one", "ab"), ("two", "ac")):
        folder_of(tmp_path / name, {f"{kind}/{number}.jpg": image for kind in classes for number in range(4)})
        pack(tmp_path / name, tmp_path / f"{name}.packed")
    one, two = (tmp_path / f"{name}.packed/shard-00000.rec" for name in ("one", "two"))
    assert one.stat().st_size == two.stat().st_size
    opening.open(one.parent)
    shutil.copy(two, one)
    assert refusal(one.parent) == (
        f"{one}: this shard belongs to another pack. Keep the files of one pack together, or pack again."
    )


# Size

GROWTH = """
import sys
import numpy, psutil
from headway.data import opening
process = psutil.Process()
before = process.memory_info().rss
data = opening.open(sys.argv[1])
after = process.memory_info().rss
assert len(data) == 10_000_000
print(after - before, data.length[9_999_999], data.name(9_999_999))
"""


@pytest.mark.fresh
def test_opening_does_not_read_the_columns(packed: Path, tmp_path: Path) -> None:
    """10 million samples in a sparse file; their columns would take 340 MB."""
    n = 10_000_000
    sizes = {"U8": 1, "U16": 2, "U32": 4, "U64": 8, "I64": 8}
    entries: dict[str, Any] = {}
    at = 0
    for name, kind, count in [*((name, kind, n) for name, kind in COLUMN_TYPES.items()), ("label", "I64", n)]:
        entries[name] = {"dtype": kind, "shape": [count], "data_offsets": [at, at + count * sizes[kind]]}
        at += count * sizes[kind]
    entries["__metadata__"] = opening.open(packed).description.to_metadata()
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    for shard in packed.glob("shard-*"):
        shutil.copy(shard, tmp_path)
    with (tmp_path / COLUMNS_FILE).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + at)
    done = subprocess.run([sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    growth, length, name = done.stdout.split()
    assert int(growth) < 20e6
    assert (length, name) == ("0", "9999999")
