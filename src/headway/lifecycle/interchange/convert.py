"""Reads and writes annotations by the name of their format, and converts one file into another."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any, final

from headway.core.errors import DataError, UsageError, suggest_nearest
from headway.core.files import describe_os_error, expect_writable, open_regular, read_regular, write_atomically
from headway.core.text_format import pluralise
from headway.lifecycle.interchange import coco, cvat, label_studio, lists
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, Size, check_annotations
from headway.lifecycle.interchange.rendered import Rendered

LISTS = (".csv", ".jsonl")
FORMATS = (coco.SOURCE, cvat.SOURCE, label_studio.SOURCE, lists.SOURCE)
_RENDER: Mapping[str, Callable[[Annotations], Rendered]] = {
    coco.SOURCE: coco.render_coco,
    cvat.SOURCE: cvat.render_cvat,
    label_studio.SOURCE: label_studio.render_label_studio,
}


@final
@dataclass(frozen=True, kw_only=True)
class Conversion:
    """The result of `convert_annotations`.

    Attributes:
        source, target: names of the formats.
        annotations: what was read; names and sizes as they were written.
        notes: what was left out on the way, as sentences.
    """

    source: str
    target: str
    annotations: Annotations
    notes: tuple[str, ...]

    @property
    def packable_columns(self) -> str:
        """Columns to name to `headway pack`, which refuses to drop boxes or splits by itself; empty: none."""
        images = self.annotations.images
        if not any(image.boxes or image.split for image in images):
            return ""
        return "path,labels" if any(len(image.labels) > 1 for image in images) else "path,label"

    def to_json(self) -> dict[str, Any]:
        """Returns counts, formats and notes."""
        return {"from": self.source, "to": self.target, **self.annotations.count(), "notes": list(self.notes)}


def read_annotations(path: Path, source: str | None = None, *, field: str | None = None) -> Annotations:
    """Reads a file of annotations.

    Args:
        source: one of `FORMATS`. Default: by the ending of the file, and for JSON by its first character.
        field: name of the field of choices with the labels, if a file of Label Studio has several.

    Raises:
        UsageError: there is no such file, its format is not known, or `field` is given for another format.
        DataError: its content is invalid; the message names the entry.
    """
    source = _expect_format(source, "--from") if source is not None else guess_format(path)
    if field is not None and source != label_studio.SOURCE:
        fix = "Leave --field out."
        raise UsageError(f"only files of Label Studio have fields of choices, and this is {source}", fix=fix)
    if source == label_studio.SOURCE:
        annotations = label_studio.read_label_studio(path, field)
    elif source == coco.SOURCE:
        annotations = coco.read_coco(path)
    elif source == cvat.SOURCE:
        annotations = cvat.read_cvat(path)
    else:
        annotations = lists.read_list(path)
    check_annotations(annotations, str(path), is_list=source == lists.SOURCE)
    return annotations


def write_annotations(path: Path, annotations: Annotations, target: str | None = None) -> tuple[str, ...]:
    """Writes a file of annotations; returns sentences about what it does not hold.

    Args:
        target: one of `FORMATS`. Default: by the ending of the file.

    Raises:
        UsageError: the file cannot be written, or the size of an image is not known and the format needs it.
        DataError: a name, label or box is not one that every format can hold.
    """
    target = choose_target(path, target)
    check_annotations(annotations, str(path), is_list=target == lists.SOURCE)
    if target == lists.SOURCE:
        rendered = (lists.render_csv if path.suffix.lower() == ".csv" else lists.render_json_lines)(annotations)
    else:
        rendered = _RENDER[target](annotations)
    write_atomically(path, rendered.text)
    return rendered.notes


def convert_annotations(
    src: Path,
    dst: Path,
    *,
    source: str | None = None,
    target: str | None = None,
    images: Path | None = None,
    field: str | None = None,
    overwrite: bool = False,
) -> Conversion:
    """Converts a file of annotations into another format.

    Args:
        source, target: one of `FORMATS`. Default: by the endings of the files.
        images: folder of the images. Their sizes and SHA-256 are read there, and a list gets paths that lead to them.
        field: see `read_annotations`.
        overwrite: replace an existing file.

    Raises:
        UsageError: a file is missing or exists, or its format is not known.
        DataError: the content is invalid, or an image is missing in `images`.
    """
    target = choose_target(dst, target)
    expect_new(dst, overwrite)
    annotations = read_annotations(src, source, field=field)
    # Files are read by their names below, or by whoever packs the list.
    if annotations.source != lists.SOURCE and (images is not None or target == lists.SOURCE):
        expect_relative(annotations, str(src))
    notes = [*annotations.notes]
    if images is not None:
        if annotations.source == lists.SOURCE:
            annotations = rename_images(annotations, lambda name: os.path.relpath(src.absolute().parent / name, images))
        annotations, more = measure_images(annotations, images)
        notes += more
        if target == lists.SOURCE:
            annotations = rename_images(annotations, lambda name: os.path.relpath(images / name, dst.absolute().parent))
    notes += write_annotations(dst, annotations, target)
    if lost := _count_lost(annotations, target):
        notes.append(f"Left out facts of {pluralise(lost, 'box')} that only {annotations.source} has a form for.")
    return Conversion(source=annotations.source, target=target, annotations=annotations, notes=tuple(notes))


def expect_new(path: Path, overwrite: bool) -> None:
    """Raises UsageError if a file to write exists and is not to be replaced, or cannot be written."""
    if path.exists() and not overwrite:
        raise UsageError("this file exists", where=str(path), fix="Name another one, or replace it with --overwrite.")
    expect_writable(path)


def expect_relative(annotations: Annotations, where: str) -> None:
    """Raises DataError if an image has an absolute name: it could be any file of the machine."""
    for image in annotations.images:
        if os.path.isabs(image.name) or PureWindowsPath(image.name).is_absolute():
            what = f"the image {image.name[:200]!r} has an absolute name"
            raise DataError(what, where=where, fix="Write names that begin in the folder of the images.")


def guess_format(path: Path) -> str:
    """Returns the format of an existing file. Raises UsageError: it is not known, or there is no such file."""
    ending = path.suffix.lower()
    if ending in LISTS:
        return lists.SOURCE
    if ending == ".xml":
        return cvat.SOURCE
    if ending == ".json":
        try:
            with open_regular(path) as file:
                first = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
        # Reading it later says why.
        except OSError:
            first = b""
        return label_studio.SOURCE if first == b"[" else coco.SOURCE
    raise UsageError("the format of this file is not known", where=str(path), fix=_describe_formats("--from"))


def measure_images(annotations: Annotations, folder: Path) -> tuple[Annotations, list[str]]:
    """Reads size and SHA-256 of each image in a folder; returns the annotations with them, and what does not fit.

    Sizes and digests of the file of annotations are kept.

    Raises:
        DataError: an image is missing, lies outside of the folder, or is not an image.
    """
    expect_images(annotations.images, folder)
    measured: list[AnnotatedImage] = []
    sizes = digests = 0
    for image in annotations.images:
        size, digest = _measure(folder / image.name)
        sizes += image.size not in (None, size)
        digests += image.sha256 not in ("", digest)
        measured.append(replace(image, size=image.size or size, sha256=image.sha256 or digest))
    notes = []
    if sizes:
        notes.append(f"{pluralise(sizes, 'image')} of another size than the annotations say: turned, or resized?")
    if digests:
        notes.append(f"{pluralise(digests, 'image')} of another SHA-256 than the annotations say.")
    return replace(annotations, images=tuple(measured)), notes


def expect_images(images: Sequence[AnnotatedImage], folder: Path) -> None:
    """Raises DataError if an image is missing in a folder, or lies outside of it."""
    root = os.path.normpath(folder)
    paths = {image.name: Path(os.path.normpath(folder / image.name)) for image in images}
    missing = [name for name, path in paths.items() if not path.is_relative_to(root) or not path.is_file()]
    if missing:
        rest = f", nor {len(missing) - 1:,} others" if len(missing) > 1 else ""
        what = f"there is no image {missing[0]!r} here{rest}"
        fix = "Name the folder that the names in the file start from: --images FOLDER."
        raise DataError(what, where=str(folder), fix=fix)


def _measure(path: Path) -> tuple[Size, str]:
    # Pillow takes time to import, and most conversions measure nothing.
    from PIL import Image

    from headway.data.reference import PILLOW_FORMATS

    try:
        data = read_regular(path)
    except OSError as error:
        raise DataError(f"it cannot be read ({describe_os_error(error)})", where=str(path)) from None
    try:
        # The header alone: no pixel is decoded.
        with Image.open(io.BytesIO(data), formats=PILLOW_FORMATS) as image:
            size = image.size
    # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
    except Exception as error:
        raise DataError(f"this is not an image that can be opened ({error})", where=str(path)) from None
    return size, hashlib.sha256(data).hexdigest()


def rename_images(annotations: Annotations, rename: Callable[[str], str]) -> Annotations:
    """Returns annotations whose images have other paths. Addresses stay as they are."""
    images = [
        image if "://" in image.name else replace(image, name=Path(rename(image.name)).as_posix())
        for image in annotations.images
    ]
    return replace(annotations, images=tuple(images))


def _count_lost(annotations: Annotations, target: str) -> int:
    # A list keeps them in its column of boxes.
    if target in (annotations.source, lists.SOURCE):
        return 0
    return sum(bool(box.more) for image in annotations.images for box in image.boxes)


def choose_target(path: Path, target: str | None) -> str:
    """Returns the format of a file to write. Raises UsageError: it is not known, or does not fit the ending."""
    ending = path.suffix.lower()
    if target is not None:
        target = _expect_format(target, "--to")
        if (target == lists.SOURCE) != (ending in LISTS):
            what = f"a file of the format {target} does not end with {ending!r}"
            wanted = " or ".join(LISTS) if target == lists.SOURCE else ".xml" if target == cvat.SOURCE else ".json"
            raise UsageError(what, where=str(path), fix=f"Name a file that ends with {wanted}.")
        return target
    if ending in LISTS:
        return lists.SOURCE
    if ending == ".xml":
        return cvat.SOURCE
    raise UsageError("the format to write is not known", where=str(path), fix=_describe_formats("--to"))


def _expect_format(name: str, option: str) -> str:
    if name not in FORMATS:
        raise UsageError(f"there is no format {name!r}", where=option, fix=suggest_nearest(name, FORMATS))
    return name


def _describe_formats(option: str) -> str:
    return f"Name it with {option}: {', '.join(FORMATS)}."
