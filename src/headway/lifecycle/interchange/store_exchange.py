"""Files of annotations into a data set with versions, and a version out into such a file."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, final

import numpy as np

from headway.core.errors import DataError, UsageError
from headway.core.files import describe_os_error, open_regular, read_regular, write_atomically
from headway.core.text_format import pluralise
from headway.core.untrusted_json import JsonError, parse_object
from headway.data.formats.pack_source import EVAL_NAMES
from headway.data.store_address import EVAL, StoreAddress, is_store_address
from headway.lifecycle.interchange import lists
from headway.lifecycle.interchange.annotations import AnnotatedImage, Annotations, collect_classes, find_text_fault
from headway.lifecycle.interchange.convert import (
    LISTS,
    choose_target,
    expect_images,
    expect_new,
    expect_relative,
    read_annotations,
    rename_images,
    write_annotations,
)
from headway.lifecycle.interchange.store_facts import StoreFacts, build_facts, read_facts
from headway.lifecycle.store.any_store import AnyStore, Changed
from headway.lifecycle.store.ingest import Progress
from headway.lifecycle.store.manifest import normalise_name
from headway.lifecycle.store.records import Change
from headway.lifecycle.store.rows import NO_LABEL, Rows
from headway.lifecycle.store.setters import UNKNOWN
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.stored_rows import read_images
from headway.storage.addresses import is_url

_FILES = (*LISTS, ".json", ".xml")
# Bytes of the first line of a file that are looked at.
_HEAD_BYTES = 64 << 10


def is_annotation_file(source: str) -> bool:
    """Returns True for a source of `headway dataset add` that is a file of annotations."""
    if is_url(source) or is_store_address(source):
        return False
    path = Path(source)
    if path.suffix.lower() not in _FILES or not path.is_file():
        return False
    if path.suffix.lower() != ".json":
        return True
    # Some programs end the name of a list of JSON lines so.
    try:
        with open_regular(path) as file:
            return "path" not in parse_object(file.readline(_HEAD_BYTES))
    except (OSError, JsonError):
        return True


def add_annotations(
    store: AnyStore,
    name: str,
    path: Path,
    *,
    source: str | None = None,
    images: Path | None = None,
    field: str | None = None,
    prefix: str = "",
    split: str = "",
    message: str = "",
    **options: Any,
) -> tuple[Changed, tuple[str, ...]]:
    """Adds the images of a file of annotations to a data set, with label, split, who set the label, and boxes.

    Args:
        name: name of the data set.
        source, field: see `read_annotations`.
        images: folder that the names of the samples start from; None: that of the file. So do the names in the file,
            but for a list, whose names start from its own folder.
        prefix: put before each name.
        split: split of all images; empty: what the file says, else the hash of the name. That of an image without a
            label counts once it has one.
        message: why, for the log.
        **options: as `Store.apply`. `by` has set the labels that the file names nobody for.

    Returns:
        what was done, and sentences about what was left out.

    Raises:
        UsageError: the file is missing, or its labels or names do not fit the data set.
        DataError: its content is invalid, or an image is missing or has other bytes than it says.
        StaleVersionError: another version is expected to be the newest one.
    """
    annotations = read_annotations(path, source, field=field)
    if annotations.source != lists.SOURCE:
        expect_relative(annotations, str(path))
    elif images is not None:
        annotations = rename_images(annotations, lambda one: os.path.relpath(path.absolute().parent / one, images))
    folder = path.parent if images is None else images
    is_list = annotations.source == lists.SOURCE
    _expect_classes(annotations, str(path), is_list=is_list)
    expect_images(annotations.images, folder)
    _expect_digests(annotations.images, folder)
    shares = store.summarise(name).shares
    splits = {one.split: _match_split(shares, one.split) for one in annotations.images if one.split}
    changes = [
        Change(
            operation="add",
            name=normalise_name(prefix + PurePosixPath(image.name).as_posix()),
            file=folder / image.name,
            label=next(iter(image.labels), None),
            split=split or splits.get(image.split, ""),
            by=image.by,
            annotations=build_facts(image, annotations.source) or None,
        )
        for image in annotations.images
    ]
    notes = [*annotations.notes]
    if lost := [one for one, found in splits.items() if not found and not split]:
        known = ", ".join(shares)
        what = f"The data set has no split {lost[0]!r:.80}, but {known}"
        notes.append(f"{what}: there, the hash of a name says the split. Choose one with --split.")
    if is_list and (columns := sorted({column for image in annotations.images for column in image.more})):
        notes.append(f"Columns not kept: {', '.join(columns[:10])}.")
    return store.apply(name, changes, message=message or f"add {path}", **options), tuple(notes)


def _expect_classes(annotations: Annotations, where: str, *, is_list: bool) -> None:
    """Raises UsageError unless each image has one class at most."""
    for image in annotations.images:
        if len(image.labels) > 1:
            what = (
                f"the image {image.name[:200]!r} has {len(image.labels)} labels, and a store keeps one class an image"
            )
            raise UsageError(what, where=where, fix="Convert the file into a list, and pack it with headway pack.")
        if is_list and any(column == "value" or column.startswith("value_") for column in image.more):
            what = "its labels are numbers, and a store keeps classes"
            raise UsageError(what, where=where, fix="Pack it with headway pack instead.")


def _expect_digests(images: Sequence[AnnotatedImage], folder: Path) -> None:
    """Raises DataError if an image has other bytes than the file says."""
    for image in images:
        if not image.sha256:
            continue
        path = folder / image.name
        try:
            digest = hashlib.sha256(read_regular(path)).hexdigest()
        except OSError as error:
            raise DataError(f"it cannot be read ({describe_os_error(error)})", where=str(path)) from None
        # The label could be that of another image.
        if digest != image.sha256:
            what = "the image has another SHA-256 than its annotations say"
            fix = "Name the folder with the images that were annotated: --images."
            raise DataError(what, where=str(path), fix=fix)


def _match_split(shares: Mapping[str, float], split: str) -> str:
    """Returns the split of a data set that a file means by its name for one; empty if there is none."""
    known = {name.lower(): name for name in shares}
    # CVAT writes Train and Validation; a folder with one of EVAL_NAMES beside `train` becomes `eval` too.
    return known.get(split.lower()) or (known.get(EVAL, "") if split.lower() in EVAL_NAMES else "")


@final
@dataclass(frozen=True, kw_only=True)
class VersionExport:
    """The result of `export_version`.

    Attributes:
        target: name of the format.
        annotations: what was written.
        images: number of image files that were written.
        notes: what was left out, as sentences.
    """

    target: str
    annotations: Annotations
    images: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns counts, the format and notes."""
        counts = self.annotations.count()
        return {"to": self.target, **counts, "written_images": self.images, "notes": list(self.notes)}


def export_version(
    address: str,
    path: Path,
    *,
    target: str | None = None,
    images: Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> VersionExport:
    """Writes labels, splits, boxes and annotators of a version, or of one split of it, into a file of annotations.

    Args:
        address: `store:cars@v3`, or `store:cars@v3/eval`.
        target: one of `FORMATS`. Default: by the ending of the file.
        images: folder to write the images into as well, by their names. Files there with the same bytes stay.
        overwrite: replace an existing file, and images with other bytes.
        progress: called with (images done, images in all).

    Raises:
        UsageError: there is no such version, a file exists, or the format is not known.
        DataError: the store is damaged.
    """
    target = choose_target(path, target)
    expect_new(path, overwrite)
    place = StoreAddress.parse(address)
    store = Store(place.find_store())
    rows = store.read_rows(address)
    if place.split:
        rows = rows.take((rows.split == rows.schema.find_split(place.split)).nonzero()[0])
    annotations, notes = _collect_annotations(store, address, rows, target)
    if images is None and rows.schema.mode != "keep":
        # The stored bytes are not those of any file that the user has.
        annotations = replace(annotations, images=tuple(replace(one, sha256="") for one in annotations.images))
    written = 0
    if images is not None:
        written = _write_images(store, rows, images, overwrite=overwrite, progress=progress)
        if target == lists.SOURCE:
            folder = path.absolute().parent
            annotations = rename_images(annotations, lambda name: os.path.relpath(images.absolute() / name, folder))
    notes += write_annotations(path, annotations, target)
    return VersionExport(target=target, annotations=annotations, images=written, notes=tuple(notes))


def _collect_annotations(store: Store, address: str, rows: Rows, target: str) -> tuple[Annotations, list[str]]:
    notes: list[str] = []
    setters = store.list_setters(str(replace(StoreAddress.parse(address), split="")))
    if unknown := sum(by == UNKNOWN for by in setters.values()):
        what = f"It is not known who set {pluralise(unknown, 'label')}"
        notes.append(f"{what}: the version that did has been removed as garbage.")
    names = {by: "" if by == UNKNOWN else _clean_name(by) for by in set(setters.values())}
    images = tuple(_read_samples(rows, {sample: names[by] for sample, by in setters.items()}, target, notes))
    classes = tuple(dict.fromkeys((*rows.classes, *collect_classes(images))))
    # What is specific to another format is gone by now.
    return Annotations(images=images, classes=classes, source=target), notes


def _read_samples(rows: Rows, setters: Mapping[str, str], target: str, notes: list[str]) -> Iterator[AnnotatedImage]:
    """Yields the samples of a version; adds to the notes what cannot be written."""
    counts: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    reason = ""
    by_name = rows.schema.choose_splits(rows.names).tolist() if NO_LABEL in rows.label else []
    for row in range(len(rows)):
        sample = rows.get_sample(row)
        facts = StoreFacts()
        try:
            facts = read_facts(sample.annotations)
        except JsonError as error:
            counts["unknown"] += 1
            reason = reason or f"{sample.name}: {error}"
        stored = (int(rows.places["width"][row]), int(rows.places["height"][row]))
        size = facts.size
        counts["resized"] += size not in (None, stored)
        # A list says the size only where boxes were drawn on an image of that size.
        if size is None and target != lists.SOURCE:
            size = stored
        boxes, more = facts.boxes, facts.more
        if facts.source not in ("", target):
            lost[facts.source] += 1
            more = {}
            # A list keeps them in its column of boxes.
            boxes = boxes if target == lists.SOURCE else tuple(replace(box, more={}) for box in boxes)
        yield AnnotatedImage(
            name=sample.name,
            labels=() if sample.label is None else (sample.label,),
            boxes=boxes,
            size=size,
            sha256=sample.sample,
            # The split that it will be in, once it has a label.
            split=sample.split if sample.label else sample.planned_split or rows.schema.splits[by_name[row]],
            by=facts.by if sample.label is None else setters.get(sample.sample, ""),
            more=more,
        )
    for source, count in sorted(lost.items()):
        notes.append(f"Left out facts of {pluralise(count, 'image')} that only {source} has a form for.")
    if counts["unknown"]:
        what = f"Left out the annotations of {pluralise(counts['unknown'], 'image')} that are not those of a file"
        notes.append(f"{what} ({reason}).")
    if counts["resized"]:
        what = f"The boxes of {pluralise(counts['resized'], 'image')} are for another size than the stored one"
        notes.append(f"{what}, and so is the size in the file.")


def _clean_name(by: str) -> str:
    """Returns a name that every format can hold."""
    return "".join("?" if find_text_fault(f"a{one}a") else one for one in by.strip())[:200]


def _write_images(store: Store, rows: Rows, folder: Path, *, overwrite: bool, progress: Progress | None) -> int:
    """Writes the stored images by their names, which never lead out of a folder. Returns how many were not there."""
    written = 0
    for row, data in read_images(store.folder, rows, np.arange(len(rows))):
        if progress is not None:
            progress(row + 1, len(rows))
        path = folder / rows.names[row]
        try:
            if path.is_file() and read_regular(path) == data:
                continue
            if os.path.lexists(path) and not overwrite:
                fix = "Name another folder with --images, or replace it with --overwrite."
                raise UsageError("this file exists, and is another image", where=str(path), fix=fix)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, data)
        except OSError as error:
            raise UsageError(f"it cannot be written ({describe_os_error(error)})", where=str(path)) from None
        written += 1
    return written
