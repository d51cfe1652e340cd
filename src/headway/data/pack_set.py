"""Packs one set: reads and decodes its files on threads, writes shards in order, and the columns last."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from safetensors.numpy import save

from headway.core.errors import DataError
from headway.core.files import sync_folder, write_synced
from headway.data.dataset import COLUMN_TYPES, COLUMNS_FILE, FLAG_NOT_JPEG, FLAG_SPLIT, NUMPY_TYPES, Description, Shard
from headway.data.decode import FORMATS, GRAY_MODES, to_pixels
from headway.data.formats.recordio import RECORD_LIMIT_BYTES, Placed, Writer
from headway.data.formats.source import Source

MODE = "keep"

_CHUNK_FILES, _CHUNK_BYTES = 64, 4 << 20
"""One task of a thread: enough small files that a task's 30 us do not count, few enough bytes that all tasks ahead of
the writer fit into memory."""
_FILE_LIMIT_BYTES = RECORD_LIMIT_BYTES - (1 << 24)
"""Leaves 16 MiB of a record for its labels."""
_RECORD_OVERHEAD_BYTES = 64


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SetPlan:
    """One data set to be: `ids` are the samples of `source` in it, in the order in which they are stored."""

    name: str
    source: Source
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Size of each file in bytes as it is now, in the order of `ids`; 0 where it cannot be read."""
    shown: str = ""
    """Put before a sample's name in lists of bad files."""

    @property
    def names(self) -> list[str]:
        return [self.source.names[sample] for sample in self.ids]

    @property
    def labels(self) -> NDArray[Any]:
        return self.source.labels[self.ids]

    @functools.cached_property
    def pack_id(self) -> int:
        """64 bits of a hash of what is packed, known before any image is read."""
        digest = hashlib.sha256(json.dumps([MODE, self.source.classes, self.names]).encode())
        digest.update(self.labels.tobytes())
        digest.update(self.sizes.tobytes())
        return int.from_bytes(digest.digest()[:8])


@final
@dataclass(frozen=True, kw_only=True)
class SetResult:
    """What became of one set; `bad` holds (name, reason)."""

    samples: int
    size_bytes: int
    bad: list[tuple[str, str]]


def pack_set(
    plan: SetPlan,
    folder: Path,
    *,
    source: str,
    threads: int,
    shard_bytes: int,
    skip_bad: bool,
    report: Callable[[int], None],
) -> SetResult:
    """Packs into `folder`; `report` is called with the number of files done.

    Without `skip_bad`, nothing is written after the first bad file: the rest is checked, so that all are known.

    Raises:
        DataError: no good image is left, of the set or of a class.
        OSError: as the file system does.
    """
    folder.mkdir(exist_ok=True)
    columns = {name: np.zeros(len(plan.ids), NUMPY_TYPES[kind]) for name, kind in COLUMN_TYPES.items()}
    labels = plan.labels.tolist() if plan.labels.ndim == 1 else plan.labels
    shards = _Shards(folder, plan.pack_id, shard_bytes)
    kept: list[int] = []
    bad: list[tuple[str, str]] = []
    gray = True
    try:
        for first, files in _checked(plan, threads):
            for place, file in enumerate(files, start=first):
                if file.reason:
                    bad.append((plan.shown + plan.source.names[plan.ids[place]], file.reason))
                elif skip_bad or not bad:
                    row = len(kept)
                    number, placed = shards.append(file.data, labels[place], row)
                    flags = FLAG_SPLIT * placed.split | FLAG_NOT_JPEG * (not file.data.startswith(b"\xff\xd8\xff"))
                    # in the order of COLUMN_TYPES
                    values = (number, placed.offset, placed.length, file.crc, file.width, file.height, flags)
                    for column, value in zip(columns.values(), values, strict=True):
                        column[row] = value
                    gray = gray and file.gray
                    kept.append(place)
            report(first + len(files))
        finished = shards.close()
    finally:
        shards.abandon()
    if skip_bad or not bad:
        columns = {name: column[: len(kept)] for name, column in columns.items()}
        _write_columns(folder, plan, np.array(kept, np.int64), columns, finished, 1 if gray else 3, source)
    return SetResult(samples=len(kept), size_bytes=sum(shard.size for shard in finished), bad=bad)


def fingerprint_of(columns: Mapping[str, NDArray[Any]]) -> str:
    """sha256 over all columns, in order of name, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(columns):
        column = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {column.dtype.str} {column.shape} ".encode())
        digest.update(column.data)
    return digest.hexdigest()


@contextlib.contextmanager
def strict_pillow() -> Iterator[None]:
    """Pillow refuses truncated files, whatever the program around has set, and its warnings are not the user's."""
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="PIL")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _write_columns(
    folder: Path,
    plan: SetPlan,
    kept: NDArray[np.int64],
    columns: dict[str, NDArray[Any]],
    shards: tuple[Shard, ...],
    channels: int,
    source: str,
) -> None:
    if len(kept) == 0:
        raise DataError("no good image is left", where=source, fix="Put good images into it.")
    labels = plan.labels[kept]
    names = [plan.source.names[plan.ids[place]].encode() for place in kept]
    columns["label"] = labels
    columns["name"] = np.frombuffer(b"".join(names), np.uint8)
    columns["name_offset"] = np.cumsum([0, *map(len, names)], dtype=np.uint64)
    width, height = columns["width"], columns["height"]
    alike = bool((width == width[0]).all() and (height == height[0]).all())
    description = Description(
        pack_id=plan.pack_id,
        fingerprint=fingerprint_of(columns),
        format="recordio",
        mode=MODE,
        label_kind=plan.source.label_kind,
        classes=plan.source.classes,
        class_counts=_class_counts(plan, labels, source),
        channels=channels,
        common_size=(int(width[0]), int(height[0])) if alike else None,
        shards=shards,
        source=source,
    )
    sync_folder(folder)
    write_synced(folder / COLUMNS_FILE, save(columns, metadata=description.to_metadata()))
    sync_folder(folder)


def _class_counts(plan: SetPlan, labels: NDArray[Any], source: str) -> tuple[int, ...]:
    """Samples of each class. Every class needs one, except in an evaluation set that was split off."""
    if plan.source.label_kind == "value":
        return ()
    if plan.source.label_kind == "multi":
        return tuple(np.count_nonzero(labels, axis=0).tolist())
    counts = np.bincount(labels, minlength=len(plan.source.classes))
    if plan.name != "eval" and (counts == 0).any():
        lost = plan.source.classes[int(counts.argmin())]
        raise DataError(f"no good image is left of class {lost!r}", where=source, fix="Put good images into it.")
    return tuple(counts.tolist())


@final
class _Shards:
    """The shards of one set, written one after the other."""

    def __init__(self, folder: Path, pack_id: int, shard_bytes: int) -> None:
        self._folder, self._pack_id, self._shard_bytes = folder, pack_id, shard_bytes
        self._finished: list[Shard] = []
        self._writer: Writer | None = None

    def append(self, image: bytes, label: Any, index: int) -> tuple[int, Placed]:
        """The number of the shard that the image went to, and where it lies there."""
        if self._writer and self._writer.size_bytes + len(image) + _RECORD_OVERHEAD_BYTES > self._shard_bytes:
            self._finish(self._writer)
        if self._writer is None:
            path = self._folder / self._name
            self._writer = Writer(path, path.with_suffix(".idx"), self._pack_id)
        return len(self._finished), self._writer.append(image, label, index)

    def close(self) -> tuple[Shard, ...]:
        if self._writer:
            self._finish(self._writer)
        return tuple(self._finished)

    def abandon(self) -> None:
        if self._writer:
            self._writer.abandon()

    @property
    def _name(self) -> str:
        return f"shard-{len(self._finished):05d}.rec"

    def _finish(self, writer: Writer) -> None:
        writer.close()
        self._finished.append(Shard(name=self._name, size=writer.size_bytes))
        self._writer = None


class _Checked(NamedTuple):
    """One file, read and decoded; `reason` says why it cannot be used."""

    data: bytes
    width: int
    height: int
    gray: bool
    crc: int
    reason: str


def _checked(plan: SetPlan, threads: int) -> Iterator[tuple[int, list[_Checked]]]:
    """Stretches of checked files in order, each with the place of its first; a few are ready ahead of the one taken."""
    waiting: deque[tuple[int, Future[list[_Checked]]]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        for first, paths in _chunks(plan):
            waiting.append((first, pool.submit(_check_files, paths)))
            if len(waiting) > 2 * threads:
                place, files = waiting.popleft()
                yield place, files.result()
        for place, files in waiting:
            yield place, files.result()


def _chunks(plan: SetPlan) -> Iterator[tuple[int, list[str]]]:
    paths: list[str] = []
    size_bytes = 0
    for place, (sample, size) in enumerate(zip(plan.ids.tolist(), plan.sizes.tolist(), strict=True)):
        if paths and (len(paths) == _CHUNK_FILES or size_bytes + size > _CHUNK_BYTES):
            yield place - len(paths), paths
            paths, size_bytes = [], 0
        paths.append(plan.source.paths[sample])
        size_bytes += size
    yield len(plan.ids) - len(paths), paths


def _check_files(paths: Sequence[str]) -> list[_Checked]:
    return [_check_file(path) for path in paths]


def _check_file(path: str) -> _Checked:
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size > _FILE_LIMIT_BYTES:
                return _bad(f"its {size:,} bytes are more than the limit of {_FILE_LIMIT_BYTES:,}")
            data = file.readall()
    except OSError as error:
        return _bad(f"it cannot be read ({error.strerror})")
    if not data:
        return _bad("it is empty")
    try:
        width, height, gray = _decode(data)
    except UnidentifiedImageError:
        return _bad("it is no image of a known format")
    except Exception as error:  # Pillow's plugins raise anything from OSError to struct.error on damaged bytes
        return _bad(" ".join(str(error).split()) or type(error).__name__)
    return _Checked(data, width, height, gray, crc32c(data), "")


def _bad(reason: str) -> _Checked:
    return _Checked(b"", 0, 0, False, 0, reason)


def _decode(data: bytes) -> tuple[int, int, bool]:
    """Width, height, and whether it is gray, of an image that the reference decodes; raises what Pillow raises."""
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        limit = Image.MAX_IMAGE_PIXELS
        if limit and image.width * image.height > limit:
            raise ValueError(f"its {image.width} x {image.height} pixels are more than the limit of {limit:,}")
        image.load()
        if image.mode not in ("L", "RGB"):
            to_pixels(data, 3)
        return image.width, image.height, image.mode in GRAY_MODES
