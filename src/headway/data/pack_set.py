"""Packs one set: encodes its images on threads, writes the shards in order, and the columns last."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import ImageFile
from safetensors.numpy import save

from headway.core.errors import DataError, UsageError
from headway.core.files import sync_folder, write_and_sync
from headway.data import mapping
from headway.data.columns import (
    COLUMN_TYPES,
    COLUMNS_FILE,
    FLAG_SPLIT,
    NUMPY_TYPES,
    DatasetDescription,
    Shard,
    compute_fingerprint,
    count_classes,
    find_common_size,
)
from headway.data.formats.pack_source import ImageReader
from headway.data.formats.recordio import MAX_RECORD_BYTES
from headway.data.formats.writers import WRITERS, ShardWriter
from headway.data.pack_mode import LEFT_OUT, ImageEncoder, StoredImage, refuse_image
from headway.data.pack_part import PART_FILE, PartFacts
from headway.data.pack_plan import PackJob, SetPlan

MAX_SHARDS = 1 << 16
"""A shard's number is a 16-bit column."""

_MAX_CHUNK_FILES = 64
"""Most images of one task of a thread: enough that the overhead of a task, 30 us, is negligible."""
_MAX_CHUNK_BYTES = 4 << 20
"""Most bytes of one task: few enough that all tasks ahead of the writer fit into memory."""
_MAX_IMAGE_BYTES = MAX_RECORD_BYTES - (1 << 24)
"""Limit of an image: leaves 16 MiB of a record for its labels."""
_RECORD_OVERHEAD_BYTES = 64
"""Estimate of what a record adds to its image."""

Columns = dict[str, NDArray[Any]]


@final
@dataclass(frozen=True, kw_only=True)
class SetResult:
    """Result of packing one set."""

    samples: int
    size_bytes: int
    bad: list[tuple[str, str]]
    """(name, reason) of each bad image."""
    notes: dict[str, list[str]]
    """Names of the images that have each note."""
    left_out: int
    """Images that the transform left out."""


def pack_set(plan: SetPlan, folder: Path, job: PackJob, report: Callable[[int], None]) -> SetResult:
    """Packs a set into `folder`.

    Without `skip_bad`, nothing is written after the first bad image; the rest is only checked, so that the caller's
    error names all of them.

    Args:
        plan: the samples and their order.
        folder: created if it does not exist.
        job: settings of the pack.
        report: called with the number of images done.

    Returns:
        the counts of the set, and its bad images.

    Raises:
        DataError: no image is left, of the set or of a class; the source cannot be reached.
        UserCodeError: the transform failed.
        OSError: the file system refuses a write.
    """
    # The temporary folder of the pack, or one of its sets in it.
    folder.mkdir(exist_ok=True)
    columns: Columns = {name: np.zeros(len(plan.ids), NUMPY_TYPES[kind]) for name, kind in COLUMN_TYPES.items()}
    # Python numbers for scalars: indexing an array would box each label anew.
    labels = plan.labels.tolist() if plan.labels.ndim == 1 else plan.labels
    pack_id = plan.compute_pack_id(job)
    shards = _ShardSequence(folder, job, pack_id, columns)
    kept_indices: list[int] = []
    left_out_indices: list[int] = []
    bad_images: list[tuple[str, str]] = []
    names_by_note: dict[str, list[str]] = {}
    all_gray = True
    # Mapped source files are checked at the end; files that were truncated before are not part of this pack.
    truncated_before = mapping.find_truncated_files()
    try:
        for first_index, chunk in _encode_in_order(plan, job):
            for index, (image, crc) in enumerate(chunk, start=first_index):
                name = plan.name_prefix + plan.source.names[plan.ids[index]]
                if image.note:
                    names_by_note.setdefault(image.note, []).append(name)
                if image.reason:
                    bad_images.append((name, image.reason))
                elif image.note == LEFT_OUT:
                    left_out_indices.append(index)
                # `row` counts the images that are kept, `index` those of the plan.
                elif job.skip_bad or not bad_images:
                    row = len(kept_indices)
                    # Records are numbered through all parts.
                    shards.append(image, labels[index], row, plan.first + row)
                    columns["crc32c"][row] = crc
                    all_gray = all_gray and image.gray
                    kept_indices.append(index)
            report(first_index + len(chunk))
        # Only `close` knows the offsets of LMDB shards, so it comes before the fingerprint.
        shards_written = shards.close()
    finally:
        shards.abandon()
    mapping.check_mappings(but=truncated_before)
    if job.skip_bad or not bad_images:
        # The columns were made for all images; the rows at the end belong to images left out.
        columns = {name: column[: len(kept_indices)] for name, column in columns.items()}
        # A set without an image, or a class without one, cannot be trained on. A part may lack classes: the join looks
        # at all of them.
        if job.part is None:
            _check_classes_kept(plan, kept_indices, left_out_indices, job.source)
        columns |= _build_label_columns(plan, np.array(kept_indices, np.int64))
        description = DatasetDescription(
            pack_id=pack_id,
            fingerprint=compute_fingerprint(columns),
            format=job.format,
            mode=job.encoder.mode.follow(plan.source.images.mode),
            label_kind=plan.source.label_kind,
            classes=plan.source.classes,
            class_counts=count_classes(plan.source.label_kind, columns["label"], len(plan.source.classes)),
            channels=1 if all_gray else 3,
            common_size=find_common_size(columns) if kept_indices else None,
            shards=shards_written,
            source=job.source,
            sets=job.sets,
        )
        # Shards are on the disk before the columns, whose presence makes the folder a pack.
        sync_folder(folder)
        metadata = description.to_metadata()
        if job.part is None:
            write_and_sync(folder / COLUMNS_FILE, save(columns, metadata=metadata))
        else:
            facts = PartFacts(
                index=job.part.index,
                count=job.part.count,
                planned=len((plan.whole or plan).ids),
                planned_classes=tuple(np.unique(plan.labels).tolist()) if plan.source.label_kind == "class" else (),
                left_out=len(left_out_indices),
                skipped=tuple(bad_images),
                options=job.options,
            )
            write_and_sync(folder / PART_FILE, save(columns, metadata=metadata | facts.to_metadata()))
        sync_folder(folder)
    return SetResult(
        samples=len(kept_indices),
        size_bytes=sum(shard.size for shard in shards_written),
        bad=bad_images,
        notes=names_by_note,
        left_out=len(left_out_indices),
    )


@contextlib.contextmanager
def use_strict_pillow() -> Iterator[None]:
    """Makes Pillow refuse truncated files in the block, whatever the program has set, and hides its warnings."""
    previous = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = previous


def _check_classes_kept(plan: SetPlan, kept_indices: list[int], left_out_indices: list[int], source: str) -> None:
    """Raises DataError unless an image of each class is left; a split-off evaluation set needs just one image."""
    all_images = np.ones(len(plan.ids), np.bool_)
    # The message names the class that lost all its images, or the set.
    lost_mask = all_images
    which = f" of {plan.name}" if plan.name else ""
    if kept_indices:
        lost_classes = (
            np.setdiff1d(plan.labels, plan.labels[kept_indices])
            if plan.source.label_kind == "class"
            else all_images[:0]
        )
        if plan.name == "eval" or not lost_classes.size:
            return
        lost_mask = plan.labels == lost_classes[0]
        which = f" of class {plan.source.classes[lost_classes[0]]!r}"
    count = np.count_nonzero(lost_mask)
    if count and count == np.count_nonzero(lost_mask[left_out_indices]):
        images = f"all {count:,} images" if count > 1 else "the only image"
        what = f"the transform left out {images}{which}"
        raise DataError(what, where=source, fix="Let it return what is to be stored: None leaves a sample out.")
    raise DataError(f"no good image is left{which}", where=source, fix="Put good images into it.")


def _build_label_columns(plan: SetPlan, kept_indices: NDArray[np.int64]) -> Columns:
    names = [plan.source.names[plan.ids[index]].encode() for index in kept_indices]
    return {
        "label": plan.labels[kept_indices],
        "name": np.frombuffer(b"".join(names), np.uint8),
        "name_offset": np.cumsum([0, *map(len, names)], dtype=np.uint64),
    }


@final
class _ShardSequence:
    """Writes the shards of one set one after the other, and fills `columns` but for labels, names and checksums."""

    def __init__(self, folder: Path, job: PackJob, pack_id: int, columns: Columns) -> None:
        self._folder = folder
        self._pack_id = pack_id
        self._shard_bytes = job.shard_bytes
        # The shards of all parts come to lie in one folder.
        self._name_prefix = f"{job.part.number}-" if job.part else ""
        self._columns = columns
        self._extension, self._create_writer = WRITERS[job.format]
        self._finished_shards: list[Shard] = []
        self._writer: ShardWriter | None = None
        self._first_row = 0

    def append(self, image: StoredImage, label: Any, row: int, number: int) -> None:
        """Writes an image as record `number`, and fills row `row` of the columns.

        Raises UsageError if there would be too many shards.
        """
        added_bytes = image.size_bytes + _RECORD_OVERHEAD_BYTES
        # A shard ends before the image that would exceed its size, so only a larger image exceeds it.
        if self._writer and self._writer.size_bytes + added_bytes > self._shard_bytes:
            self._finish_shard(self._writer)
        if self._writer is None:
            if len(self._finished_shards) == MAX_SHARDS:
                what = f"shards of {self._shard_bytes:,} bytes are too many"
                raise UsageError(what, where=str(self._folder), fix="Make them larger.")
            self._writer = self._create_writer(self._folder / self._next_name, self._pack_id)
            self._first_row = row
        place = self._writer.append(image.data, label, number)
        values = {
            "shard": len(self._finished_shards),
            "offset": place.offset,
            "length": place.length,
            "width": image.width,
            "height": image.height,
            "flags": image.flags | FLAG_SPLIT * place.split,
        }
        for column, value in values.items():
            self._columns[column][row] = value

    def close(self) -> tuple[Shard, ...]:
        """Finishes the last shard, and returns all shards."""
        if self._writer:
            self._finish_shard(self._writer)
        return tuple(self._finished_shards)

    def abandon(self) -> None:
        """Closes an unfinished shard after an error; does nothing after `close`."""
        if self._writer:
            self._writer.abandon()

    @property
    def _next_name(self) -> str:
        return f"shard-{self._name_prefix}{len(self._finished_shards):05d}{self._extension}"

    def _finish_shard(self, writer: ShardWriter) -> None:
        offsets = writer.close()
        if offsets is not None:
            self._columns["offset"][self._first_row : self._first_row + len(offsets)] = offsets
        self._finished_shards.append(Shard(name=self._next_name, size=writer.size_bytes))
        self._writer = None


EncodedImage = tuple[StoredImage, int]
"""An image as it is stored, and its checksum."""


def _encode_in_order(plan: SetPlan, job: PackJob) -> Iterator[tuple[int, list[EncodedImage]]]:
    """Yields (index of the first image, encoded images) of each chunk, in order; encodes a few chunks ahead."""
    pending: deque[tuple[int, Future[list[EncodedImage]]]] = deque()
    pool = ThreadPoolExecutor(job.threads, thread_name_prefix="pack")
    try:
        for indices in _split_into_chunks(plan.sizes):
            pending.append((indices.start, pool.submit(_encode_chunk, plan, job.encoder, indices)))
            # Two tasks a thread keep all of them busy while the writer waits for the oldest.
            if len(pending) > 2 * job.threads:
                first_index, chunk = pending.popleft()
                yield first_index, chunk.result()
        for first_index, chunk in pending:
            yield first_index, chunk.result()
    finally:
        # An error in the writer must not wait for tasks that nobody needs.
        pool.shutdown(cancel_futures=True)


def _split_into_chunks(sizes: NDArray[np.int64]) -> Iterator[range]:
    first_index = size_bytes = 0
    # A chunk ends at the limit of files or of bytes, whichever comes first.
    for index, size in enumerate(sizes.tolist()):
        if index > first_index and (index - first_index == _MAX_CHUNK_FILES or size_bytes + size > _MAX_CHUNK_BYTES):
            yield range(first_index, index)
            first_index, size_bytes = index, 0
        size_bytes += size
    yield range(first_index, len(sizes))


def _encode_chunk(plan: SetPlan, encoder: ImageEncoder, indices: range) -> list[EncodedImage]:
    encoded = []
    # Remote images of a chunk are fetched together: one request instead of one for each.
    images = plan.source.images.prefetch(plan.ids[indices.start : indices.stop].tolist())
    for index in indices:
        stored = _encode_image(plan, images, encoder, index)
        if stored.size_bytes > _MAX_IMAGE_BYTES:
            stored = _refuse_large_image(stored.size_bytes)
        encoded.append((stored, crc32c(stored.payload)))
    return encoded


def _encode_image(plan: SetPlan, images: ImageReader, encoder: ImageEncoder, index: int) -> StoredImage:
    sample = int(plan.ids[index])
    # Checked by size before it is read into memory.
    if plan.sizes[index] > _MAX_IMAGE_BYTES:
        return _refuse_large_image(int(plan.sizes[index]))
    try:
        image = images.read(sample)
    except OSError as error:
        return refuse_image(f"it cannot be read ({error.strerror})")
    except DataError as error:
        return refuse_image(error.what)
    label = plan.labels[index]
    return encoder(image, label if label.ndim else label.item(), plan.source.names[sample])


def _refuse_large_image(size: int) -> StoredImage:
    return refuse_image(f"its {size:,} bytes are more than the limit of {_MAX_IMAGE_BYTES:,}")
