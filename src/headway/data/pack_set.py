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
from headway.data.formats.recordio import RECORD_LIMIT_BYTES
from headway.data.formats.writers import WRITERS, ShardWriter
from headway.data.pack_mode import LEFT_OUT, ImageEncoder, StoredImage, refuse_image
from headway.data.pack_plan import PackJob, SetPlan

SHARD_LIMIT = 1 << 16
"""A shard's number is a 16-bit column."""

_CHUNK_FILES, _CHUNK_BYTES = 64, 4 << 20
"""Limits of one task of a thread: enough small files that the 30 us of a task do not count, and few enough bytes that
all tasks ahead of the writer fit into memory.
"""
_LIMIT_BYTES = RECORD_LIMIT_BYTES - (1 << 24)
"""Leaves 16 MiB of a record for its labels."""
_RECORD_OVERHEAD_BYTES = 64

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
    """Packs a set into `folder`; `report` is called with the number of images done.

    Without `skip_bad`, nothing is written after the first bad image; the rest is only checked, so that the error
    names all of them.

    Raises:
        DataError: no image is left, of the set or of a class; the source cannot be reached.
        UserCodeError: the transform failed.
        OSError: the file system refuses a write.
    """
    # The temporary folder of the pack, or a part of it.
    folder.mkdir(exist_ok=True)
    columns: Columns = {name: np.zeros(len(plan.ids), NUMPY_TYPES[kind]) for name, kind in COLUMN_TYPES.items()}
    # Python numbers for scalars: indexing an array would box each label anew.
    labels = plan.labels.tolist() if plan.labels.ndim == 1 else plan.labels
    pack_id = plan.compute_pack_id(job)
    shards = _ShardSequence(folder, job, pack_id, columns)
    kept: list[int] = []
    left_out: list[int] = []
    bad: list[tuple[str, str]] = []
    notes: dict[str, list[str]] = {}
    gray = True
    # Mapped source files are checked at the end; files cut earlier are not ours.
    cut_before = mapping.find_cut_files()
    try:
        for first, chunk in _encode_in_order(plan, job):
            for place, (stored, crc) in enumerate(chunk, start=first):
                name = plan.name_prefix + plan.source.names[plan.ids[place]]
                if stored.note:
                    notes.setdefault(stored.note, []).append(name)
                if stored.reason:
                    bad.append((name, stored.reason))
                elif stored.note == LEFT_OUT:
                    left_out.append(place)
                # A row is the number among the images that are kept, a place the number in the plan.
                elif job.skip_bad or not bad:
                    row = len(kept)
                    shards.append(stored, labels[place], row)
                    columns["crc32c"][row] = crc
                    gray = gray and stored.gray
                    kept.append(place)
            report(first + len(chunk))
        # Only `close` knows the offsets of LMDB shards, so it comes before the fingerprint.
        finished = shards.close()
    finally:
        shards.abandon()
    mapping.check_mappings(but=cut_before)
    if job.skip_bad or not bad:
        # The columns were made for all images; the rows at the end belong to images left out.
        columns = {name: column[: len(kept)] for name, column in columns.items()}
        # A set without an image, or a class without one, cannot be trained on.
        _check_kept(plan, kept, left_out, job.source)
        columns |= _build_label_columns(plan, np.array(kept, np.int64))
        description = DatasetDescription(
            pack_id=pack_id,
            fingerprint=compute_fingerprint(columns),
            format=job.format,
            mode=job.encoder.mode.follow(plan.source.images.mode),
            label_kind=plan.source.label_kind,
            classes=plan.source.classes,
            class_counts=count_classes(plan.source.label_kind, columns["label"], len(plan.source.classes)),
            channels=1 if gray else 3,
            common_size=find_common_size(columns),
            shards=finished,
            source=job.source,
            parts=job.parts,
        )
        # Shards are on the disk before the columns, whose presence makes the folder a pack.
        sync_folder(folder)
        write_and_sync(folder / COLUMNS_FILE, save(columns, metadata=description.to_metadata()))
        sync_folder(folder)
    return SetResult(
        samples=len(kept),
        size_bytes=sum(shard.size for shard in finished),
        bad=bad,
        notes=notes,
        left_out=len(left_out),
    )


@contextlib.contextmanager
def use_strict_pillow() -> Iterator[None]:
    """Makes Pillow refuse truncated files in the block, whatever the program has set, and hides its warnings."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _check_kept(plan: SetPlan, kept: list[int], left_out: list[int], source: str) -> None:
    """Raises DataError unless an image is left, and one of each class; a split-off evaluation set may lack classes."""
    every = np.ones(len(plan.ids), np.bool_)
    # The message names the class that lost all its images, or the set.
    lost, whose = every, f" of {plan.name}" if plan.name else ""
    if kept:
        gone = np.setdiff1d(plan.labels, plan.labels[kept]) if plan.source.label_kind == "class" else every[:0]
        if plan.name == "eval" or not gone.size:
            return
        lost, whose = plan.labels == gone[0], f" of class {plan.source.classes[gone[0]]!r}"
    count = np.count_nonzero(lost)
    if count and count == np.count_nonzero(lost[left_out]):
        these = f"all {count:,} images" if count > 1 else "the only image"
        what = f"the transform left out {these}{whose}"
        raise DataError(what, where=source, fix="Let it return what is to be stored: None leaves a sample out.")
    raise DataError(f"no good image is left{whose}", where=source, fix="Put good images into it.")


def _build_label_columns(plan: SetPlan, kept: NDArray[np.int64]) -> Columns:
    names = [plan.source.names[plan.ids[place]].encode() for place in kept]
    return {
        "label": plan.labels[kept],
        "name": np.frombuffer(b"".join(names), np.uint8),
        "name_offset": np.cumsum([0, *map(len, names)], dtype=np.uint64),
    }


@final
class _ShardSequence:
    """The shards of one set, written one after the other; fills the columns that locate an image."""

    def __init__(self, folder: Path, job: PackJob, pack_id: int, columns: Columns) -> None:
        self._folder, self._pack_id, self._shard_bytes, self._columns = folder, pack_id, job.shard_bytes, columns
        self._ending, self._new_writer = WRITERS[job.format]
        self._finished: list[Shard] = []
        self._writer: ShardWriter | None = None
        self._first_row = 0

    def append(self, image: StoredImage, label: Any, row: int) -> None:
        added_bytes = image.size_bytes + _RECORD_OVERHEAD_BYTES
        # A shard ends before the image that would exceed its size, so only a larger image exceeds it.
        if self._writer and self._writer.size_bytes + added_bytes > self._shard_bytes:
            self._finish(self._writer)
        if self._writer is None:
            if len(self._finished) == SHARD_LIMIT:
                what = f"shards of {self._shard_bytes:,} bytes are too many"
                raise UsageError(what, where=str(self._folder), fix="Make them larger.")
            self._writer, self._first_row = self._new_writer(self._folder / self._next_name, self._pack_id), row
        placed = self._writer.append(image.data, label, row)
        # The columns of this image; those of the label come at the end.
        values = {
            "shard": len(self._finished),
            "offset": placed.offset,
            "length": placed.length,
            "width": image.width,
            "height": image.height,
            "flags": image.flags | FLAG_SPLIT * placed.split,
        }
        for column, value in values.items():
            self._columns[column][row] = value

    def close(self) -> tuple[Shard, ...]:
        if self._writer:
            self._finish(self._writer)
        return tuple(self._finished)

    def abandon(self) -> None:
        if self._writer:
            self._writer.abandon()

    @property
    def _next_name(self) -> str:
        return f"shard-{len(self._finished):05d}{self._ending}"

    def _finish(self, writer: ShardWriter) -> None:
        offsets = writer.close()
        if offsets is not None:
            self._columns["offset"][self._first_row : self._first_row + len(offsets)] = offsets
        self._finished.append(Shard(name=self._next_name, size=writer.size_bytes))
        self._writer = None


EncodedImage = tuple[StoredImage, int]
"""An image as it is stored, and its checksum."""


def _encode_in_order(plan: SetPlan, job: PackJob) -> Iterator[tuple[int, list[EncodedImage]]]:
    """Yields chunks of encoded images in order, each with the place of its first; encodes a few chunks ahead."""
    waiting: deque[tuple[int, Future[list[EncodedImage]]]] = deque()
    pool = ThreadPoolExecutor(job.threads, thread_name_prefix="pack")
    try:
        for places in _split_into_chunks(plan.sizes):
            waiting.append((places.start, pool.submit(_encode_chunk, plan, job.encoder, places)))
            # Two tasks a thread keep all of them busy while the writer waits for the oldest.
            if len(waiting) > 2 * job.threads:
                first, chunk = waiting.popleft()
                yield first, chunk.result()
        for first, chunk in waiting:
            yield first, chunk.result()
    finally:
        # An error in the writer must not wait for tasks that nobody needs.
        pool.shutdown(cancel_futures=True)


def _split_into_chunks(sizes: NDArray[np.int64]) -> Iterator[range]:
    first = size_bytes = 0
    # A chunk ends at the limit of files or of bytes, whichever comes first.
    for place, size in enumerate(sizes.tolist()):
        if place > first and (place - first == _CHUNK_FILES or size_bytes + size > _CHUNK_BYTES):
            yield range(first, place)
            first, size_bytes = place, 0
        size_bytes += size
    yield range(first, len(sizes))


def _encode_chunk(plan: SetPlan, encoder: ImageEncoder, places: range) -> list[EncodedImage]:
    encoded = []
    # Remote images of a chunk are fetched together: one request instead of one for each.
    images = plan.source.images.prefetch(plan.ids[places.start : places.stop].tolist())
    for place in places:
        stored = _encode_one(plan, images, encoder, place)
        if stored.size_bytes > _LIMIT_BYTES:
            stored = _refuse_size(stored.size_bytes)
        encoded.append((stored, crc32c(stored.payload)))
    return encoded


def _encode_one(plan: SetPlan, images: ImageReader, encoder: ImageEncoder, place: int) -> StoredImage:
    sample = int(plan.ids[place])
    # Checked by size before it is read into memory.
    if plan.sizes[place] > _LIMIT_BYTES:
        return _refuse_size(int(plan.sizes[place]))
    try:
        image = images.read(sample)
    except OSError as error:
        return refuse_image(f"it cannot be read ({error.strerror})")
    except DataError as error:
        return refuse_image(error.what)
    label = plan.labels[place]
    return encoder(image, label if label.ndim else label.item(), plan.source.names[sample])


def _refuse_size(size: int) -> StoredImage:
    return refuse_image(f"its {size:,} bytes are more than the limit of {_LIMIT_BYTES:,}")
