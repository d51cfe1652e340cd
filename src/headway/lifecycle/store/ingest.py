"""Brings new images into a store: packs them into shards, or takes the shards of a pack as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import DataError, UsageError
from headway.data import native
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.formats.pack_source import ImageFiles, PackSource
from headway.data.image_files import list_image_files
from headway.data.opening import check_shard
from headway.data.pack import build_encoder
from headway.data.pack_mode import PackMode, open_header
from headway.data.pack_part import load_part_set
from headway.data.pack_plan import PackJob, PackPart, SetPlan
from headway.data.pack_set import pack_set, use_strict_pillow
from headway.data.reference import GRAY_MODES
from headway.data.version_columns import has_sample_ids
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.open_objects import open_objects
from headway.lifecycle.store.records import Rejected
from headway.lifecycle.store.rows import PLACE_TYPES, ShardObject
from headway.lifecycle.store.shard_objects import copy_and_hash, hash_file

SHARD_BYTES = 1 << 30
_CHUNK_RECORDS = 256

Progress = Callable[[int, int], None]
"""Called with (images done, images in all)."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class StoredImages:
    """Images whose bytes are in the store now; entry i of every array is one of them."""

    sample_id: NDArray[np.uint8]
    shards: tuple[ShardObject, ...]
    shard: NDArray[np.uint32]
    places: dict[str, NDArray[Any]]
    index: NDArray[np.int64]
    """Number of each image in the source."""
    rejected: tuple[Rejected, ...] = ()
    """Images of the source that cannot be used."""


def list_unlabelled(folder: Path) -> PackSource:
    """Lists images without labels: all image files in a folder, or one file. Raises UsageError if there is none."""
    files = list_image_files([folder])
    root = folder if folder.is_dir() else folder.parent
    return build_source([str(file.relative_to(root)) for file in files], files, str(root))


def build_source(names: Sequence[str], files: Sequence[Path], root: str = "") -> PackSource:
    """Returns image files as the source of a pack; their labels are kept elsewhere."""
    return PackSource(
        names=tuple(names),
        images=ImageFiles(tuple(map(str, files))),
        labels=np.zeros(len(names), np.int64),
        label_kind="class",
        classes=("",),
        root=root,
    )


def pack_images(
    source: PackSource, store: Path, staging: Path, schema: Schema, progress: Progress | None = None
) -> StoredImages:
    """Packs images into shards of the store. Bad ones are named in `rejected`.

    Raises:
        UsageError: the mode needs the native core, and it is not built.
        OSError: the store cannot be written.
        HeadwayError: the address of its shards cannot be written.
    """
    mode = PackMode.parse(schema.mode)
    if mode.kind == "seekable" and not native.is_available():
        what = "this data set is seekable, and the native core, which rewrites JPEGs, is not built here"
        raise UsageError(what, fix="Add the images on a machine that has it: the same bytes must give the same IDs.")
    encoder, _ = build_encoder(mode, None, False, [source])
    job = PackJob(
        source=source.root,
        format="recordio",
        encoder=encoder,
        transform="",
        threads=count_usable_cores(),
        shard_bytes=SHARD_BYTES,
        skip_bad=True,
        sets=(),
        # As a part of a pack: an addition may lack classes, and may turn out to have no good image.
        part=PackPart(index=1, count=1),
        options={},
    )
    everything = np.arange(len(source), dtype=np.int64)
    # Numbered, since names of a source need not be what a store allows.
    numbered = replace(source, names=tuple(map(str, range(len(source)))))
    plan = SetPlan(name="", source=numbered, ids=everything, sizes=source.images.measure_sizes())
    with use_strict_pillow():
        pack_set(plan, staging, job, lambda done: progress and progress(done, len(source)))
    part = load_part_set(staging)
    rejected = tuple(Rejected(name=source.names[int(number)], reason=reason) for number, reason in part.facts.skipped)
    offsets, text = part.columns["name_offset"].tolist(), part.columns["name"].tobytes()
    kept = [int(text[begin:end]) for begin, end in pairwise(offsets)]
    with closing(Dataset(staging, part.columns, part.description)) as dataset:
        stored = _identify(dataset, np.array(kept, np.int64))
    shards, objects = [], open_objects(store)
    for shard in part.description.shards:
        digest = hash_file(staging / shard.name)
        objects.keep(staging / shard.name, digest)
        shards.append(ShardObject(digest, shard.size, part.description.pack_id))
    return replace(stored, shards=tuple(shards), rejected=rejected)


def can_adopt(dataset: Dataset, schema: Schema) -> bool:
    """Returns True if the shards of a pack can be taken as they are."""
    description = dataset.description
    if description.format != "recordio" or has_sample_ids(dataset.columns) or (dataset.flags & FLAG_RAW).any():
        return False
    mode = PackMode.parse(schema.mode)
    # `keep` takes the bytes of image files whatever they are; other modes only what they would write themselves.
    return description.mode != "foreign" and (mode.kind == "keep" or mode.follow(description.mode) == description.mode)


def adopt_pack(dataset: Dataset, store: Path, staging: Path) -> StoredImages:
    """Copies the shards of a pack into the store, unchanged; every record is compared with its checksum.

    Raises:
        DataError: the pack is damaged.
        OSError: the store cannot be written.
        HeadwayError: the address of its shards cannot be written.
    """
    shards, copies = [], []
    description = dataset.description
    for number, shard in enumerate(description.shards):
        copy = staging / f"{number}.rec"
        digest = copy_and_hash(dataset.folder / shard.name, copy)
        check_shard(copy, shard, description)
        copies.append((copy, digest))
        shards.append(ShardObject(digest, shard.size, description.pack_id))
    stored = _identify(dataset, np.arange(len(dataset)))
    objects = open_objects(store)
    for copy, digest in copies:
        objects.keep(copy, digest)
    return replace(stored, shards=tuple(shards))


def _identify(dataset: Dataset, index: NDArray[np.int64]) -> StoredImages:
    """Hashes every record, and finds out which images are gray. Raises DataError if a record is damaged."""
    sample_id = np.zeros((len(dataset), 32), np.uint8)
    # A pack of gray images says so; in any other one each image has to be looked at.
    gray = np.full(len(dataset), dataset.description.channels == 1, np.uint8)

    def identify(chunk: NDArray[np.int64]) -> None:
        for sample, record in zip(chunk.tolist(), dataset.read(chunk), strict=True):
            if len(record) != dataset.length[sample] or crc32c(record) != dataset.crc32c[sample]:
                fix = "headway verify lists all damaged records."
                raise DataError("a record is damaged", where=f"{dataset.folder}, {dataset.name(sample)}", fix=fix)
            sample_id[sample] = np.frombuffer(hashlib.sha256(record).digest(), np.uint8)
            if not gray[sample]:
                with open_header(bytes(record)) as image:
                    gray[sample] = image.mode in GRAY_MODES

    if len(dataset):
        chunks = np.array_split(np.arange(len(dataset)), -(-len(dataset) // _CHUNK_RECORDS))
        with use_strict_pillow(), ThreadPoolExecutor(count_usable_cores(), thread_name_prefix="store") as pool:
            for _ in pool.map(identify, chunks):
                pass
    places = {
        name: np.array(gray if name == "gray" else dataset.columns[name], kind) for name, kind in PLACE_TYPES.items()
    }
    return StoredImages(
        sample_id=sample_id, shards=(), shard=np.array(dataset.shard, np.uint32), places=places, index=index
    )


def expect_classes(source: PackSource) -> None:
    """Raises UsageError unless the labels of a source are classes."""
    if source.label_kind != "class":
        what = f"its labels are of kind {source.label_kind}, and a store keeps classes"
        raise UsageError(what, where=source.root, fix="Pack it with headway pack instead.")
