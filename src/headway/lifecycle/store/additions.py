"""New samples: from a source of images, or from files that changes name. Their bytes are in the store afterwards."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.columns import COLUMNS_FILE
from headway.data.formats.pack_source import ImageFiles, PackSource
from headway.data.store_address import EVAL, TRAIN, UNLABELLED, StoreAddress, is_store_address
from headway.lifecycle.store.change_rows import build_annotations, choose_new_splits, choose_split, number_labels
from headway.lifecycle.store.ingest import (
    Progress,
    StoredImages,
    adopt_pack,
    build_source,
    can_adopt,
    expect_classes,
    list_unlabelled,
    pack_images,
)
from headway.lifecycle.store.manifest import Schema, load_manifest, normalise_name
from headway.lifecycle.store.records import Change, Rejected
from headway.lifecycle.store.rows import NO_LABEL, NOT_PLANNED, Names, Rows
from headway.lifecycle.store.version_files import read_split
from headway.storage.addresses import is_url


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Additions:
    """Samples to add, whose shards are in the store."""

    rows: tuple[Rows, ...] = ()
    is_placed: tuple[NDArray[np.bool_], ...] = ()
    """For each of `rows`: True for the samples whose split was asked for."""
    rejected: tuple[Rejected, ...] = ()
    """Images that cannot be used."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about files that were left out."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class _Set:
    """One set of a source."""

    images: PackSource
    split: str = ""
    """Split that it belongs to; empty: the hash of each name says."""
    prefix: str = ""
    is_labelled: bool = True
    version: Rows | None = None
    """The samples, if the source is a version of a store."""


def prepare_source(
    store: Path,
    staging: Path,
    schema: Schema,
    source: str | os.PathLike[str],
    *,
    prefix: str = "",
    split: str = "",
    unlabelled: bool = False,
    progress: Progress | None = None,
) -> Additions:
    """Brings all images of a source into the store.

    Args:
        prefix: put before each name.
        split: split of all images; empty: the set of the source, or the hash of the name.
        unlabelled: takes all image files of a folder, without labels.

    Raises:
        UsageError: the source, its labels, names or sets do not fit the data set.
        DataError: the source is damaged.
    """
    if split:
        # Before anything is read.
        choose_split(schema, prefix or "all images", split, None, is_labelled=not unlabelled)
    sets = _plan_sets(source, schema.splits, split=split, unlabelled=unlabelled)
    done = [
        _bring(store, staging / str(number), schema, one, prefix, split or one.split, progress)
        for number, one in enumerate(sets)
    ]
    return Additions(
        rows=tuple(rows for part in done for rows in part.rows),
        is_placed=tuple(one for part in done for one in part.is_placed),
        rejected=tuple(one for part in done for one in part.rejected),
        notes=tuple(note for one in sets for note in one.images.notes),
    )


def list_file_changes(
    source: str | os.PathLike[str],
    splits: Sequence[str],
    *,
    prefix: str = "",
    split: str = "",
    unlabelled: bool = False,
) -> tuple[list[Change], tuple[str, ...]]:
    """Returns what adds the image files of a source, and sentences about files that were left out.

    Args:
        splits: those of the data set.
        prefix, split, unlabelled: as `prepare_source`.

    Raises:
        UsageError: the images are not files of this machine, their labels are not classes, or a set has no split.
    """
    changes, notes = list[Change](), list[str]()
    for one in _plan_sets(source, splits, split=split, unlabelled=unlabelled):
        images = one.images
        if not isinstance(images.images, ImageFiles):
            what = "a data service takes image files, and the images of this source are none"
            fix = "Name a folder or a list of image files, or add it on the machine where the store lies."
            raise UsageError(what, where=os.fspath(source), fix=fix)
        if one.is_labelled:
            expect_classes(images)
        # No split of its own: it is planned for when there is a label.
        wanted = split if one.split == UNLABELLED else split or one.split
        changes += [
            Change(
                operation="add",
                name=normalise_name(f"{prefix}{one.prefix}{name}"),
                file=Path(file),
                label=images.classes[label] if one.is_labelled else None,
                split=wanted,
            )
            for name, file, label in zip(images.names, images.images.paths, images.labels.tolist(), strict=True)
        ]
        notes += images.notes
    return changes, tuple(notes)


def _plan_sets(source: str | os.PathLike[str], splits: Sequence[str], *, split: str, unlabelled: bool) -> list[_Set]:
    """Lists the sets of a source. Raises UsageError if one has no split to go to."""
    if unlabelled:
        if is_url(source) or is_store_address(source):
            fix = "Name a folder of image files."
            raise UsageError("images without labels come from a folder", where=os.fspath(source), fix=fix)
        return [_Set(images=list_unlabelled(Path(source)), split=UNLABELLED, is_labelled=False)]
    sets = _list_sets(source, splits)
    for one in sets:
        if not split and one.split and one.split not in splits:
            what = f"the source has a set {one.split!r}, and the data set has no split of this name"
            fix = "Say where all images go with --split, or add one set of the source at a time."
            raise UsageError(what, where=os.fspath(source), fix=fix)
    return sets


def _list_sets(source: str | os.PathLike[str], splits: Sequence[str]) -> list[_Set]:
    """Lists the sets of a source with labels: one or two, or all splits of a version."""
    if not is_store_address(source):
        train, evaluation = opening.open_split(source)
        if evaluation is None:
            return [_Set(images=train)]
        # A folder of validation or test images is the evaluation set, unless the data set has a split of its name.
        own = Path(evaluation.root).name.lower()
        split = own if own in splits else EVAL
        # Names of two sets may be the same.
        return [
            _Set(images=train, split=TRAIN, prefix=f"{TRAIN}/"),
            _Set(images=evaluation, split=split, prefix=f"{EVAL}/"),
        ]
    address = StoreAddress.parse(os.fspath(source))
    folder = address.resolve()
    manifest = load_manifest(folder)
    names = [address.resolve_split().name] if address.split else manifest.splits
    return [
        _Set(
            images=_open_split(folder / name, is_labelled=name != UNLABELLED),
            # One split alone is a source as any other.
            split=name if name == UNLABELLED or not address.split else "",
            is_labelled=name != UNLABELLED,
            version=read_split(folder, manifest, name),
        )
        for name in names
    ]


def _open_split(folder: Path, *, is_labelled: bool) -> PackSource:
    images = opening.open_source(folder)
    # A pack has no number for a label that is not there.
    return images if is_labelled else replace(images, labels=np.zeros(len(images), np.int64), classes=("",))


def _bring(
    store: Path, staging: Path, schema: Schema, source: _Set, prefix: str, split: str, progress: Progress | None
) -> Additions:
    """Brings one set into the store."""
    images = source.images
    names = [normalise_name(f"{prefix}{source.prefix}{name}") for name in images.names]
    label = np.full(len(images), NO_LABEL, np.int64)
    known: tuple[str, ...] = ()
    if source.is_labelled:
        expect_classes(images)
        # Class numbers of the source, by those of the data set: equal names may be written in two ways.
        table, known = number_labels(schema, list(images.classes))
        label = table[images.labels]
    staging.mkdir()
    stored = _store_images(store, staging, schema, images, progress)
    kept = [names[number] for number in stored.index.tolist()]
    number = schema.find_split(split) if split else None
    if source.is_labelled:
        splits = schema.choose_splits(kept) if number is None else np.full(len(kept), number, np.uint8)
        planned = None
    else:
        splits = np.full(len(kept), schema.find_split(UNLABELLED), np.uint8)
        planned = None if split in ("", UNLABELLED) else np.full(len(kept), number, np.uint8)
    rows = _build_rows(schema, known, stored, kept, label[stored.index], splits)
    rows = replace(rows, planned=planned)
    if source.version is not None:
        rows = _take_more(rows, source.version.take(stored.index))
    return Additions(rows=(rows,), is_placed=(np.full(len(kept), bool(split)),), rejected=stored.rejected)


def _take_more(rows: Rows, version: Rows) -> Rows:
    """Returns the rows with the annotations and planned splits of the same samples in a version."""
    rows = replace(rows, annotations=version.annotations)
    if rows.planned is not None or version.planned is None:
        return rows
    names = [*version.schema.splits, *[UNLABELLED] * (NOT_PLANNED + 1 - len(version.schema.splits))]
    # A split that the data set does not have cannot be planned.
    table = [rows.schema.splits.index(name) if name in rows.schema.splits[:-1] else NOT_PLANNED for name in names]
    return replace(rows, planned=np.array(table, np.uint8)[version.planned])


def _store_images(
    store: Path, staging: Path, schema: Schema, source: PackSource, progress: Progress | None
) -> StoredImages:
    if (Path(source.root) / COLUMNS_FILE).is_file():
        with closing(opening.open(source.root)) as dataset:
            if can_adopt(dataset, schema):
                return adopt_pack(dataset, store, staging)
    return pack_images(source, store, staging, schema, progress)


def prepare_changes(
    store: Path, staging: Path, schema: Schema, changes: Sequence[Change], progress: Progress | None = None
) -> Additions:
    """Brings the files of all additions into the store.

    Raises:
        UsageError: a name, label or split is impossible, or a file is not there.
    """
    new = [change for change in changes if change.operation == "add"]
    # Everything is checked before the first image is read, that of additions without a file too.
    names = [normalise_name(change.name) for change in new]
    label, classes = number_labels(schema, [change.label for change in new])
    split, planned = choose_new_splits(schema, names, new)
    annotations = build_annotations(new)
    numbers = [number for number, change in enumerate(new) if change.file is not None]
    if not numbers:
        return Additions()
    files = [file for change in new if (file := change.file) is not None]
    for file in files:
        if not file.is_file() or not stat.S_ISREG(file.stat().st_mode):
            raise UsageError("there is no such file", where=str(file), fix="Name an image file.")
    source = build_source([names[number] for number in numbers], files)
    stored = pack_images(source, store, staging, schema, progress)
    kept = np.array(numbers, np.int64)[stored.index]
    rows = _build_rows(
        schema,
        classes,
        stored,
        [names[number] for number in kept.tolist()],
        label[kept],
        split[kept],
    )
    rows = replace(rows, planned=planned[kept], annotations=annotations.take(kept) if annotations else None)
    is_placed = np.array([bool(change.split) for change in new], np.bool_)[kept]
    return Additions(rows=(rows,), is_placed=(is_placed,), rejected=stored.rejected)


def _build_rows(
    schema: Schema,
    classes: tuple[str, ...],
    stored: StoredImages,
    names: Sequence[str],
    label: NDArray[np.int64],
    split: NDArray[np.uint8],
) -> Rows:
    return Rows(
        schema=schema,
        classes=classes,
        shards=stored.shards,
        sample_id=stored.sample_id,
        names=Names.build(names),
        label=label,
        split=split,
        shard=stored.shard,
        places=stored.places,
    )
