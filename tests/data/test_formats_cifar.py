"""Files are made here byte by byte, as the data set's page describes them."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data._foreign import cache, looked_at, names_of, said, same, survives

from headway.core.errors import UsageError
from headway.data import opening

__all__ = ["cache"]

SAVE = "Only strings, numbers and arrays of protocol 4 at most can be read without unpickling."
N = 12
ROWS = np.random.default_rng(1).integers(0, 256, (N, 3072), np.uint8)
PLANES = ROWS.reshape(N, 3, 32, 32)
FINE = [7, 0, 9, 3, 3, 1, 2, 4, 5, 6, 8, 99]
COARSE = [19, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
TEN = [label % 10 for label in FINE]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FINE_NAMES = [f"fine {number}" for number in range(100)]
COARSE_NAMES = [f"coarse {number}" for number in range(20)]
NAMES = [f"image_{number:04d}.png" for number in range(N)]
PARTS = {"data_batch_1": slice(0, 5), "data_batch_2": slice(5, 10), "test_batch": slice(10, 12)}


def binary(labels: list[list[int]], some: slice) -> bytes:
    heads = np.array(labels, np.uint8).T[some]
    return np.concatenate([heads, ROWS[some]], axis=1).tobytes()


def ten_binary() -> dict[str, bytes]:
    files = {f"{name}.bin": binary([TEN], some) for name, some in PARTS.items()}
    return {**files, "batches.meta.txt": "\n".join([*CLASSES, "", ""]).encode(), "readme.html": b"<html>"}


def hundred_binary() -> dict[str, bytes]:
    files = {"train.bin": slice(0, 9), "test.bin": slice(9, 12)}
    names = {"fine_label_names.txt": FINE_NAMES, "coarse_label_names.txt": COARSE_NAMES}
    return {
        **{name: binary([COARSE, FINE], some) for name, some in files.items()},
        **{name: "\n".join([*lines, ""]).encode() for name, lines in names.items()},
    }


class Python2:
    """Writes pickles as Python 2's cPickle did, protocol 2: strings are bytes, arrays are rebuilt from a string."""

    def __init__(self) -> None:
        self.out = b"\x80\x02"
        self.memo = 0

    def put(self) -> None:
        self.out += b"q" + bytes([self.memo]) if self.memo < 256 else b"r" + struct.pack("<I", self.memo)
        self.memo += 1

    def value(self, value: Any) -> None:
        if isinstance(value, dict):
            self.out += b"}"
            self.put()
            self.out += b"("
            for key, entry in value.items():
                self.value(key)
                self.value(entry)
            self.out += b"u"
        elif isinstance(value, list):
            self.out += b"]"
            self.put()
            for low in range(0, len(value), 1000):
                self.out += b"("
                for entry in value[low : low + 1000]:
                    self.value(entry)
                self.out += b"e"
        elif isinstance(value, str):
            self.out += b"U" + bytes([len(value)]) + value.encode()
            self.put()
        elif isinstance(value, int):
            self.number(value)
        else:
            self.array(value)

    def number(self, value: int) -> None:
        self.out += b"K" + bytes([value]) if value < 256 else b"M" + struct.pack("<H", value)

    def array(self, array: np.ndarray) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        self.out += b"K\x00\x85U\x01b\x87R"
        self.put()
        self.out += b"(K\x01"
        self.number(array.shape[0])
        self.number(array.shape[1])
        self.out += b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        self.put()
        self.out += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        self.out += b"T" + struct.pack("<I", array.size) + array.tobytes() + b"tb"


def python2(value: dict[str, Any]) -> bytes:
    writer = Python2()
    writer.value(value)
    return writer.out + b"."


def ten_python() -> dict[str, bytes]:
    return {
        **{
            name: python2(
                {
                    "batch_label": name,
                    "labels": TEN[some],
                    "data": ROWS[some],
                    "filenames": NAMES[some],
                }
            )
            for name, some in PARTS.items()
        },
        "batches.meta": python2({"num_cases_per_batch": 10000, "label_names": CLASSES, "num_vis": 3072}),
    }


def hundred_python() -> dict[str, bytes]:
    files = {
        name: python2(
            {
                "filenames": NAMES[some],
                "batch_label": name,
                "fine_labels": FINE[some],
                "coarse_labels": COARSE[some],
                "data": ROWS[some],
            }
        )
        for name, some in {"train": slice(0, 9), "test": slice(9, 12)}.items()
    }
    return {**files, "meta": python2({"fine_label_names": FINE_NAMES, "coarse_label_names": COARSE_NAMES})}


KINDS = {
    "cifar-10-batches-bin": ten_binary,
    "cifar-10-batches-py": ten_python,
    "cifar-100-binary": hundred_binary,
    "cifar-100-python": hundred_python,
}


def folder_of(root: Path, name: str) -> Path:
    (root / name).mkdir(parents=True)
    for file, data in KINDS[name]().items():
        (root / name / file).write_bytes(data)
    return root / name


def archive_of(root: Path, name: str) -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        top = tarfile.TarInfo(f"{name}/")
        top.type = tarfile.DIRTYPE
        out.addfile(top)
        for file, data in KINDS[name]().items():
            info = tarfile.TarInfo(f"{name}/{file}")
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    path = root / f"{name}.tar.gz"
    path.write_bytes(gzip.compress(buffer.getvalue(), 1))
    return path


def test_the_pickles_here_are_what_python_reads() -> None:
    for name, some in PARTS.items():
        held = pickle.loads(ten_python()[name], encoding="latin1")
        assert held["labels"] == TEN[some]
        assert (held["data"] == ROWS[some]).all()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("make", [folder_of, archive_of])
def test_every_kind_is_read(tmp_path: Path, cache: Path, name: str, make: Any) -> None:
    place = make(tmp_path, name)
    ten = "-10-" in name
    cut = 10 if ten else 9
    for part, some in (("train", slice(0, cut)), ("test", slice(cut, N))):
        data = same(opening.open(f"{place}/{part}"), PLANES[some], (TEN if ten else FINE)[some])
        assert data.classes == tuple(CLASSES if ten else FINE_NAMES)
        assert (data.description.format, data.description.common_size) == ("cifar", (32, 32))
        assert names_of(data) == (
            NAMES[some] if name.endswith(("py", "python")) else [str(number) for number in range(len(data))]
        )
        if not ten:
            data = same(opening.open(f"{place}/{part}?labels=coarse"), PLANES[some], COARSE[some])
            assert data.classes == tuple(COARSE_NAMES)
            same(opening.open(f"{place}/{part}"), PLANES[some], FINE[some])
    assert said(place, UsageError) == f"{place}: this holds several data sets: test, train. Name one: {place}/train."
    if ten:
        assert "CIFAR-10 has one kind of labels" in said(f"{place}/train?labels=coarse", UsageError)


def test_one_file_alone(tmp_path: Path, cache: Path) -> None:
    for name in ("cifar-10-batches-bin", "cifar-10-batches-py"):
        folder = folder_of(tmp_path, name)
        file = folder / ("data_batch_2.bin" if name.endswith("bin") else "data_batch_2")
        assert same(opening.open(file), PLANES[5:10], TEN[5:10]).classes == tuple(CLASSES)
        for meta in folder.glob("batches.meta*"):
            meta.unlink()
        assert opening.open(file).classes == tuple(map(str, range(10)))
    folder = folder_of(tmp_path, "cifar-100-binary")
    same(opening.open(folder / "test.bin"), PLANES[9:], FINE[9:])


@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_archives_saved_again_by_python_3(tmp_path: Path, cache: Path, protocol: int) -> None:
    held = {b"labels": TEN, b"data": ROWS, b"filenames": [name.encode() for name in NAMES]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(held, protocol))
    if protocol < 5:
        same(opening.open(tmp_path / "test_batch"), PLANES, TEN)
    else:
        assert "this is not a pickle of plain data" in said(tmp_path / "test_batch")


class Wicked:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (exec, (f"open({str(self.path)!r}, 'w')",))


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_in_a_pickle_is_run(tmp_path: Path, cache: Path, protocol: int) -> None:
    wicked = Wicked(tmp_path / "proof")
    for held in (wicked, [wicked], {"data": wicked}, {"labels": TEN, "data": ROWS, "filenames": wicked}):
        (tmp_path / "test_batch").write_bytes(pickle.dumps(held, protocol))
        assert f"{tmp_path}/test_batch: " in said(tmp_path / "test_batch")
    assert not (tmp_path / "proof").exists()


def test_what_is_no_cifar_is_refused(tmp_path: Path, cache: Path) -> None:
    folder = folder_of(tmp_path, "cifar-10-batches-bin")
    path = folder / "data_batch_1.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert said(folder / "train") == f"{path}: 15,364 bytes are not a whole number of records of 3,073. Copy it again."
    path.write_bytes(whole[:3073] + b"\x0a" + whole[3074:])
    assert said(folder / "train") == (f"{path}: label 10 of sample 1 is not a class. There are 10 classes, from 0.")
    path.write_bytes(b"")
    assert "0 bytes are not a whole number" in said(folder / "train")
    path.write_bytes(whole)
    (folder / "batches.meta.txt").write_text("one\ntwo\n")
    assert said(folder / "train") == f"{folder}/batches.meta.txt: it names 2 classes, and there are 10."
    folder = folder_of(tmp_path, "cifar-10-batches-py")
    path = folder / "test_batch"
    good = {"labels": TEN, "data": ROWS, "filenames": NAMES}
    for wrong, reason in (
        ({"labels": TEN[1:]}, "its 'labels' are not a list of 12"),
        ({"labels": ["a"] * N}, "its 'labels' are not a list of 12"),
        ({"labels": [65535] * N}, "label 65535 of sample 0 is not a class"),
        ({"filenames": TEN}, "its 'filenames' are not a list of 12"),
        ({"data": ROWS[:, :3000]}, "its data are of shape [12, 3000], not [n, 3,072]"),
        ({"data": [1]}, "its data are not one array of unsigned bytes"),
    ):
        path.write_bytes(python2({**good, **wrong}))
        assert f"{path}: {reason}" in said(folder / "test")
    whole = python2(good)
    path.write_bytes(whole.replace(b"K\x00tb\x89T", b"K\x00tb\x88T"))  # True: in Fortran order
    assert "its data are not one array of unsigned bytes" in said(folder / "test")
    path.write_bytes(whole.replace(b"U\x02u1", b"U\x02i1"))
    assert "its data are not one array of unsigned bytes" in said(folder / "test")
    path.write_bytes(b"no pickle")
    assert said(path) == f"{path}: this is not a pickle of plain data, or it is damaged. {SAVE}"


@pytest.mark.check
def test_no_damage_makes_anything_but_a_sentence(tmp_path: Path, cache: Path) -> None:
    rng = random.Random(0)
    for name, file in (("cifar-10-batches-py", "test_batch"), ("cifar-10-batches-py", "batches.meta")):
        folder = tmp_path / name if (tmp_path / name).exists() else folder_of(tmp_path, name)
        size = (folder / file).stat().st_size
        # The pixels say nothing: the places to change are before and after them.
        heads = [rng.choice([rng.randrange(min(size, 250)), size - 1 - rng.randrange(60)]) for _ in range(300)]
        survives(folder / file, heads=heads, edits=20, open=lambda folder=folder: looked_at(folder, "test"))
    folder = folder_of(tmp_path, "cifar-100-binary")
    survives(folder / "test.bin", edits=20, open=lambda: looked_at(folder, "test"))
    path = archive_of(tmp_path / "cifar-100-binary", "cifar-10-batches-bin")
    survives(path, edits=10, open=lambda: looked_at(path, "test"))
