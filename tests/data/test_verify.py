from __future__ import annotations

import io
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import load_file, save_file

from headway.core.errors import DataError, UsageError
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, FLAG_SPLIT
from headway.data.pack import pack
from headway.data.verify import Damage, verify

CLASSES, PER_CLASS = ("cat", "dog", "eel"), 6
SAMPLES = len(CLASSES) * PER_CLASS


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of several shards, one record of which is split."""
    root, random = tmp_path_factory.mktemp("verify"), np.random.default_rng(0)
    for name in CLASSES:
        (root / "src" / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            buffer = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(buffer, "JPEG")
            data = buffer.getvalue()
            if (name, number) == ("dog", 3):  # after the end of the image, where decoders do not look
                data += bytes(-len(data) % 4) + struct.pack("<I", 0xCED7230A) + b"tail"
            (root / "src" / name / f"{number}.jpg").write_bytes(data)
    pack(root / "src", root / "dst", mode="keep", shard_bytes=4000)
    return root / "dst"


@pytest.fixture
def copy(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed, tmp_path / "copy")
    return tmp_path / "copy"


def test_an_intact_pack_has_no_damage(packed: Path) -> None:
    calls: list[tuple[int, int]] = []
    assert verify(packed, lambda done, total: calls.append((done, total))).damages == []
    assert calls[-1] == (SAMPLES, SAMPLES)
    assert len(opening.open(packed).description.shards) > 2
    assert (opening.open(packed).flags & FLAG_SPLIT).sum() == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_a_record_is_found(copy: Path, data: st.DataObject) -> None:
    opened = opening.open(copy)
    sample = data.draw(st.integers(0, SAMPLES - 1))
    split = bool(opened.flags[sample] & FLAG_SPLIT)
    offset, length = int(opened.offset[sample]), int(opened.length[sample])
    first, last = (offset, offset + length + 32) if split else (offset - 32, offset + length)
    shard = copy / opened.description.shards[opened.shard[sample]].name
    intact = shard.read_bytes()
    damaged = bytearray(intact)
    damaged[data.draw(st.integers(first, last - 1))] ^= 1 << data.draw(st.integers(0, 7))
    shard.write_bytes(damaged)
    found = verify(copy).damages
    shard.write_bytes(intact)
    assert [(damage.index, damage.name, damage.shard, damage.offset) for damage in found] == [
        (sample, opened.name(sample), shard.name, offset)
    ]


def test_every_byte_of_a_records_header_is_checked(copy: Path) -> None:
    offset, path = int(opening.open(copy).offset[2]), copy / "shard-00000.rec"
    intact = path.read_bytes()
    for at in range(offset - 32, offset):
        path.write_bytes(intact[:at] + bytes([intact[at] ^ 1]) + intact[at + 1 :])
        assert [damage.index for damage in verify(copy).damages] == [2], at - offset


def test_every_damaged_record_is_named(copy: Path) -> None:
    opened = opening.open(copy)
    damaged = [1, 2, 9, SAMPLES - 1]
    for sample in damaged:
        with open(copy / opened.description.shards[opened.shard[sample]].name, "r+b") as file:
            file.seek(int(opened.offset[sample]) + 40)
            file.write(b"\0\1\2\3")
    found = verify(copy).damages
    assert [damage.index for damage in found] == damaged
    assert str(found[0]) == (
        f"sample 1 ({opened.name(1)}), shard-00000.rec at byte {opened.offset[1]}: the image's checksum does not match"
    )


def test_a_missing_shard_is_named_once(copy: Path) -> None:
    lost = int((opening.open(copy).shard == 1).sum())
    (copy / "shard-00001.rec").unlink()
    reason = f"the file cannot be read (No such file or directory); its {lost} samples are lost"
    assert verify(copy).damages == [Damage(index=None, name="", shard="shard-00001.rec", offset=0, reason=reason)]


def test_a_short_shard_is_named_with_the_records_it_lost(copy: Path) -> None:
    opened, path = opening.open(copy), copy / "shard-00000.rec"
    data = path.read_bytes()
    last = int(np.flatnonzero(opened.shard == 0)[-1])
    path.write_bytes(data[: int(opened.offset[last]) + 5])
    found = verify(copy).damages
    assert [damage.index for damage in found] == [None, last]
    size = int(opened.offset[last]) + 5
    assert found[0].reason == f"the shard has {size:,} bytes and should have {len(data):,}"
    assert found[1].reason == "the file ends inside a record"
    path.write_bytes(b"")
    assert [damage.index for damage in verify(copy).damages] == [None]


def test_a_shard_of_another_pack_is_named(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "src/a").mkdir(parents=True)
    for number in range(40):
        Image.new("RGB", (5, 5), (number, 0, 0)).save(tmp_path / f"src/a/{number}.png")
    pack(tmp_path / "src", tmp_path / "other")
    (tmp_path / "other/shard-00000.rec").rename(copy / "shard-00001.rec")
    (damage,) = verify(copy).damages
    assert damage.reason.startswith("the shard belongs to another pack; its ")


def test_both_sets_of_a_split_pack_are_checked(packed: Path, tmp_path: Path) -> None:
    pack(packed.parent / "src", tmp_path / "dst", split=0.3)
    calls: list[tuple[int, int]] = []
    assert verify(tmp_path / "dst", lambda done, total: calls.append((done, total))).damages == []
    assert calls[-1] == (SAMPLES, SAMPLES)
    with open(tmp_path / "dst/eval/shard-00000.rec", "r+b") as file:
        file.seek(100)
        file.write(b"####")
    (damage,) = verify(tmp_path / "dst").damages
    assert (damage.shard, damage.index) == ("eval/shard-00000.rec", 0)
    assert verify(tmp_path / "dst").samples == {"train": 12, "eval": 6}
    with pytest.raises(UsageError, match="this is an address, not a path on this machine"):
        verify("http://host/dst")
    with pytest.raises(UsageError, match="not a packed data set"):
        verify(packed.parent / "src")
    with pytest.raises(UsageError, match="the folder does not exist"):
        verify(tmp_path / "nowhere")


def test_a_lost_set_is_damage(packed: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    pack(packed.parent / "src", dst, split=0.3)
    for lost, whole in (("train", "eval"), ("eval", "train")):
        assert opening.open(dst / whole).description.sets == ("train", "eval")
        one = dst / lost
        for file in ("shard-00000.rec", "columns.safetensors", "shard-00000.idx"):
            (one / file).rename(tmp_path / file)
            if file == "shard-00000.rec":
                continue
            found = verify(dst)
            assert found.samples.keys() == {whole}
            assert [str(damage) for damage in found.damages] == [
                f"{lost}/columns.safetensors: the columns are missing; its samples are lost"
            ]
        one.rmdir()
        assert [str(damage) for damage in verify(dst).damages] == [
            f"{lost}/: the whole set is missing; its samples are lost"
        ]
        assert verify(dst / whole).damages == []  # it may be copied alone
        one.mkdir()
        for file in ("shard-00000.rec", "columns.safetensors", "shard-00000.idx"):
            (tmp_path / file).rename(one / file)
    for name in ("train", "eval"):
        (dst / name / "columns.safetensors").unlink()
    assert len(verify(dst).damages) == 2
    assert verify(dst).samples == {}


def test_a_pack_without_a_word_of_its_sets_still_opens(packed: Path, tmp_path: Path) -> None:
    pack(packed.parent / "src", tmp_path / "dst", split=0.3)
    for name in ("train", "eval"):
        path = tmp_path / "dst" / name / COLUMNS_FILE
        fields = json.loads(opening.open(path.parent).description.to_metadata()["headway"])
        del fields["parts"]
        save_file(load_file(path), path, metadata={"headway": json.dumps(fields)})
        assert opening.open(path.parent).description.sets == ()
    assert verify(tmp_path / "dst").damages == []
    (tmp_path / "dst/train" / COLUMNS_FILE).unlink()
    assert len(verify(tmp_path / "dst").damages) == 1


def test_columns_that_lead_nowhere_are_named(copy: Path) -> None:
    path = copy / COLUMNS_FILE
    description, columns = opening.open(copy).description, load_file(path)
    columns["offset"][0] = 31
    columns["offset"][1] = 1 << 63
    columns["shard"][2] = 99
    save_file(columns, path, metadata=description.to_metadata())
    found = verify(copy).damages
    assert [(damage.index, damage.shard) for damage in found] == [
        (None, COLUMNS_FILE),
        (0, "shard-00000.rec"),
        (1, "shard-00000.rec"),
        (2, COLUMNS_FILE),
    ]
    assert [damage.reason for damage in found[1:]] == [
        "no record can begin there",
        "the file ends inside a record",
        "there is no shard 99",
    ]


def test_a_damaged_columns_file_is_named_or_refused(copy: Path) -> None:
    path = copy / COLUMNS_FILE
    intact = path.read_bytes()
    begin = 8 + struct.unpack_from("<Q", intact)[0]
    for at in range(begin, len(intact), 7):
        damaged = bytearray(intact)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        assert verify(copy).damages[0].shard == COLUMNS_FILE
    for data in (b"", intact[:4], intact[: begin - 9], intact[:-1], b"x" * len(intact)):
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"the columns file is (damaged|cut)"):
            verify(copy)


def test_columns_that_do_not_belong_together_are_refused(copy: Path) -> None:
    """As `opening.open` refuses them, in sentences."""
    path = copy / COLUMNS_FILE
    whole = load_file(path)
    fields = json.loads(opening.open(copy).description.to_metadata()["headway"])
    wrong: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"offset": whole["offset"].astype(np.int64)}, {}),
        ({"flags": whole["flags"][:-1]}, {}),
        ({"label": whole["label"][:-1]}, {}),
        ({"name": None}, {}),
        ({"name_offset": None}, {}),
        ({"name_offset": whole["name_offset"][:-1]}, {}),
        ({}, {"shards": [{"name": 5, "size": 5}]}),
        ({}, {"shards": [{"name": "shard-00000.rec", "size": "5"}]}),
        ({}, {"shards": None}),
        ({}, {"common_size": 5}),
    ]
    for changes, described in wrong:
        changed = {name: column for name, column in (whole | changes).items() if column is not None}
        save_file(changed, path, metadata={"headway": json.dumps(fields | described)})
        with open(copy / "shard-00000.rec", "r+b") as file:
            file.write(b"####")  # a record that is damaged is named
        for look in (verify, opening.open):
            with pytest.raises(DataError, match=r"columns\.safetensors: "):
                look(copy)


@pytest.fixture(params=["tar", "lmdb", "raw"])
def other(request: pytest.FixtureRequest, packed: Path, tmp_path: Path) -> Path:
    """The same images in another format, in several shards."""
    mode = "raw" if request.param == "raw" else "keep"
    pack(
        packed.parent / "src",
        tmp_path / "other",
        format=request.param,
        mode=mode,
        shard_bytes=8_000 if mode == "keep" else 1_000,
    )
    return tmp_path / "other"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(data=st.data())
def test_any_flipped_bit_of_an_image_is_found_in_every_format(other: Path, data: st.DataObject) -> None:
    opened = opening.open(other)
    sample = data.draw(st.integers(0, SAMPLES - 1))
    offset = int(opened.offset[sample])
    shard = other / opened.description.shards[opened.shard[sample]].name
    intact = shard.read_bytes()
    damaged = bytearray(intact)
    damaged[offset + data.draw(st.integers(0, int(opened.length[sample]) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert verify(other).damages == []
    shard.write_bytes(damaged)
    (found,) = verify(other).damages
    shard.write_bytes(intact)
    assert (found.index, found.name, found.shard, found.offset) == (sample, opened.name(sample), shard.name, offset)


def test_damaged_shards_are_named_in_every_format(other: Path, tmp_path: Path) -> None:
    shards = opening.open(other).description.shards
    path = other / shards[1].name
    intact = path.read_bytes()
    lost = int((opening.open(other).shard == 1).sum())
    path.write_bytes(intact[:-3] + b"abc")
    (found,) = verify(other).damages
    assert (found.index, found.reason) == (None, f"the shard belongs to another pack; its {lost} samples are lost")
    path.write_bytes(intact[:-16] + bytes(16))
    (found,) = verify(other).damages
    assert (found.index, found.reason) == (None, "the end of the shard is damaged")
    for data in (intact[:-16] + bytes(16), (other / shards[0].name).read_bytes()[:-16] + b"x" * 16):
        path.write_bytes(data)
        with pytest.raises(DataError, match="belongs to another pack"):
            opening.open(other)
    path.write_bytes(intact[: len(intact) // 2])
    found, *records = verify(other).damages
    assert (found.index, found.shard) == (None, shards[1].name)
    assert records
    assert {record.reason for record in records} == {"the file ends inside the image"}
    path.unlink()
    (found,) = verify(other).damages
    assert found.reason.endswith(f"its {lost} samples are lost")
