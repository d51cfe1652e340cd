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
from headway.data.formats.arrays import SetOpeners
from headway.data.formats.byte_ranges import ByteRange
from headway.data.formats.foreign_records import ForeignRecords, LabelColumn, build_class_labels, build_row_records

LABEL_KINDS = ("fine", "coarse")

_SHAPE = (32, 32, 3)
_IMAGE_BYTES = 32 * 32 * 3
_CIFAR10_BATCH = re.compile(r"data_batch_\d+(\.bin)?")
_MAX_NAMES_BYTES = 1 << 20


def find_sets(files: Mapping[str, ByteRange], label_kind: str) -> SetOpeners:
    """Returns the openers of the data sets, train and test, of a folder or an archive; empty if it is not CIFAR.

    `label_kind` is one of LABEL_KINDS. Raises UsageError for coarse labels of CIFAR-10.
    """
    names = sorted(files)
    batch_names = [name for name in names if _CIFAR10_BATCH.fullmatch(name)]
    if batch_names:
        if label_kind != LABEL_KINDS[0]:
            raise UsageError("CIFAR-10 has one kind of labels", where=str(files[batch_names[0]].path))
        # The binary and the Python version differ in names only.
        test = [name for name in ("test_batch.bin", "test_batch") if name in files]
        names_by_set = {"train": batch_names, "test": test}
    elif {"train.bin", "fine_label_names.txt"} <= files.keys() or {"train", "meta"} <= files.keys():
        names_by_set = {one: [name for name in (f"{one}.bin", one) if name in files] for one in ("train", "test")}
    else:
        return {}
    return {
        set_name: functools.partial(
            _open_files, [files[name] for name in set_files], files, 10 if batch_names else 100, label_kind
        )
        for set_name, set_files in names_by_set.items()
        if set_files
    }


def find_file_opener(name: str, files: Mapping[str, ByteRange], label_kind: str) -> Callable[[], ForeignRecords] | None:
    """Returns the function that opens one CIFAR file, with class names from its neighbours; None if it is not CIFAR."""
    if _CIFAR10_BATCH.fullmatch(name) or name in ("test_batch.bin", "test_batch"):
        return functools.partial(_open_files, [files[name]], files, 10, label_kind)
    if name.removesuffix(".bin") in ("train", "test"):
        return functools.partial(_open_files, [files[name]], files, 100, label_kind)
    return None


def _open_files(
    batches: Sequence[ByteRange], files: Mapping[str, ByteRange], num_classes: int, label_kind: str
) -> ForeignRecords:
    open_batches = _open_binary if batches[0].name.endswith(".bin") else _open_pickles
    return open_batches(batches, files, num_classes, label_kind)


def _open_binary(
    batches: Sequence[ByteRange], files: Mapping[str, ByteRange], num_classes: int, label_kind: str
) -> ForeignRecords:
    # Labels come before the pixels: one byte for CIFAR-10, coarse and fine for CIFAR-100.
    label_bytes = 1 if num_classes == 10 else 2
    record_bytes = label_bytes + _IMAGE_BYTES
    for batch in batches:
        # A truncated file ends inside a record.
        if batch.size % record_bytes or not batch.size:
            what = f"{batch.size:,} bytes are not a whole number of records of {record_bytes:,}"
            raise DataError(what, where=str(batch), fix="Copy it again.")
    # The coarse label is the first byte.
    label_index = LABEL_KINDS[::-1].index(label_kind) if num_classes == 100 else 0
    values = [np.frombuffer(batch.view(), np.uint8)[label_index::record_bytes] for batch in batches]
    name = "batches.meta.txt" if num_classes == 10 else f"{label_kind}_label_names.txt"
    classes = _read_class_names(files.get(name), num_classes, label_kind)
    return build_row_records(
        "cifar",
        [(batch, label_bytes, batch.size // record_bytes) for batch in batches],
        _SHAPE,
        _join_labels(batches, values, classes),
        stride=record_bytes,
        planar=True,
        watched=[files[name].path] if name in files else [],
    )


def _open_pickles(
    batches: Sequence[ByteRange], files: Mapping[str, ByteRange], num_classes: int, label_kind: str
) -> ForeignRecords:
    blocks = []
    values = []
    names: list[str] = []
    key = "labels" if num_classes == 10 else f"{label_kind}_labels"
    for batch in batches:
        where = str(batch)
        # The offset of the pixels is known, so images are read from the file itself.
        content = pickle_reader.read_pickle(batch.view().tobytes(), where)
        data = pickle_reader.get_array(content.get("data"), where)
        num_images = data.shape[0] if data.shape else 0
        if data.shape != (num_images, _IMAGE_BYTES):
            raise DataError(f"its data are of shape {list(data.shape)}, not [n, {_IMAGE_BYTES:,}]", where=where)
        values.append(np.array(_read_list(content, key, int, num_images, where), np.int64))
        # Python archives keep the original file names, which become sample names.
        names += [text.utf8 for text in _read_list(content, "filenames", pickle_reader.PickledText, num_images, where)]
        blocks.append((batch, data.offset, num_images))
    meta = files.get("batches.meta" if num_classes == 10 else "meta")
    classes = _read_pickled_class_names(
        meta, "label_names" if num_classes == 10 else f"{label_kind}_label_names", num_classes, label_kind
    )
    label_column = _join_labels(batches, values, classes)
    return build_row_records(
        "cifar", blocks, _SHAPE, label_column, planar=True, names=names, watched=[meta.path] if meta else []
    )


def _read_list(content: Mapping[str, Any], key: str, item_type: type, count: int, where: str) -> list[Any]:
    items = content.get(key)
    if not isinstance(items, list) or len(items) != count or any(type(item) is not item_type for item in items):
        raise DataError(f"its {key!r} are not a list of {count:,}", where=where)
    # The number of class names follows from the largest class number, so damage must not fill the memory.
    if item_type is int and any(not 0 <= number < 1 << 20 for number in items):
        raise DataError(f"its {key!r} are not class numbers", where=where)
    return items


def _join_labels(batches: Sequence[ByteRange], values: Sequence[Any], classes: Sequence[str]) -> LabelColumn:
    label_columns = [
        build_class_labels(numbers, str(batch), classes) for batch, numbers in zip(batches, values, strict=True)
    ]
    return label_columns[0]._replace(values=np.concatenate([labels.values for labels in label_columns]))


def _read_class_names(file: ByteRange | None, num_classes: int, label_kind: str) -> list[str]:
    # The file of names is optional, and a damaged one must not fill the memory.
    text = file.view()[:_MAX_NAMES_BYTES].tobytes().decode(errors="replace") if file and file.size else ""
    return _check_class_names(
        [line.strip() for line in text.splitlines() if line.strip()], file, num_classes, label_kind
    )


def _read_pickled_class_names(file: ByteRange | None, key: str, num_classes: int, label_kind: str) -> list[str]:
    if file is None:
        return _check_class_names([], None, num_classes, label_kind)
    names = pickle_reader.read_pickle(file.view().tobytes(), str(file)).get(key)
    if not isinstance(names, list) or any(not isinstance(name, pickle_reader.PickledText) for name in names):
        raise DataError(f"its {key!r} are not a list of names", where=str(file))
    return _check_class_names([name.utf8 for name in names], file, num_classes, label_kind)


def _check_class_names(names: list[str], file: ByteRange | None, num_classes: int, label_kind: str) -> list[str]:
    """Returns the class names, or numbers as names without a file of names. Raises DataError if some are missing."""
    # CIFAR-100 has 20 coarse classes.
    num_expected = 20 if label_kind == "coarse" else num_classes
    if file and len(names) != num_expected:
        raise DataError(f"it names {len(names)} classes, and there are {num_expected}", where=str(file))
    return names or [str(number) for number in range(num_expected)]
