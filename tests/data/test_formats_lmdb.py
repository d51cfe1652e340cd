"""Databases are written by the lmdb package, and Datum messages by protobuf: neither is used for reading."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tests.data._foreign import LABELS, PICTURES, PIXELS, cache, looked_at, names_of, said, same, survives

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.formats import lmdb as pages

__all__ = ["cache"]


def database(path: Path, values: dict[bytes, bytes], *, subdir: bool = True, batch: int = 1000, **options: Any) -> Path:
    """Writes values in an order of their own, in several transactions, so that pages are used again."""
    items = list(values.items())
    random.Random(0).shuffle(items)
    with lmdb.open(str(path), subdir=subdir, map_size=1 << 28, sync=False, **options) as env:
        for low in range(0, len(items), batch):
            with env.begin(write=True) as transaction:
                for key, value in items[low : low + batch]:
                    transaction.put(key, value)
    return path / "data.mdb" if subdir else path


def datum_type() -> Any:
    """Caffe's message, by its published definition."""
    field = descriptor_pb2.FieldDescriptorProto
    fields = [
        ("channels", 1, field.TYPE_INT32),
        ("height", 2, field.TYPE_INT32),
        ("width", 3, field.TYPE_INT32),
        ("data", 4, field.TYPE_BYTES),
        ("label", 5, field.TYPE_INT32),
        ("float_data", 6, field.TYPE_FLOAT),
        ("encoded", 7, field.TYPE_BOOL),
    ]
    file = descriptor_pb2.FileDescriptorProto(name="datum.proto", package="caffe", syntax="proto2")
    message = file.message_type.add(name="Datum")
    for name, number, kind in fields:
        label = field.LABEL_REPEATED if name == "float_data" else field.LABEL_OPTIONAL
        message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("caffe.Datum"))


Datum = datum_type()


def encoded(image: bytes, label: int) -> bytes:
    return bytes(Datum(data=image, label=label, encoded=True, channels=3).SerializeToString())


def plain(planes: np.ndarray, label: int) -> bytes:
    channels, height, width = planes.shape
    message = Datum(channels=channels, height=height, width=width, data=planes.tobytes(), label=label)
    return bytes(message.SerializeToString())


def keyed(values: list[bytes]) -> dict[bytes, bytes]:
    return {b"%08d_name" % place: value for place, value in enumerate(values)}


# The file


@pytest.mark.parametrize("subdir", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 40, 700])
def test_values_are_where_the_package_says(tmp_path: Path, count: int, subdir: bool) -> None:
    """Small values in leaf pages, large ones in pages of their own; trees of one level and of several."""
    rng = random.Random(count)
    sizes = [0, 1, 10, 500, 1900, 2100, 4080, 4090, 5000, 30_000]
    values = {
        b"%07d" % rng.randrange(10**7) + b"k" * rng.randrange(400): rng.randbytes(rng.choice(sizes))
        for _ in range(count)
    }
    path = database(tmp_path / "db", values, subdir=subdir, batch=max(1, count // 7))
    data = path.read_bytes()
    found = [
        (member.name.encode("latin-1"), data[member.offset :][: member.size]) for member in pages.read_entries(path)
    ]
    assert found == sorted(values.items())


def test_values_that_were_deleted_or_replaced(tmp_path: Path) -> None:
    values = {b"%04d" % number: bytes([number % 251]) * (number * 7 % 6000) for number in range(500)}
    path = database(tmp_path / "db", values)
    with lmdb.open(str(path.parent), map_size=1 << 28, sync=False) as env:
        for low in range(0, 500, 50):
            with env.begin(write=True) as transaction:
                for number in range(low, low + 50):
                    if number % 3 == 0:
                        transaction.delete(b"%04d" % number)
                        del values[b"%04d" % number]
                    elif number % 3 == 1:
                        transaction.put(b"%04d" % number, b"new" * number)
                        values[b"%04d" % number] = b"new" * number
    data = path.read_bytes()
    found = {member.name.encode(): data[member.offset :][: member.size] for member in pages.read_entries(path)}
    assert found == values


# Images


def test_datum_of_image_files(tmp_path: Path, cache: Path) -> None:
    values = keyed([encoded(image, label) for image, label in zip(PICTURES, LABELS, strict=True)])
    path = database(tmp_path / "db", values)
    for uri in (path.parent, path):
        data = same(opening.open(uri), PICTURES)
        assert (data.description.format, data.classes) == ("lmdb", ("0", "1", "2"))
        assert names_of(data) == [key.decode() for key in values]


@pytest.mark.parametrize("pixels", [False, True])
def test_datum_whose_keys_end_like_images(tmp_path: Path, cache: Path, pixels: bool) -> None:
    """Caffe's convert_imageset writes keys such as `00000000_cat/0.jpg`, which look like WebDataset's."""
    planes = [image.transpose(2, 0, 1) for image in PIXELS]
    messages = list(map(plain, planes, LABELS)) if pixels else list(map(encoded, PICTURES, LABELS))
    values = {b"%08d_cat/%d.jpg" % (place, place): value for place, value in enumerate(messages)}
    data = same(opening.open(database(tmp_path / "db", values).parent), planes if pixels else PICTURES)
    assert names_of(data) == [key.decode() for key in values]


@pytest.mark.parametrize("channels", [1, 3])
def test_datum_of_pixels(tmp_path: Path, cache: Path, channels: int) -> None:
    """Each image may have a size of its own."""
    planes = [image.transpose(2, 0, 1)[:channels, : 3 + place % 2] for place, image in enumerate(PIXELS)]
    path = database(tmp_path / "a.lmdb", keyed(list(map(plain, planes, LABELS))), subdir=False)
    data = same(opening.open(path), planes)
    assert data.description.channels == channels
    assert data.height.tolist() == [3, 4, 3, 4, 3, 4, 3]
    assert data.description.common_size is None


def test_the_keys_of_webdataset(tmp_path: Path, cache: Path) -> None:
    values = {b"%05d.jpg" % place: image for place, image in enumerate(PICTURES)}
    values |= {b"%05d.cls" % place: b"class %d" % label for place, label in enumerate(LABELS)}
    data = same(opening.open(database(tmp_path / "db", values).parent), PICTURES)
    assert data.classes == ("class 0", "class 1", "class 2")
    assert data.name(3) == "00003.jpg"


def test_negative_labels_are_values(tmp_path: Path, cache: Path) -> None:
    data = opening.open(database(tmp_path / "db", keyed([encoded(PICTURES[0], -3), encoded(PICTURES[1], 5)])))
    assert (data.description.label_kind, data.label.tolist()) == ("value", [-3, 5])


# What is refused


def test_what_holds_no_images_is_refused(tmp_path: Path, cache: Path) -> None:
    def of(*values: bytes, **options: Any) -> str:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.lmdb"
        return said(database(path, keyed(list(values)), subdir=False, **options)).removeprefix(str(path))

    assert of() == ": it contains no image."
    assert of(b"text\xff") == ", 00000000_name: this is not a Caffe Datum, or it is damaged."
    assert of(Datum(float_data=[1, 2]).SerializeToString()) == (
        ", 00000000_name: it has no image (a Datum without `data`)."
    )
    planes = PIXELS[0].transpose(2, 0, 1)
    assert of(plain(planes[:2], 0)) == (
        ", 00000000_name: 40 bytes are not an image of [2, 5, 4] (channels, height, width)."
    )
    assert of(Datum(channels=3, height=5, width=5, data=planes.tobytes()).SerializeToString()).startswith(
        ", 00000000_name: 60 bytes are not an image of [3, 5, 5]"
    )
    mixed = "its images mix encoded files and pixels, or numbers of channels"
    assert mixed in of(plain(planes, 0), plain(planes[:1], 0))
    assert mixed in of(plain(planes, 0), encoded(PICTURES[0], 0))


def test_databases_of_another_kind_are_refused(tmp_path: Path, cache: Path) -> None:
    with lmdb.open(str(tmp_path / "named"), max_dbs=2) as env, env.begin(write=True) as transaction:
        transaction.put(b"x", b"1", db=env.open_db(b"inside", transaction))
    assert said(tmp_path / "named") == (
        f"{tmp_path}/named/data.mdb, page {_root(tmp_path / 'named/data.mdb')}: it contains several databases. "
        "Copy the one with the images into a database of its own."
    )
    path = database(tmp_path / "twice", {b"a": b"1"})
    data = bytearray(path.read_bytes())
    for page in (0, 4096):
        data[page + 16 + 24 + 48 + 4] |= 4  # MDB_DUPSORT among the flags of the main database
    path.write_bytes(data)
    assert said(path) == f"{path}: its keys have several values each. Keep one value for each key."
    (tmp_path / "no.mdb").write_bytes(bytes(16) + pages.MAGIC + bytes(5000))
    assert (
        said(tmp_path / "no.mdb")
        == f"{tmp_path}/no.mdb: this is not an LMDB database, or it is damaged. Copy it again."
    )
    (tmp_path / "no.mdb").write_bytes(bytes(5000))
    assert "its format is not known" in said(tmp_path / "no.mdb", UsageError)


def _root(path: Path) -> int:
    return pages._read_meta(memoryview(path.read_bytes()), path).root


def test_a_tree_that_leads_in_a_circle_has_an_end(tmp_path: Path, cache: Path) -> None:
    path = database(tmp_path / "db", {b"%0100d" % number: b"" for number in range(3000)}, subdir=False)
    data, root = bytearray(path.read_bytes()), _root(path)
    lower = int.from_bytes(data[root * 4096 + 12 :][:2], "little")
    children = [root * 4096 + int.from_bytes(data[root * 4096 + at :][:2], "little") for at in range(16, lower, 2)]
    assert len(children) > 1
    for child in children:
        data[child : child + 6] = root.to_bytes(6, "little")
    path.write_bytes(data)
    assert said(path) == f"{path}, page {root}: its tree is damaged. Copy it again."


def test_no_damage_makes_anything_but_a_sentence(tmp_path: Path) -> None:
    """Small values and several levels, so that most of the file is the tree."""
    values = keyed([encoded(image, label) for image, label in zip(PICTURES, LABELS, strict=True)])
    small = keyed([plain(np.full((1, 1, 2), place % 256, np.uint8), place % 3) for place in range(500)])
    for name, chosen in (("large", values), ("small", small)):
        path = database(tmp_path / name, chosen, subdir=False)
        root = _root(path) * 4096
        heads = [16, 20, 24, 40, 88, 96, 120, 128, 136, 4096 + 16, 4096 + 40, 4096 + 128, 4096 + 136]
        heads += [root + place for place in (10, 12, 13, 14, 16, 17, 18, 20, 30)]
        survives(path, edits=60, heads=heads)


def test_a_cut_database_is_always_noticed(tmp_path: Path) -> None:
    path = database(tmp_path / "db", keyed([encoded(image, 0) for image in PICTURES]), subdir=False)
    whole = path.read_bytes()
    for size in range(0, len(whole), 511):
        path.write_bytes(whole[:size])
        assert not looked_at(path)
