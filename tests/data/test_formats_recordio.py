"""Foreign `.rec` files, as MXNet writes them: no columns, an index or none, labels in the records."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.data._foreign import LABELS, PICTURES, cache, said, same, survives

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.columns import FLAG_SPLIT
from headway.data.formats import recordio
from headway.data.formats.recordio import Label

__all__ = ["cache"]

MAGIC = struct.pack("<I", recordio.MAGIC)
SPLIT = [image + bytes(-len(image) % 4) + MAGIC * (place % 3) + b"x" for place, image in enumerate(PICTURES)]


def written(path: Path, images: Sequence[bytes], labels: Sequence[Label], *, index: bool = True) -> Path:
    writer = recordio.RecordioWriter(path, path.with_suffix(".idx"), 0)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        writer.append(image, label, number)
    writer.close()
    if not index:
        path.with_suffix(".idx").unlink()
    return path


@pytest.mark.parametrize("index", [True, False])
def test_records_are_read_with_an_index_and_without(tmp_path: Path, cache: Path, index: bool) -> None:
    data = same(opening.open(written(tmp_path / "a.rec", SPLIT, LABELS, index=index)), SPLIT)
    assert (data.flags & FLAG_SPLIT).tolist() == [int(place % 3 > 0) for place in range(7)]
    assert (data.description.format, data.classes) == ("recordio", ("0", "1", "2"))
    assert data.name(4) == "4"


def test_labels_of_every_kind(tmp_path: Path, cache: Path) -> None:
    several = [np.array([number & 1, number >> 1 & 1, 1], np.float32) for number in range(7)]
    data = same(opening.open(written(tmp_path / "multi.rec", SPLIT, several)), SPLIT, np.array(several))
    assert (data.description.label_kind, data.classes) == ("multi", ("0", "1", "2"))
    assert data.description.class_counts == (3, 3, 7)
    boxes = [label * 2.5 for label in several]
    data = same(opening.open(written(tmp_path / "boxes.rec", SPLIT, boxes)), SPLIT, np.array(boxes))
    assert data.description.label_kind == "value"
    numbers = [0.5, -1, 2, 3, 4, 5, 6]
    data = same(opening.open(written(tmp_path / "numbers.rec", SPLIT, numbers)), SPLIT, numbers)
    assert (data.description.label_kind, data.classes, data.label.dtype) == ("value", (), np.float32)


def test_several_files(tmp_path: Path, cache: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number, (low, high) in enumerate([(0, 3), (3, 4), (4, 7)]):
        written(folder / f"train_{number}.rec", SPLIT[low:high], LABELS[low:high])
    for uri in (folder, folder / "train", folder / "train_{0..2}.rec", folder / "*.rec"):
        data = same(opening.open(uri), SPLIT)
        assert data.shard.tolist() == [0, 0, 0, 1, 2, 2, 2]
    written(folder / "val.rec", SPLIT[:2], LABELS[:2])
    assert "this holds several data sets: train, val" in said(folder, UsageError)
    same(opening.open(folder / "val"), SPLIT[:2], LABELS[:2])


def test_what_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.rec"
    written(path, SPLIT[:2], [1, np.array([1, 2], np.float32)])
    assert said(path) == f"{path}: its labels differ in length."
    written(path, SPLIT[:2], [float("nan"), 1])
    assert said(path) == f"{path}: a label is not a finite number."
    written(path, SPLIT[:2], [2**21, 1])
    assert said(path) == (f"{path}: label 2097152 of sample 0 is not a class. Classes count from 0 to 1,048,575.")
    path.write_bytes(b"")
    assert said(path) == f"{path}: the file is empty. Copy it again, or leave it out."
    path.write_bytes(b"no records")
    assert said(path) == (
        f"{path}: this is not a RecordIO file. RecordIO begins with the number 0xced7230a. Name a file of records, or "
        "copy this one again."
    )


def test_no_damage_makes_anything_but_a_sentence(tmp_path: Path) -> None:
    path = written(tmp_path / "a.rec", SPLIT, [np.array([1, 2], np.float32)] * 7)
    starts = [int(line.split()[1]) for line in path.with_suffix(".idx").read_text().splitlines()]
    survives(path, edits=60, heads=[start + place for start in starts for place in (0, 4, 7, 8, 11, 12)])
