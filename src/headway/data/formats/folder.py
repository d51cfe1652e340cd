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
    """Returns the images of a folder, each read by name. Raises as `list_folder`."""
    return _build_loose_records(*_list_with_folders(root))


def open_listing(file: Path) -> ForeignRecords:
    """Returns the images that a CSV or JSONL file lists, each read by name. Raises as `list_file`."""
    return _build_loose_records(list_file(file), [file])


def _build_loose_records(source: PackSource, watched: Iterable[Path]) -> ForeignRecords:
    assert isinstance(source.images, ImageFiles)
    sizes = source.images.measure_sizes()
    # The length column has 32 bits.
    if (sizes >= 1 << 32).any():
        raise DataError("an image of 4 GiB or more", where=source.names[int(sizes.argmax())], fix="Leave it out.")
    n = len(source)
    return ForeignRecords(
        format="folder",
        files=(),
        shard=np.zeros(n, np.uint16),
        offset=np.zeros(n, np.uint64),
        length=sizes.astype(np.uint32),
        flags=np.zeros(n, np.uint8),
        labels=LabelColumn(source.label_kind, source.classes, source.labels),
        # Not the names of the source: those are text, and a file name may be any bytes.
        names=[os.path.relpath(path, source.root) for path in source.images.paths],
        watched=tuple(watched),
    )


def list_folder(root: Path) -> PackSource:
    """Lists the images of a folder: a sub-folder is a class; classes, and images within a class, are sorted by name.

    Images may be in deeper folders of their class. Hidden files and folders are left out. Files without an image
    extension, and images outside class folders, are left out with a note.

    Raises:
        UsageError: the folder is missing or empty, or has images but no class folders.
        DataError: a class has no image, or a folder cannot be read.
    """
    return _list_with_folders(root)[0]


def _list_with_folders(root: Path) -> tuple[PackSource, list[Path]]:
    """Returns the source of `list_folder`, and every folder that was searched."""
    if not root.is_dir():
        raise UsageError("the folder does not exist", where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")
    # The first level is classes; everything deeper belongs to its class.
    folders, loose = list_entries(str(root))
    if not folders:
        raise _build_no_classes_error(root, loose)
    names: list[str] = []
    paths: list[str] = []
    counts: list[int] = []
    others: list[str] = []
    visited = [root]
    # Sorted as text, so class numbers do not depend on the bytes of the file system.
    folders.sort(key=_decode_name)
    for folder in folders:
        images: list[str] = []
        found, inside = _walk_files(os.path.join(root, folder), folder)
        # A scan watches every folder for new or removed files.
        visited.extend(map(Path, inside))
        for name in found:
            (images if is_image(name) else others).append(name)
        images.sort(key=_decode_name)
        counts.append(len(images))
        names.extend(map(_decode_name, images))
        paths.extend(os.path.join(root, name) for name in images)
    classes = tuple(map(_decode_name, folders))
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    # No image at all is more likely a wrong folder than an empty class.
    if len(empty) == len(classes):
        beside = f", and {len(loose)} files are beside them" if loose else ""
        raise DataError(
            f"there is no image in any of its {len(classes)} sub-folders{beside}",
            where=str(root),
            fix=f"Images are recognised by their extension: {' '.join(sorted(IMAGE_EXTENSIONS))}.",
        )
    if empty:
        what = f"class {empty[0]!r} has no image" if len(empty) == 1 else f"{_join_names(empty)} have no image"
        raise DataError(what, where=str(root), fix="Put images into the class folder, or remove it.")
    astray = sorted(_decode_name(name) for name in loose if is_image(name))
    # Left-out files are named in the notes, so that a forgotten extension shows.
    ignored = sorted(map(_decode_name, others)) + sorted(_decode_name(name) for name in loose if not is_image(name))
    notes = tuple(
        f"left out, {why}: {_join_names(files)}"
        for why, files in (("with no image extension", ignored), ("outside class folders", astray))
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
    """Returns all files below a folder, and the folders searched; each folder once, so link cycles end."""
    found: list[str] = []
    visited: list[str] = []
    seen: set[tuple[int, int]] = set()
    waiting = [(folder, prefix)]
    while waiting:
        folder, prefix = waiting.pop()
        # Device and inode identify a folder, whatever link led to it.
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
    # The usual mistake: images without class folders.
    images = sum(map(is_image, loose))
    if images:
        lists = sorted(name for name in loose if os.path.splitext(name)[1].lower() in LISTING_EXTENSIONS)
        listing = root / lists[0] if lists else "LABELS.csv"
        return UsageError(
            f"{images} images are in the folder itself, so their classes are unknown",
            where=str(root),
            fix=f"Lay them out as CLASS/NAME.jpg, or list paths and labels in a file: headway pack {listing} DST",
        )
    what = f"there is no image in this folder, only {_join_names(sorted(loose))}" if loose else "the folder is empty"
    return UsageError(what, where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")


def _decode_name(name: str) -> str:
    """Returns a file's name as text that UTF-8 can hold, whatever bytes the file system has."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def _join_names(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
