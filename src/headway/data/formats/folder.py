"""A folder of images laid out as CLASS/NAME.ext."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from headway.core.errors import DataError, UsageError
from headway.data.formats.foreign_records import ForeignRecords, LabelColumn
from headway.data.formats.layouts import check_layout
from headway.data.formats.listing import list_file
from headway.data.formats.pack_source import (
    IMAGE_EXTENSIONS,
    LISTING_EXTENSIONS,
    ImageFiles,
    PackSource,
    is_image,
    list_entries,
)

_MAX_SHOWN_NAMES = 5


def open_folder(root: Path) -> ForeignRecords:
    """Returns the records of the images of a folder, each read by name. Raises as `list_image_folder`."""
    return _build_loose_records(*_list_images_and_visited_folders(root))


def open_listing(file: Path) -> ForeignRecords:
    """Returns the records of the images that a CSV or JSONL file lists, each read by name. Raises as `list_file`."""
    return _build_loose_records(list_file(file), [file])


def _build_loose_records(source: PackSource, watched: Iterable[Path]) -> ForeignRecords:
    assert isinstance(source.images, ImageFiles)
    sizes = source.images.measure_sizes()
    # The length column has 32 bits.
    if (sizes >= 1 << 32).any():
        raise DataError("an image of 4 GiB or more", where=source.names[int(sizes.argmax())], fix="Leave it out.")
    num_samples = len(source)
    return ForeignRecords(
        format="folder",
        files=(),
        shard=np.zeros(num_samples, np.uint16),
        offset=np.zeros(num_samples, np.uint64),
        length=sizes.astype(np.uint32),
        flags=np.zeros(num_samples, np.uint8),
        labels=LabelColumn(source.label_kind, source.classes, source.labels),
        # Not the names of the source: those are text, and a file name may be any bytes.
        names=[os.path.relpath(path, source.root) for path in source.images.paths],
        watched=tuple(watched),
    )


def list_image_folder(root: Path) -> PackSource:
    """Lists the images of a folder: a sub-folder is a class; classes, and images within a class, are sorted by name.

    Images may be in deeper folders of their class. Hidden files and folders are left out. Files without an image
    extension, and images outside class folders, are left out with a note.

    Raises:
        UsageError: the folder is missing or empty, or has images but no class folders.
        DataError: a class has no image, or a folder cannot be read.
    """
    return _list_images_and_visited_folders(root)[0]


def _list_images_and_visited_folders(root: Path) -> tuple[PackSource, list[Path]]:
    """Returns the images of a folder as `list_image_folder` does, and every folder that was visited."""
    if not root.is_dir():
        raise UsageError("the folder does not exist", where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")
    # The first level is classes; everything deeper belongs to its class.
    folders, loose_files = list_entries(str(root))
    if not folders:
        raise _build_no_classes_error(root, loose_files)
    names: list[str] = []
    paths: list[str] = []
    counts: list[int] = []
    other_files: list[str] = []
    images_by_folder: dict[str, list[str]] = {}
    visited = [root]
    # Sorted as text, so class numbers do not depend on the bytes of the file system.
    folders.sort(key=_decode_name)
    for folder in folders:
        images: list[str] = []
        names_below, visited_below = _walk_files(os.path.join(root, folder), folder)
        # A scan watches every folder for new or removed files.
        visited.extend(map(Path, visited_below))
        for name in names_below:
            (images if is_image(name) else other_files).append(name)
        images.sort(key=_decode_name)
        counts.append(len(images))
        images_by_folder[folder] = images
        names.extend(map(_decode_name, images))
        paths.extend(os.path.join(root, name) for name in images)
    classes = tuple(map(_decode_name, folders))
    empty = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    # No image at all is more likely a wrong folder than an empty class.
    if len(empty) == len(classes):
        beside_text = f", and {len(loose_files)} files are beside them" if loose_files else ""
        raise DataError(
            f"there is no image in any of its {len(classes)} sub-folders{beside_text}",
            where=str(root),
            fix=f"Images are recognised by their extension: {' '.join(sorted(IMAGE_EXTENSIONS))}.",
        )
    check_layout(root, images_by_folder)
    if empty:
        what = f"class {empty[0]!r} has no image" if len(empty) == 1 else f"{_format_names(empty)} have no image"
        raise DataError(what, where=str(root), fix="Put images into the class folder, or remove it.")
    images_outside_classes = sorted(_decode_name(name) for name in loose_files if is_image(name))
    # Left-out files are named in the notes, so that a forgotten extension shows.
    ignored = sorted(map(_decode_name, other_files)) + sorted(
        _decode_name(name) for name in loose_files if not is_image(name)
    )
    notes = tuple(
        f"left out, {why}: {_format_names(files)}"
        for why, files in (("with no image extension", ignored), ("outside class folders", images_outside_classes))
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
    """Returns all files below a folder, and the folders searched. Each folder is searched once, so link cycles end.

    Args:
        prefix: put before the path of each file relative to `folder`.
    """
    file_names: list[str] = []
    visited: list[str] = []
    seen_ids: set[tuple[int, int]] = set()
    pending = [(folder, prefix)]
    while pending:
        folder, prefix = pending.pop()
        # Device and inode identify a folder, whatever link led to it.
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen_ids:
            continue
        seen_ids.add((status.st_dev, status.st_ino))
        visited.append(folder)
        folders, files = list_entries(folder)
        file_names.extend(f"{prefix}/{name}" for name in files)
        pending.extend((os.path.join(folder, name), f"{prefix}/{name}") for name in folders)
    return file_names, visited


def _build_no_classes_error(root: Path, loose_files: list[str]) -> UsageError:
    # The usual mistake: images without class folders.
    num_images = sum(map(is_image, loose_files))
    if num_images:
        listing_names = sorted(name for name in loose_files if os.path.splitext(name)[1].lower() in LISTING_EXTENSIONS)
        listing = root / listing_names[0] if listing_names else "LABELS.csv"
        return UsageError(
            f"{num_images} image{'s are' if num_images > 1 else ' is'} in the folder itself, so "
            f"{'their classes are' if num_images > 1 else 'its class is'} unknown",
            where=str(root),
            fix=f"Lay them out as CLASS/NAME.jpg, or list paths and labels in a file: headway pack {listing} DST",
        )
    what = (
        f"there is no image in this folder, only {_format_names(sorted(loose_files))}"
        if loose_files
        else "the folder is empty"
    )
    return UsageError(what, where=str(root), fix="Name a folder laid out as CLASS/NAME.jpg.")


def _decode_name(name: str) -> str:
    """Returns a file's name as text that UTF-8 can hold, whatever bytes the file system has."""
    return name if name.isascii() else os.fsencode(name).decode("utf-8", "backslashreplace")


def _format_names(names: list[str]) -> str:
    remainder = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    return ", ".join(map(repr, names[:_MAX_SHOWN_NAMES])) + remainder
