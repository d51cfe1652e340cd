"""A folder of images laid out as CLASS/NAME.ext."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headway.core.errors import DataError, UsageError
from headway.data.formats.foreign_records import ForeignRecords, LabelColumn
from headway.data.formats.listing import list_file
from headway.data.formats.pack_source import (
    IMAGE_EXTENSIONS,
    LISTING_EXTENSIONS,
    ImageFiles,
    PackSource,
    is_image,
    list_entries,
)

_SHOWN = 5


def open_folder(root: Path) -> ForeignRecords:
    """The images of a folder, each read by its name. Raises as `list_folder`."""
    return _build_loose_records(*_list_with_folders(root))


def open_listing(file: Path) -> ForeignRecords:
    """The images that a CSV or JSONL file names, each read by its name. Raises as `list_file`."""
    return _build_loose_records(list_file(file), [file])


def _build_loose_records(source: PackSource, watched: Iterable[Path]) -> ForeignRecords:
    assert isinstance(source.images, ImageFiles)
    sizes = source.images.measure_sizes()
    if (sizes >= 1 << 32).any():
        raise DataError("an image of 4 GiB or more", where=source.names[int(sizes.argmax())])
    n = len(source)
    return ForeignRecords(
        format="folder",
        files=(),
        shard=np.zeros(n, np.uint16),
        offset=np.zeros(n, np.uint64),
        length=sizes.astype(np.uint32),
        flags=np.zeros(n, np.uint8),
        labels=LabelColumn(source.label_kind, source.classes, source.labels),
        # not the source's own names: those are text, whatever bytes the file system has
        names=[os.path.relpath(path, source.root) for path in source.images.paths],
        watched=tuple(watched),
    )


def list_folder(root: Path) -> PackSource:
    """Lists the images of a folder: a sub-folder is a class; classes, and images within a class, in order of name.

    Images may lie deeper inside their class folder. Hidden files and folders are left out without a word, files that
    are no images by their ending, and images beside the class folders, with a note.

    Raises:
        UsageError: the folder is missing or empty, or has images but no class folders.
        DataError: a class has no image, or a folder cannot be read.
    """
    return _list_with_folders(root)[0]


def _list_with_folders(root: Path) -> tuple[PackSource, list[Path]]:
    """What `list_folder` gives, and every folder that was looked into."""
    if not root.is_dir():
        raise UsageError("there is no such folder", where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")
    folders, loose = list_entries(str(root))
    if not folders:
        raise _build_no_classes_error(root, loose)
    names: list[str] = []
    paths: list[str] = []
    counts: list[int] = []
    others: list[str] = []
    visited = [root]
    folders.sort(key=_decode_name)
    for folder in folders:
        images: list[str] = []
        found, inside = _walk_files(os.path.join(root, folder), folder)
        visited.extend(map(Path, inside))
        for name in found:
            (images if is_image(name) else others).append(name)
        images.sort(key=_decode_name)
        counts.append(len(images))
        names.extend(map(_decode_name, images))
        paths.extend(os.path.join(root, name) for name in images)
    classes = tuple(map(_decode_name, folders))
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    if len(empty) == len(classes):
        beside = f", and {len(loose)} files lie beside them" if loose else ""
        raise DataError(
            f"there is no image in any of its {len(classes)} sub-folders{beside}",
            where=str(root),
            fix=f"Images are known by their ending: {' '.join(sorted(IMAGE_EXTENSIONS))}.",
        )
    if empty:
        what = f"class {empty[0]!r} has no image" if len(empty) == 1 else f"{_join_names(empty)} have no image"
        raise DataError(what, where=str(root), fix="Put images into the class folder, or remove it.")
    astray = sorted(_decode_name(name) for name in loose if is_image(name))
    ignored = sorted(map(_decode_name, others)) + sorted(_decode_name(name) for name in loose if not is_image(name))
    notes = tuple(
        f"left out, {why}: {_join_names(files)}"
        for why, files in (("being no images by their ending", ignored), ("lying in no class folder", astray))
        if files
    )
    source = PackSource(
        names=tuple(names),
        images=ImageFiles(tuple(paths)),
        labels=np.repeat(np.arange(len(classes), dtype=np.int64), counts),
        label_kind="class",
        classes=classes,
        root=str(root),
        notes=notes,
    )
    return source, visited


def _walk_files(folder: str, prefix: str) -> tuple[list[str], list[str]]:
    """All files below a folder, and the folders that they were looked for in, each once, so that a link to a folder
    above does not go round for ever."""
    found: list[str] = []
    visited: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = [(folder, prefix)]
    while waiting:
        folder, prefix = waiting.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        visited.append(folder)
        folders, files = list_entries(folder)
        found.extend(f"{prefix}/{name}" for name in files)
        waiting.extend((os.path.join(folder, name), f"{prefix}/{name}") for name in folders)
    return found, visited


def _build_no_classes_error(root: Path, loose: list[str]) -> UsageError:
    images = sum(map(is_image, loose))
    if images:
        lists = sorted(name for name in loose if os.path.splitext(name)[1].lower() in LISTING_EXTENSIONS)
        listing = root / lists[0] if lists else "LABELS.csv"
        return UsageError(
            f"{images} images lie in the folder itself, so their classes are not known",
            where=str(root),
            fix=f"Lay them out as CLASS/NAME.jpg, or list paths and labels in a file: headway pack {listing} DST",
        )
    what = f"there is no image in this folder, only {_join_names(sorted(loose))}" if loose else "the folder is empty"
    return UsageError(what, where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")


def _decode_name(name: str) -> str:
    """A file's name as text that UTF-8 can hold, whatever bytes the file system has."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
