"""Any source to any format: nothing is lost on the way, whatever the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests._support import headway, refused
from tests.data._foreign import cache
from tests.data._packs import contents, folder, names_of, picture, sources
from tests.data.tiers._server import Server

from headway.core.errors import DataError, UsageError
from headway.data import opening
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.pack import pack
from headway.data.reference import decode_image
from headway.data.verify import verify

__all__ = ["cache"]

FILES = ("recordio", "tar", "lmdb")
"""Formats that hold image files."""


def known(packed: Dataset) -> dict[str, Any]:
    """All that a reader can know of a pack but where things lie."""
    about = packed.description
    return {
        "names": names_of(packed),
        "labels": packed.label.tolist(),
        "kind": (packed.label.dtype, packed.label.shape, about.label_kind, about.classes, about.class_counts),
        "sizes": (packed.width.tolist(), packed.height.tolist(), about.channels, about.common_size),
    }


def pixels_of(packed: Dataset) -> dict[str, NDArray[np.uint8]]:
    """Decoded pixels, [h, w, c], of files and raw samples alike."""
    found = {}
    channels = packed.description.channels
    for sample, data in enumerate(packed.read(np.arange(len(packed)))):
        shape = (int(packed.height[sample]), int(packed.width[sample]), channels)
        raw = np.frombuffer(data, np.uint8) if packed.flags[sample] & FLAG_RAW else None
        image = np.asarray(decode_image(data, channels)) if raw is None else raw
        found[packed.name(sample)] = image.reshape(shape)
    return found


def same_pixels(one: Dataset, other: Dataset) -> None:
    first, second = pixels_of(one), pixels_of(other)
    assert first.keys() == second.keys()
    for name, image in first.items():
        np.testing.assert_array_equal(image, second[name], err_msg=name)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Classes of unlike sizes, image files of several kinds and sizes, one with RecordIO's magic number in it."""
    root = folder(tmp_path_factory.mktemp("mixed") / "src", {"cat": 7, "dog": 5, "eel.v2": 2})
    (root / "cat/png.tar.png").write_bytes(picture(50, "PNG", (9, 5)))
    (root / "cat/deep").mkdir()
    (root / "cat/deep/large.jpg").write_bytes(picture(51, size=(70, 90)))
    (root / "dog/tiff.tif").write_bytes(picture(52, "TIFF", (3, 4)))
    (root / "dog/gray.jpg").write_bytes(picture(53, mode="L"))
    data = picture(54)
    (root / "dog/split.jpg").write_bytes(data + bytes(-len(data) % 4) + (0xCED7230A).to_bytes(4, "little"))
    return root


@pytest.mark.parametrize(("first", "second"), [*itertools.product(FILES, FILES)])
def test_a_pack_of_a_pack_holds_the_same(mixed: Path, tmp_path: Path, first: str, second: str) -> None:
    pack(mixed, tmp_path / "a", mode="keep", format=first, shard_bytes=8000)
    pack(tmp_path / "a", tmp_path / "b", mode="keep", format=second, shard_bytes=5000)
    one, other = opening.open(tmp_path / "a"), opening.open(tmp_path / "b")
    assert (one.description.format, other.description.format) == (first, second)
    assert known(one) == known(other)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == sources(mixed)
    assert np.array_equal(one.crc32c, other.crc32c)
    assert verify(tmp_path / "b").damages == []


@pytest.mark.parametrize("format", FILES)
def test_pixels_survive_raw_and_back(mixed: Path, tmp_path: Path, format: Any) -> None:
    pack(mixed, tmp_path / "a", mode="keep", format=format)
    pack(tmp_path / "a", tmp_path / "raw", format="raw", shard_bytes=4000)
    pack(tmp_path / "raw", tmp_path / "b", format=format)
    pack(tmp_path / "b", tmp_path / "again", mode="raw")
    packs = [opening.open(tmp_path / name) for name in ("a", "raw", "b", "again")]
    assert [packed.description.format for packed in packs] == [format, "raw", format, "raw"]
    for packed in packs[1:]:
        assert known(packed) == known(packs[0])
        same_pixels(packs[0], packed)
        assert verify(packed.folder).damages == []


labels = st.one_of(
    st.tuples(st.just("label"), st.lists(st.sampled_from(["a", "b;c", "\u732b", "x, y"]), min_size=3, max_size=3)),
    st.tuples(st.just("labels"), st.lists(st.lists(st.sampled_from("abc"), unique=True), min_size=3, max_size=3)),
    st.tuples(st.just("value"), st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3)),
    st.tuples(
        st.just("value"),
        st.lists(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=2, max_size=2), min_size=3, max_size=3),
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=25)
@given(data=st.data(), labelled=labels.filter(lambda found: found[0] != "labels" or any(found[1])))
def test_labels_of_every_kind_survive_any_way(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, labelled: tuple[str, list[Any]]
) -> None:
    root = tmp_path_factory.mktemp("labels")
    key, values = labelled
    for number in range(3):
        (root / f"{number}.png").write_bytes(picture(number, "PNG", (4, 3)))
    lines = [json.dumps({"path": f"{number}.png", key: value}) for number, value in enumerate(values)]
    (root / "list.jsonl").write_text("\n".join(lines))
    way = data.draw(st.lists(st.sampled_from([*FILES, "raw"]), min_size=1, max_size=3))
    place, wanted = root / "list.jsonl", None
    for step, format in enumerate(way):
        done = pack(place, root / str(step), format=format)
        packed = opening.open(done.folders[0])
        wanted = wanted or known(packed)
        assert known(packed) == wanted
        place = done.folders[0]


def test_both_parts_of_a_pack_are_packed_again(mixed: Path, tmp_path: Path) -> None:
    pack(mixed, tmp_path / "a", mode="keep", split=0.2)
    done = pack(tmp_path / "a", tmp_path / "b", mode="keep", format="tar")
    assert done.folders == (tmp_path / "b/train", tmp_path / "b/eval")
    for part in ("train", "eval"):
        assert known(opening.open(tmp_path / "a" / part)) == known(opening.open(tmp_path / "b" / part))
        assert contents(tmp_path / "a" / part) == contents(tmp_path / "b" / part)
    done = pack(tmp_path / "a/train", tmp_path / "c", mode="keep", split=0.2)
    assert contents(done.folders[0]) | contents(done.folders[1]) == contents(tmp_path / "a/train")


# Foreign data


def cifar(root: Path, name: str, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """A batch of CIFAR-10, binary: pixels [n, 32, 32, 3] and labels."""
    chance = np.random.default_rng(len(name))
    planes, labels = chance.integers(0, 256, (count, 3, 32, 32), np.uint8), chance.integers(0, 10, count, np.uint8)
    labels[:10] = range(10)
    root.mkdir(exist_ok=True)
    (root / name).write_bytes(
        b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, planes, strict=True))
    )
    return planes.transpose(0, 2, 3, 1), labels


@pytest.mark.parametrize("format", [None, *FILES])
def test_train_and_test_of_cifar_become_train_and_eval(tmp_path: Path, format: Any) -> None:
    root = tmp_path / "cifar-10-batches-bin"
    parts = {"train": cifar(root, "data_batch_1.bin", 30), "eval": cifar(root, "test_batch.bin", 20)}
    (root / "batches.meta.txt").write_text("".join(f"class-{number}\n" for number in range(10)))
    done = pack(root, tmp_path / "dst", format=format)
    assert [path.name for path in done.folders] == ["train", "eval"]
    for part, (pixels, labels) in parts.items():
        packed = opening.open(tmp_path / "dst" / part)
        assert (packed.description.format, packed.description.mode) == ((format, "keep") if format else ("raw", "raw"))
        assert packed.classes == tuple(f"class-{number}" for number in range(10))
        for name, image in pixels_of(packed).items():
            np.testing.assert_array_equal(image, pixels[int(name)])
        assert packed.label.tolist() == [labels[int(name)] for name in names_of(packed)]
    with pytest.raises(UsageError, match="the source already has an evaluation set, test"):
        pack(root, tmp_path / "other", split=0.1)
    assert pack(root / "test", tmp_path / "one").samples == 20


def test_gray_arrays_of_mnist(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28), np.uint8)
    for part, values in (("train", images), ("t10k", images[:7])):
        head = b"\0\0\x08\x03" + np.array(values.shape, ">u4").tobytes()
        (tmp_path / "mnist").mkdir(exist_ok=True)
        (tmp_path / f"mnist/{part}-images-idx3-ubyte").write_bytes(head + values.tobytes())
        labels = np.arange(len(values), dtype=np.uint8) % 10
        head = b"\0\0\x08\x01" + np.array(labels.shape, ">u4").tobytes()
        (tmp_path / f"mnist/{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())
    done = pack(tmp_path / "mnist", tmp_path / "dst")
    assert (done.format, done.mode) == ("raw", "raw")
    for part, count in (("train", 12), ("eval", 7)):
        packed = opening.open(tmp_path / "dst" / part)
        assert packed.classes == tuple("0123456789")  # the shorter part has no 7, 8 and 9
        assert sorted(packed.label) == sorted(number % 10 for number in range(count))
        for name, image in pixels_of(packed).items():
            np.testing.assert_array_equal(image[:, :, 0], images[int(name)])
    pack(tmp_path / "mnist", tmp_path / "small", mode="resize=14,quality=95")
    packed = opening.open(tmp_path / "small/train")
    assert (packed.description.channels, packed.description.common_size) == (1, (14, 14))


def test_shards_of_others_and_folders_of_shards(mixed: Path, tmp_path: Path) -> None:
    """A pack without its columns is as anyone's shards."""
    pack(mixed, tmp_path / "a", mode="keep", format="tar", split=0.2, shard_bytes=9000)
    (tmp_path / "foreign").mkdir()
    for part, name in (("train", "train"), ("eval", "val")):
        (tmp_path / "parts" / name).mkdir(parents=True)
        for number, shard in enumerate(sorted((tmp_path / "a" / part).glob("*.tar"))):
            (tmp_path / f"foreign/{name}-{number:03d}.tar").write_bytes(shard.read_bytes())
            (tmp_path / f"parts/{name}/{number:03d}.tar").write_bytes(shard.read_bytes())
    for source in ("foreign", "parts"):
        done = pack(tmp_path / source, tmp_path / f"{source}.packed", mode="keep")
        for folder_, part in zip(done.folders, ("train", "eval"), strict=True):
            one, other = opening.open(tmp_path / "a" / part), opening.open(folder_)
            assert sorted(contents(one.folder).values()) == sorted(contents(folder_).values())
            assert sorted(other.label) == sorted(one.label)
            assert other.classes == ("0", "1", "2")


@pytest.mark.parametrize(("format", "mode"), [("recordio", "keep"), ("tar", "keep"), ("raw", "raw")])
def test_a_pack_at_an_address_is_packed(mixed: Path, tmp_path: Path, cache: Path, format: str, mode: str) -> None:
    pack(mixed, tmp_path / "far/a", format=format, mode=mode, shard_bytes=9000)
    with contextlib.closing(Server(tmp_path / "far")) as server:
        pack(f"{server.uri}/a", tmp_path / "b", format=format, mode=mode, shard_bytes=9000)
        records = [asked for asked in server.asked if not asked.name.endswith(".safetensors")]
        assert len(records) < len(opening.open(tmp_path / "b"))  # neighbours are fetched together
        assert opening.open(tmp_path / "b").description.source == f"{server.uri}/a"
        assert contents(tmp_path / "b") == contents(tmp_path / "far/a")
        again = pack(f"{server.uri}/a", tmp_path / "c", split=0.2, seed=5)
        assert sum(again.counts) == again.samples == len(opening.open(tmp_path / "b"))
        if mode == "keep":
            assert {**contents(tmp_path / "c/train"), **contents(tmp_path / "c/eval")}.keys() == sources(mixed).keys()
        server.fault = lambda asked: "404" if asked.name.endswith((".rec", ".tar", ".npy")) else None
        with pytest.raises(DataError, match="there is no such file"):  # no bad image that could be skipped
            pack(f"{server.uri}/a", tmp_path / "d", skip_bad=True)
        assert not (tmp_path / "d").exists()


def test_addresses_are_no_folders(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("pack", mixed, "memory://x", status=2) == (
        "memory://x: this is an address, not a path on this machine. Pack to a local folder, then copy it there."
    )
    assert "s3://host/x: this is an address" in refused("verify", "s3://u:secret@host/x", status=2)
    assert "put the address under data.train" in refused("init", "http://host/x", status=2)
    assert list(tmp_path.iterdir()) == []
    headway("pack", f"file://{mixed}", f"file://{tmp_path}/here")
    assert verify(f"file://{tmp_path}/here").damages == []


@pytest.mark.parametrize("format", [*FILES, "raw"])
def test_a_damaged_record_is_named_when_it_is_packed_again(mixed: Path, tmp_path: Path, format: Any) -> None:
    pack(mixed, tmp_path / "a", mode="raw" if format == "raw" else "keep", format=format)
    packed = opening.open(tmp_path / "a")
    with open(tmp_path / "a" / packed.description.shards[0].name, "r+b") as file:
        file.seek(int(packed.offset[4]) + 9)
        file.write(bytes([packed.read([4])[0][9] ^ 1]))
    reason = f"  {packed.name(4)}: its checksum does not match the columns"
    with pytest.raises(DataError) as caught:
        pack(tmp_path / "a", tmp_path / "b", format="tar", mode="keep")
    assert reason in str(caught.value)
    done = pack(tmp_path / "a", tmp_path / "b", format="tar", mode="keep", skip_bad=True)
    assert [name for name, _ in done.skipped] == [packed.name(4)]
    assert done.samples == len(packed) - 1


@pytest.mark.parametrize("format", [*FILES, "raw"])
def test_the_same_source_makes_the_same_files_in_every_format(mixed: Path, tmp_path: Path, format: Any) -> None:
    for threads in (1, 3):
        pack(mixed, tmp_path / str(threads), format=format, threads=threads, shard_bytes=9000)
    assert sources(tmp_path / "1") == sources(tmp_path / "3")


def test_lmdb_is_written_by_its_own_package(mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack(mixed, tmp_path / "a", mode="keep", format="lmdb")
    monkeypatch.setitem(sys.modules, "lmdb", None)  # as where it is not installed
    with pytest.raises(UsageError, match=r"Install it: pip install lmdb"):
        pack(mixed, tmp_path / "b", mode="keep", format="lmdb")
    assert not (tmp_path / "b").exists()
    assert contents(tmp_path / "a") == sources(mixed)
