"""CIFAR-10 and CIFAR-100, as binary files and as Python archives.

A binary record is one label byte (CIFAR-100: coarse, then fine), then 3,072 bytes of pixels, [3, 32, 32]. A Python
archive is a pickle of a dictionary: `data`, uint8 [n, 3072], `labels` (CIFAR-100: `fine_labels`, `coarse_labels`) and
`filenames`; it is read without unpickling. In both, images are read in place.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headway.core.errors import DataError, UsageError
from headway.data.formats import pickle_reader
from headway.data.formats.arrays import PartOpeners
from headway.data.formats.byte_ranges import ByteRange
from headway.data.formats.foreign_records import ForeignRecords, LabelColumn, build_class_labels, build_row_records

LABELS = ("fine", "coarse")

_SHAPE = (32, 32, 3)
_PIXELS = 32 * 32 * 3
_TEN = re.compile(r"data_batch_\d+(\.bin)?")
_NAMES_LIMIT_BYTES = 1 << 20


def find_parts(files: Mapping[str, ByteRange], labels: str) -> PartOpeners:
    """Returns the parts, train and test, of a folder or an archive; empty if it is not CIFAR.

    `labels` is one of LABELS. Raises UsageError for coarse labels of CIFAR-10.
    """
    names = sorted(files)
    batches = [name for name in names if _TEN.fullmatch(name)]
    if batches:
        if labels != LABELS[0]:
            raise UsageError("CIFAR-10 has one kind of labels", where=str(files[batches[0]].path))
        # The binary and the Python version differ in names only.
        test = [name for name in ("test_batch.bin", "test_batch") if name in files]
        parts = {"train": batches, "test": test}
    elif {"train.bin", "fine_label_names.txt"} <= files.keys() or {"train", "meta"} <= files.keys():
        parts = {part: [name for name in (f"{part}.bin", part) if name in files] for part in ("train", "test")}
    else:
        return {}
    return {
        part: functools.partial(_open, [files[name] for name in chosen], files, 10 if batches else 100, labels)
        for part, chosen in parts.items()
        if chosen
    }


def find_file_opener(name: str, files: Mapping[str, ByteRange], labels: str) -> Callable[[], ForeignRecords] | None:
    """Returns the function that opens one CIFAR file, with its neighbours for class names; or None."""
    if _TEN.fullmatch(name) or name in ("test_batch.bin", "test_batch"):
        return functools.partial(_open, [files[name]], files, 10, labels)
    if name.removesuffix(".bin") in ("train", "test"):
        return functools.partial(_open, [files[name]], files, 100, labels)
    return None


def _open(pieces: Sequence[ByteRange], files: Mapping[str, ByteRange], kind: int, labels: str) -> ForeignRecords:
    open_pieces = _open_binary if pieces[0].name.endswith(".bin") else _open_pickles
    return open_pieces(pieces, files, kind, labels)


def _open_binary(pieces: Sequence[ByteRange], files: Mapping[str, ByteRange], kind: int, labels: str) -> ForeignRecords:
    # Labels come before the pixels: one byte for CIFAR-10, coarse and fine for CIFAR-100.
    before = 1 if kind == 10 else 2
    stride = before + _PIXELS
    for piece in pieces:
        # A file that was cut ends inside a record.
        if piece.size % stride or not piece.size:
            what = f"{piece.size:,} bytes are not a whole number of records of {stride:,}"
            raise DataError(what, where=str(piece), fix="Copy it again.")
    # The coarse label is the first byte.
    at = LABELS[::-1].index(labels) if kind == 100 else 0
    values = [np.frombuffer(piece.view(), np.uint8)[at::stride] for piece in pieces]
    name = "batches.meta.txt" if kind == 10 else f"{labels}_label_names.txt"
    classes = _read_class_names(files.get(name), kind, labels)
    return build_row_records(
        "cifar",
        [(piece, before, piece.size // stride) for piece in pieces],
        _SHAPE,
        _join_labels(pieces, values, classes),
        stride=stride,
        planar=True,
        watched=[files[name].path] if name in files else [],
    )


def _open_pickles(
    pieces: Sequence[ByteRange], files: Mapping[str, ByteRange], kind: int, labels: str
) -> ForeignRecords:
    blocks, values, names = [], [], list[str]()
    key = "labels" if kind == 10 else f"{labels}_labels"
    for piece in pieces:
        where = str(piece)
        # The reader keeps the offset of the pixels, so that images are read from the file itself.
        held = pickle_reader.read_pickle(piece.view().tobytes(), where)
        data = pickle_reader.get_array(held.get("data"), where)
        n = data.shape[0] if data.shape else 0
        if data.shape != (n, _PIXELS):
            raise DataError(f"its data are of shape {list(data.shape)}, not [n, {_PIXELS:,}]", where=where)
        values.append(np.array(_read_list(held, key, int, n, where), np.int64))
        # Python archives keep the original file names, which become sample names.
        names += [text.utf8 for text in _read_list(held, "filenames", pickle_reader.PickledText, n, where)]
        blocks.append((piece, data.offset, n))
    meta = files.get("batches.meta" if kind == 10 else "meta")
    classes = _read_pickled_class_names(meta, "label_names" if kind == 10 else f"{labels}_label_names", kind, labels)
    found_labels = _join_labels(pieces, values, classes)
    return build_row_records(
        "cifar", blocks, _SHAPE, found_labels, planar=True, names=names, watched=[meta.path] if meta else []
    )


def _read_list(held: Mapping[str, Any], key: str, kind: type, count: int, where: str) -> list[Any]:
    value = held.get(key)
    if not isinstance(value, list) or len(value) != count or any(type(item) is not kind for item in value):
        raise DataError(f"its {key!r} are not a list of {count:,}", where=where)
    # A number far outside would later ask for as many class names.
    if kind is int and any(not 0 <= number < 1 << 20 for number in value):
        raise DataError(f"its {key!r} are not class numbers", where=where)
    return value


def _join_labels(pieces: Sequence[ByteRange], values: Sequence[Any], classes: Sequence[str]) -> LabelColumn:
    of_each = [build_class_labels(numbers, str(piece), classes) for piece, numbers in zip(pieces, values, strict=True)]
    return of_each[0]._replace(values=np.concatenate([labels.values for labels in of_each]))


def _read_class_names(piece: ByteRange | None, kind: int, labels: str) -> list[str]:
    # The file of names is optional, and a damaged one must not fill the memory.
    text = piece.view()[:_NAMES_LIMIT_BYTES].tobytes().decode(errors="replace") if piece and piece.size else ""
    return _check_class_names([line.strip() for line in text.splitlines() if line.strip()], piece, kind, labels)


def _read_pickled_class_names(piece: ByteRange | None, key: str, kind: int, labels: str) -> list[str]:
    if piece is None:
        return _check_class_names([], None, kind, labels)
    value = pickle_reader.read_pickle(piece.view().tobytes(), str(piece)).get(key)
    if not isinstance(value, list) or any(not isinstance(name, pickle_reader.PickledText) for name in value):
        raise DataError(f"its {key!r} are not a list of names", where=str(piece))
    return _check_class_names([name.utf8 for name in value], piece, kind, labels)


def _check_class_names(names: list[str], piece: ByteRange | None, kind: int, labels: str) -> list[str]:
    """Returns the names of the classes; their numbers if there is no file of names."""
    # CIFAR-100 has 20 coarse classes.
    count = 20 if labels == "coarse" else kind
    if piece and len(names) != count:
        raise DataError(f"it names {len(names)} classes, and there are {count}", where=str(piece))
    return names or [str(number) for number in range(count)]
