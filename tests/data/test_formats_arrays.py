from __future__ import annotations

import gzip
import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data._foreign import LABELS, PIXELS, cache, looked_at, said, same, survives

from headway.core.errors import UsageError
from headway.data import opening

__all__ = ["cache"]

GRAY = np.ascontiguousarray(PIXELS[..., 0])
SHAPES = "[n, h, w], [n, h, w, c] or [n, c, h, w] with 1 or 3 channels"
IDX_TYPES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def idx(array: np.ndarray, kind: str = "u1") -> bytes:
    """As the MNIST page says: magic number, sizes as big endian 32-bit integers, data with the last index fastest."""
    head = bytes([0, 0, IDX_TYPES[kind], array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(f">{kind}").tobytes()


def mnist(folder: Path, *, packed: bool = False, between: str = "-", labels: Any = LABELS, kind: str = "u1") -> Path:
    folder.mkdir(exist_ok=True)
    for part, some in (("train", slice(0, 7)), ("t10k", slice(2, 5))):
        for name, data in (
            (f"{part}-images{between}idx3-ubyte", idx(GRAY[some])),
            (f"{part}-labels{between}idx1-ubyte", idx(np.array(labels)[some], kind)),
        ):
            (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(data) if packed else data)
    return folder


def npy(path: Path, array: np.ndarray, **options: Any) -> Path:
    np.save(path, array, **options)
    return path


# IDX


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("between", ["-", "."])
def test_mnist_has_two_parts(tmp_path: Path, cache: Path, packed: bool, between: str) -> None:
    folder = mnist(tmp_path / "mnist", packed=packed, between=between)
    data = same(opening.open(folder / "train"), GRAY)
    assert (data.description.format, data.description.channels, data.description.common_size) == ("idx", 1, (4, 5))
    assert data.classes == ("0", "1", "2")
    same(opening.open(folder / "test"), GRAY[2:5], LABELS[2:5])
    same(opening.open(folder / f"t10k-images{between}idx3-ubyte{'.gz' * packed}"), GRAY[2:5], LABELS[2:5])
    assert said(folder, UsageError) == (
        f"{folder}: this holds several data sets: test, train. Name one: {folder}/train."
    )
    assert len(list(cache.rglob("*-ubyte"))) == 4 * packed


@pytest.mark.parametrize("kind", IDX_TYPES)
def test_labels_of_every_type(tmp_path: Path, cache: Path, kind: str) -> None:
    same(opening.open(mnist(tmp_path / "mnist", kind=kind) / "train"), GRAY)


def test_other_sets_in_idx(tmp_path: Path, cache: Path) -> None:
    """EMNIST's names; a single part; colour."""
    for name, array in (("emnist-letters-train-images-idx3-ubyte", GRAY), ("images-idx4-ubyte", PIXELS)):
        folder = tmp_path / name[:3]
        folder.mkdir()
        (folder / name).write_bytes(idx(array))
        labels = name.replace("images", "labels").replace("idx3", "idx1").replace("idx4", "idx1")
        (folder / labels).write_bytes(idx(np.array(LABELS)))
        same(opening.open(folder), array)
    same(opening.open(tmp_path / "emn/emnist-letters-train"), GRAY)


def test_what_is_no_idx_is_refused(tmp_path: Path, cache: Path) -> None:
    folder = mnist(tmp_path / "mnist")
    images, labels = folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    images.write_bytes(whole[:-1])
    assert said(images) == f"{images}: the file has 155 bytes, and its header promises 156. Copy it again."
    images.write_bytes(idx(GRAY[:6]))
    assert said(images) == (
        f"{images}: there are 6 images, and labels of shape [7] in {labels}. Put one label (or one row of k labels) "
        f"for each image into {labels.name}, or copy both files again."
    )
    images.write_bytes(idx(GRAY[:0]))
    labels.write_bytes(idx(np.zeros(0)))
    assert said(images) == f"{images}: it contains no image."
    images.write_bytes(idx(np.zeros((7, 0, 3))))
    labels.write_bytes(idx(np.zeros(7)))
    assert said(images) == (f"{images}: this is not an array of images: its shape is [7, 0, 3]. Save them as {SHAPES}.")
    images.write_bytes(whole)
    labels.write_bytes(b"\0\0")
    assert said(images) == f"{labels}: this is not an IDX file. Copy it again."
    labels.unlink()
    assert said(images) == f"{images}: its labels are missing. Put them into {labels}."
    packed = tmp_path / "train-images-idx3-ubyte.gz"
    packed.write_bytes(gzip.compress(whole)[:-20])
    (tmp_path / labels.name).write_bytes(idx(np.array(LABELS)))
    assert said(packed) == f"{packed}: the compressed file is damaged or cut. Copy it again."


def test_no_damage_of_idx_makes_anything_but_a_sentence(tmp_path: Path, cache: Path) -> None:
    folder = mnist(tmp_path / "mnist")
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        survives(folder / name, heads=range(15), edits=30, open=lambda: looked_at(folder, "train"))


# .npy


@pytest.mark.parametrize("name", ["a.labels.npy", "a_labels.npy", "labels.npy"])
def test_npy_with_labels_beside_it(tmp_path: Path, cache: Path, name: str) -> None:
    npy(tmp_path / name, np.array(LABELS, np.int16))
    for array in (GRAY, PIXELS, PIXELS[..., :1]):
        data = same(opening.open(npy(tmp_path / "a.npy", array)), array)
        assert (data.description.format, data.description.common_size) == ("npy", (4, 5))
    planes = np.ascontiguousarray(PIXELS.transpose(0, 3, 1, 2))
    assert opening.open(npy(tmp_path / "a.npy", np.zeros((7, 3, 5, 3), np.uint8))).description.common_size == (5, 3)
    same(opening.open(npy(tmp_path / "a.npy", planes)), planes)


def test_npy_of_several_parts(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    npy(folder / "images.npy", PIXELS)
    npy(folder / "labels.npy", np.array(LABELS))
    same(opening.open(folder), PIXELS)
    for part, some in (("train", slice(0, 5)), ("test", slice(5, 7))):
        npy(folder / f"{part}_images.npy", PIXELS[some])
        npy(folder / f"{part}_labels.npy", np.array(LABELS)[some])
    (folder / "images.npy").unlink()
    same(opening.open(folder / "train"), PIXELS[:5], LABELS[:5])
    same(opening.open(folder / "test"), PIXELS[5:], LABELS[5:])


def test_labels_of_every_kind(tmp_path: Path, cache: Path) -> None:
    npy(tmp_path / "a.npy", PIXELS)
    for labels, kind in (
        (np.array(LABELS) > 0, "class"),
        (np.array(LABELS, np.float64), "class"),
        (np.array(LABELS) - 1, "value"),
        (np.eye(3, dtype=np.uint8)[LABELS], "multi"),
        (np.eye(3)[LABELS] / 3, "value"),
    ):
        npy(tmp_path / "labels.npy", labels)
        assert same(opening.open(tmp_path / "a.npy"), PIXELS, labels.astype(np.float32)).description.label_kind == kind


def test_what_is_no_npy_is_refused(tmp_path: Path, cache: Path) -> None:
    path, labels = tmp_path / "a.npy", npy(tmp_path / "labels.npy", np.array(LABELS))
    for array, reason in (
        (
            PIXELS.astype(np.float32),
            f"images are uint8 {SHAPES}, not float32 [7, 5, 4, 3]. Save them as bytes",
        ),
        (PIXELS[0, 0], f"images are uint8 {SHAPES}, not uint8 [4, 3]. Save all of them"),
        (np.zeros((7, 5, 6, 4), np.uint8), "its shape is [7, 5, 6, 4]. Drop the alpha channel: images[..., :3]"),
        (np.zeros((7, 4, 5, 6), np.uint8), "its shape is [7, 4, 5, 6]. Drop the alpha channel: images[:, :3]"),
        (np.zeros((7, 5, 6, 2), np.uint8), f"not an array of images: its shape is [7, 5, 6, 2]. Save them as {SHAPES}"),
        (np.asfortranarray(PIXELS), "an array in Fortran order. Save it with numpy.ascontiguousarray"),
        (PIXELS[:3], f"{path}: there are 3 images, and labels of shape [7] in {labels}"),
    ):
        assert reason in said(npy(path, array))
    npy(path, np.array([{}, 1]), allow_pickle=True)
    assert said(path) == f"{path}: an array of object [2]. Save an array of numbers."
    npy(path, PIXELS)
    npy(labels, np.array(["cat"] * 7))
    assert said(path) == f"{labels}: labels of type <U3. Save them as numbers."
    npy(labels, np.array(LABELS) + 0.5 * float("inf"))
    assert said(path) == f"{labels}: a label is not a finite number."
    labels.unlink()
    assert said(path) == f"{path}: its labels are missing. Put them into {tmp_path}/a.labels.npy."
    labels.write_bytes(b"")
    assert said(path) == f"{labels}: the file is empty. Copy it again, or leave it out."
    labels.write_bytes(b"\x93NUMPY\x04\x00" + path.read_bytes()[8:])
    assert said(path) == f"{labels}: this is not an .npy file, or its header is damaged."


def test_no_damage_of_npy_makes_anything_but_a_sentence(tmp_path: Path) -> None:
    npy(tmp_path / "a.npy", PIXELS)
    npy(tmp_path / "a.labels.npy", np.array(LABELS))
    for name in ("a.npy", "a.labels.npy"):
        survives(tmp_path / name, heads=range(0, 128, 2), edits=30, open=lambda: looked_at(tmp_path / "a.npy"))


def test_shapes_that_ask_for_the_moon_are_refused(tmp_path: Path, cache: Path) -> None:
    npy(tmp_path / "labels.npy", np.array(LABELS))
    for shape in ((1 << 62, 4, 4), (7, 1 << 40, 1 << 40), (1 << 200, 4, 4), (7, -5, 4), (True, 5, 4)):
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
        (tmp_path / "a.npy").write_bytes(buffer.getvalue() + bytes(1000))
        assert said(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 0xFFFF)
    assert "its header is damaged" in said(tmp_path / "a.npy")
