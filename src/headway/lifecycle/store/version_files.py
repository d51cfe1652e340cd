"""The folder of a version: a manifest, and for each split a columns file that opens like that of a pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import DataError
from headway.core.untrusted_json import is_sha256
from headway.data.columns import (
    COLUMN_TYPES,
    COLUMNS_FILE,
    NUMPY_TYPES,
    DatasetDescription,
    Shard,
    count_classes,
    find_common_size,
    load_columns,
)
from headway.data.pack_set import MAX_SHARDS
from headway.data.store_address import OBJECTS, UNLABELLED, VERSIONS
from headway.data.store_objects import EXTENSION
from headway.data.version_columns import (
    ANNOTATIONS,
    ANNOTATIONS_OFFSET,
    GRAY,
    PLANNED_SPLIT,
    SAMPLE_ID,
    compute_content_fingerprint,
)
from headway.lifecycle.store.manifest import Manifest, SplitContent, load_manifest
from headway.lifecycle.store.rows import NOT_PLANNED, PLACES, Names, Rows, ShardObject, build_empty, join_rows

_RESTORE = "Restore the store from a copy: headway dataset verify lists what is damaged."
# From versions/ID/SPLIT to the folder of the store.
_UP = "../../.."


def get_version_folder(store: Path, version: str) -> Path:
    """Returns the folder of a version."""
    return store / VERSIONS / version


def build_manifest(rows: Rows) -> Manifest:
    """Returns the manifest of samples in their canonical form (`Rows.settle`)."""
    splits = {}
    for number, name in enumerate(rows.schema.splits):
        if (count := int(np.count_nonzero(rows.split == number))) == 0:
            continue
        part = rows.take(np.flatnonzero(rows.split == number))
        splits[name] = SplitContent(samples=count, fingerprint=compute_content_fingerprint(get_content(part)))
    return Manifest(schema=rows.schema, classes=rows.classes, splits=splits)


def get_content(rows: Rows) -> dict[str, NDArray[Any]]:
    """Returns the columns that say what a split is; see `headway.data.version_columns`."""
    content: dict[str, NDArray[Any]] = {
        SAMPLE_ID: rows.sample_id,
        "name": rows.names.text,
        "name_offset": rows.names.offset,
        "label": rows.label,
    }
    if rows.annotations is not None and len(rows.annotations.text):
        content |= {ANNOTATIONS: rows.annotations.text, ANNOTATIONS_OFFSET: rows.annotations.offset}
    if rows.planned is not None and (rows.planned != NOT_PLANNED).any():
        content[PLANNED_SPLIT] = rows.planned
    return content


def build_columns(
    rows: Rows, split: str, manifest: Manifest, version: str
) -> tuple[dict[str, NDArray[Any]], DatasetDescription]:
    """Returns the columns and the description of one split."""
    used = np.unique(rows.shard)
    if len(used) > MAX_SHARDS:
        what = f"this version would have {len(used):,} shards, and a version has at most {MAX_SHARDS:,}"
        raise DataError(what, fix="Add more images at a time.")
    table = np.zeros(len(rows.shards), np.uint16)
    table[used] = np.arange(len(used), dtype=np.uint16)
    columns: dict[str, NDArray[Any]] = {**rows.places, "shard": table[rows.shard], **get_content(rows)}
    shards = []
    for number in used.tolist():
        shard = rows.shards[number]
        name = f"{_UP}/{OBJECTS}/{shard.digest[:2]}/{shard.digest}{EXTENSION}"
        shards.append(Shard(name=name, size=shard.size, pack_id=shard.pack_id))
    is_labelled = split != UNLABELLED
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}, DatasetDescription(
        pack_id=int(version[:16], 16),
        fingerprint=manifest.splits[split].fingerprint,
        format="recordio",
        mode=rows.schema.mode,
        label_kind="class",
        classes=rows.classes,
        class_counts=count_classes("class", rows.label, len(rows.classes)) if is_labelled else (0,) * len(rows.classes),
        channels=1 if rows.places[GRAY].all() else 3,
        common_size=find_common_size(columns),
        shards=tuple(shards),
        source=f"version {version}",
    )


def read_rows(store: Path, version: str) -> Rows:
    """Reads the samples of a version. Raises DataError if it is damaged, or has been collected as garbage."""
    folder = get_version_folder(store, version)
    if not folder.is_dir():
        what = "the version is not there: it was collected as garbage, or the store is incomplete"
        raise DataError(what, where=str(folder), fix="Use a newer version, or a copy of the store.")
    manifest = load_manifest(folder)
    parts = [read_split(folder, manifest, split) for split in manifest.splits]
    if not parts:
        return build_empty(manifest.schema)
    # The splits of a version share one list of classes, which may have more than the labels use.
    return replace(join_rows(parts), classes=manifest.classes).settle() if len(parts) > 1 else parts[0]


def read_split(folder: Path, manifest: Manifest, split: str) -> Rows:
    """Reads the samples of one split. Raises DataError if it is damaged."""
    path = folder / split / COLUMNS_FILE
    if split not in manifest.schema.splits:
        raise DataError(f"the manifest has a split {split!r:.80} outside its schema", where=str(folder), fix=_RESTORE)
    columns, description, _ = load_columns(path)
    _check_columns(columns, description, manifest, path)
    content = manifest.splits[split]
    shards = tuple(
        ShardObject(PurePosixPath(shard.name).stem, shard.size, shard.pack_id or 0) for shard in description.shards
    )
    if len(columns["label"]) != content.samples or description.fingerprint != content.fingerprint:
        raise DataError("the columns are those of another version", where=str(path), fix=_RESTORE)
    return Rows(
        schema=manifest.schema,
        classes=manifest.classes,
        shards=shards,
        sample_id=columns[SAMPLE_ID],
        names=Names(text=columns["name"], offset=columns["name_offset"]),
        label=columns["label"],
        split=np.full(content.samples, manifest.schema.find_split(split), np.uint8),
        shard=columns["shard"].astype(np.uint32),
        places={name: columns[name] for name in PLACES},
        annotations=Names(text=columns[ANNOTATIONS], offset=columns[ANNOTATIONS_OFFSET])
        if ANNOTATIONS in columns
        else None,
        planned=columns.get(PLANNED_SPLIT),
    )


def _check_columns(
    columns: dict[str, NDArray[Any]], description: DatasetDescription, manifest: Manifest, path: Path
) -> None:
    """Raises DataError unless these are the columns of a version, with numbers that can be used as they are."""
    count = len(columns["label"])
    shapes = {SAMPLE_ID: (count, 32), GRAY: (count,), "label": (count,), "name_offset": (count + 1,)}
    kinds = {**COLUMN_TYPES, SAMPLE_ID: "U8", GRAY: "U8", "label": "I64", "name_offset": "U64", "name": "U8"}
    texts = [("name", "name_offset")]
    if ANNOTATIONS in columns or ANNOTATIONS_OFFSET in columns:
        shapes[ANNOTATIONS_OFFSET] = (count + 1,)
        kinds |= {ANNOTATIONS: "U8", ANNOTATIONS_OFFSET: "U64"}
        texts.append((ANNOTATIONS, ANNOTATIONS_OFFSET))
    if PLANNED_SPLIT in columns:
        shapes[PLANNED_SPLIT], kinds[PLANNED_SPLIT] = (count,), "U8"
    if any(name not in columns or columns[name].shape != shape for name, shape in shapes.items()) or any(
        name not in columns or columns[name].dtype != NUMPY_TYPES[kind] for name, kind in kinds.items()
    ):
        raise DataError("a column is missing or of another type", where=str(path), fix=_RESTORE)
    label = columns["label"]
    is_sound = (
        description.classes == manifest.classes
        and all(is_sha256(PurePosixPath(shard.name).stem) for shard in description.shards)
        and (not count or (label.min() >= -1 and label.max() < len(manifest.classes)))
        and (not count or columns["shard"].max() < len(description.shards))
        and _are_planned(columns.get(PLANNED_SPLIT), manifest)
        and all(_fits(columns[text], columns[offset]) for text, offset in texts)
    )
    if not is_sound:
        raise DataError("a column has numbers that nothing fits", where=str(path), fix=_RESTORE)


def _are_planned(planned: NDArray[Any] | None, manifest: Manifest) -> bool:
    """Returns True if these are numbers of splits for samples with a label, or NOT_PLANNED."""
    return planned is None or bool(((planned < len(manifest.schema.shares)) | (planned == NOT_PLANNED)).all())


def _fits(text: NDArray[Any], offset: NDArray[Any]) -> bool:
    """Returns True if offsets divide a text into one part for each sample."""
    return int(offset[0]) == 0 and int(offset[-1]) == len(text) and bool((offset[1:] >= offset[:-1]).all())
