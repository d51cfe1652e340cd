"""Reads the WebDataset layout: neighbouring files with the same key are one sample.

The key of `a/b/0001.left.jpg` is `a/b/0001`, and `left.jpg` is its extension: a name is cut at the first dot after its
folders. Files without a dot there, and those below folders such as `__meta__`, belong to no sample. A sample's image is
the file with an image extension; its label is the first present of KEY.cls (a class number or name), KEY.json (a
number, a list of numbers, or an object with `label`, `labels` or `value`), and KEY.txt (as .cls). As in WebDataset's
own examples, class numbers count from 0 and class names are sorted.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from headway.core.errors import DataError
from headway.core.untrusted_json import JsonError, parse_value
from headway.data.formats import tar
from headway.data.formats.byte_ranges import map_path
from headway.data.formats.foreign_records import ForeignRecords, build_records, parse_labels
from headway.data.formats.pack_source import IMAGE_EXTENSIONS
from headway.data.formats.tar import ArchiveMember

_NAME_PATTERN = re.compile(r"(?P<key>(?:.*/)?[^./]+)\.(?P<extension>[^/]*)", re.DOTALL)
_META_PATTERN = re.compile(r"(^|/)__[^/]*__(/|$)")
_MAX_LABEL_BYTES = 1 << 20
_LABEL_EXTENSIONS = ("cls", "json", "txt")
_JSON_KEYS = ("label", "labels", "value")


class WebDatasetSample(NamedTuple):
    """One sample: its image, and the file of its label."""

    key: str
    image: ArchiveMember
    label: ArchiveMember


def is_sample_file(name: str) -> bool:
    """Returns True for the name of a sample's image or label."""
    match = _NAME_PATTERN.fullmatch(name)
    extension = match["extension"].lower() if match else ""
    return f".{extension}" in IMAGE_EXTENSIONS or extension in _LABEL_EXTENSIONS


def open_tars(paths: Sequence[Path]) -> ForeignRecords:
    """Returns the samples of tar shards, in order. Raises as `open_shards`."""
    return open_shards("tar", paths, [tar.read_members(path) for path in paths])


def open_shards(format: str, paths: Sequence[Path], contents: Iterable[Iterable[ArchiveMember]]) -> ForeignRecords:
    """Returns the samples of shards, in order.

    Args:
        contents: the files in each shard.

    Raises:
        DataError: a shard is damaged, a sample has no label or several images, or there is no image.
    """
    image_places: list[tuple[int, int, int, int]] = []
    names: list[str] = []
    labels: list[Any] = []
    for shard, (path, members) in enumerate(zip(paths, contents, strict=True)):
        # Labels are read now, images only when they are decoded.
        view = map_path(path)
        for sample in _group_samples(members, path):
            _, offset, size = sample.image
            image_places.append((shard, offset, size, 0))
            # Names must differ, and keys of several shards often repeat.
            names.append(sample.image.name if len(paths) == 1 else f"{path.name}/{sample.image.name}")
            labels.append(_read_label(sample, view, path))
    if not image_places:
        fix = "Samples are KEY.jpg with KEY.cls beside it."
        raise DataError("there is no image with a label in it", where=str(paths[0]), fix=fix)
    return build_records(format, paths, image_places, parse_labels(labels, str(paths[0])), names)


def _group_samples(members: Iterable[ArchiveMember], path: Path) -> Iterator[WebDatasetSample]:
    # Files of a sample are adjacent, so one pass without a dictionary of all keys suffices.
    for key, group in itertools.groupby(_split_names(members), key=lambda entry: entry[0]):
        files: dict[str, ArchiveMember] = {}
        for _, extension, member in group:
            if extension in files:
                raise DataError(f"{member.name!r} occurs twice", where=str(path))
            files[extension] = member
        # A sample without an image, such as captions alone, is skipped.
        image_extensions = [extension for extension in files if f".{extension}" in IMAGE_EXTENSIONS]
        if not image_extensions:
            continue
        if len(image_extensions) > 1:
            what = f"sample {key!r} has several images ({', '.join(image_extensions)})"
            raise DataError(what, where=str(path), fix="Keep one image a sample.")
        label = next((files[extension] for extension in _LABEL_EXTENSIONS if extension in files), None)
        if label is None:
            what = f"sample {key!r} has no label (it has: {', '.join(files)})"
            raise DataError(what, where=str(path), fix=f"Put one beside it: {key}.cls, .json or .txt.")
        yield WebDatasetSample(key, files[image_extensions[0]], label)


def _split_names(members: Iterable[ArchiveMember]) -> Iterator[tuple[str, str, ArchiveMember]]:
    for member in members:
        match = _NAME_PATTERN.fullmatch(member.name)
        if match and not _META_PATTERN.search(member.name):
            yield match["key"], match["extension"].lower(), member


def _read_label(sample: WebDatasetSample, view: memoryview, path: Path) -> Any:
    """Returns a number, text or a list. Raises DataError if the label is none of these."""
    name, offset, size = sample.label
    where = f"{path}, {name}"
    # A label is copied into memory; an image whose name is that of a label must not be.
    if size > _MAX_LABEL_BYTES:
        raise DataError(f"a label of {size:,} bytes", where=where)
    try:
        text = view[offset : offset + size].tobytes().decode().strip()
    except UnicodeDecodeError as error:
        raise DataError("the label is not UTF-8 text", where=where) from error
    # Text is a class number or a class name.
    if not name.lower().endswith(".json"):
        if not text:
            raise DataError("the label is empty", where=where)
        return text
    try:
        value = parse_value(text)
    except JsonError as error:
        raise DataError(f"the label is not valid JSON ({error})", where=where) from error
    if isinstance(value, dict):
        key = next((key for key in _JSON_KEYS if key in value), None)
        if key is None:
            raise DataError(f"it has none of the keys {', '.join(_JSON_KEYS)}", where=where)
        value = value[key]
    # In Python, True is an int.
    if isinstance(value, bool) or not isinstance(value, int | float | str | list):
        raise DataError(f"the label is of type {type(value).__name__}, neither a class nor a number", where=where)
    return value
