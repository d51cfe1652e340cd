"""Scans foreign data: one full read that finds image sizes and a checksum of every record."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import DataError
from headway.data import native
from headway.data.columns import (
    COLUMN_TYPES,
    FLAG_NOT_JPEG,
    NUMPY_TYPES,
    DatasetDescription,
    Shard,
    compute_fingerprint,
    count_classes,
    find_common_size,
)
from headway.data.dataset import Dataset
from headway.data.formats.foreign_records import ForeignRecords
from headway.data.reference import GRAY_MODES, PILLOW_FORMATS

ScanProgress = Callable[[int, int], None]
"""Callback that gets (samples done, samples in all)."""

_CHUNK_SAMPLES = 64
"""Samples of one task of a thread, which bounds its memory: images that are separate files are read into memory."""
_JPEG_SIGNATURE = b"\xff\xd8\xff"


class _Header(NamedTuple):
    width: int
    height: int
    gray: bool


def scan_records(
    records: ForeignRecords, root: Path, source: str, progress: ScanProgress | None
) -> tuple[dict[str, NDArray[Any]], DatasetDescription]:
    """Reads all records, and returns the columns and the description of the data set.

    An image whose header cannot be read gets 1 x 1 pixels, and fails when it is decoded.

    Args:
        records: the places of the samples.
        root: names of shards are relative to it.
        source: the name that the user gave.
        progress: called with (samples done, samples in all).

    Raises:
        DataError: none of the records is an image, or a file cannot be read.
    """
    columns = _build_columns(records)
    description = DatasetDescription(
        pack_id=0,
        fingerprint="",
        format=records.format,
        mode="foreign",
        label_kind=records.labels.kind,
        classes=records.labels.classes,
        class_counts=count_classes(records.labels.kind, records.labels.values, len(records.labels.classes)),
        channels=records.pixels.channels if records.pixels else 0,
        common_size=None,
        shards=tuple(Shard(name=_make_relative(file, root), size=file.stat().st_size) for file in records.files),
        source=source,
    )
    # A Dataset of columns without checksums reads the records, as every later user does.
    all_gray = _measure_images(Dataset(root, columns, description), columns, records, progress)
    fingerprint = compute_fingerprint(columns)
    return columns, replace(
        description,
        fingerprint=fingerprint,
        # Foreign shards carry no pack number, so it follows from the fingerprint.
        pack_id=int(fingerprint[:16], 16),
        channels=description.channels or (1 if all_gray else 3),
        common_size=find_common_size(columns),
    )


def _measure_images(
    data: Dataset, columns: dict[str, NDArray[Any]], records: ForeignRecords, progress: ScanProgress | None
) -> bool:
    """Writes checksums, sizes and flags to `columns`; returns True if all images are gray."""
    num_samples = len(data)

    def measure_chunk(first: int) -> tuple[int, bool]:
        """Returns the number of images among the samples of a chunk, and True if all of them are gray."""
        ids = np.arange(first, min(first + _CHUNK_SAMPLES, num_samples))
        num_images = 0
        all_gray = True
        for sample, record in zip(ids.tolist(), data.read(ids), strict=True):
            columns["crc32c"][sample] = crc32c(record)
            if records.pixels:
                continue
            # The extension of a file may lie; its first bytes decide.
            columns["flags"][sample] |= FLAG_NOT_JPEG * (record[:3] != _JPEG_SIGNATURE)
            header = _read_header(record)
            columns["width"][sample], columns["height"][sample] = header[:2] if header else (1, 1)
            num_images += header is not None
            all_gray = all_gray and (header is None or header.gray)
        return num_images, all_gray

    chunk_results = []
    with ThreadPoolExecutor(count_usable_cores(), "headway-scan") as pool, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        # `map` returns results in order, so progress only grows.
        for first, chunk_result in zip(
            range(0, num_samples, _CHUNK_SAMPLES),
            pool.map(measure_chunk, range(0, num_samples, _CHUNK_SAMPLES)),
            strict=True,
        ):
            chunk_results.append(chunk_result)
            if progress:
                progress(min(first + _CHUNK_SAMPLES, num_samples), num_samples)
    if not records.pixels and not any(num_images for num_images, _ in chunk_results):
        where = str(records.files[0]) if records.files else str(data.folder)
        raise DataError(f"none of its {num_samples:,} records is an image", where=where)
    return all(all_gray for _, all_gray in chunk_results)


def _read_header(record: memoryview) -> _Header | None:
    if record[:3] == _JPEG_SIGNATURE and native.is_available():
        try:
            info = native.read_jpeg_header(record)
            return _Header(info.width, info.height, info.components == 1)
        except DataError:
            return None
    try:
        with Image.open(io.BytesIO(record), formats=PILLOW_FORMATS) as image:
            return _Header(image.width, image.height, image.mode in GRAY_MODES)
    except Exception:
        # Pillow's plugins raise anything from OSError to struct.error on damaged bytes.
        return None


def _build_columns(records: ForeignRecords) -> dict[str, NDArray[Any]]:
    num_samples = len(records.shard)
    columns: dict[str, NDArray[Any]] = {
        name: np.zeros(num_samples, NUMPY_TYPES[type_name]) for name, type_name in COLUMN_TYPES.items()
    }
    columns |= {
        "shard": records.shard,
        "offset": records.offset,
        "length": records.length,
        "flags": records.flags.copy(),
    }
    if records.pixels:
        columns |= {"width": records.pixels.width, "height": records.pixels.height}
    # Columns that the format already knows are not measured again.
    columns["label"] = records.labels.values
    if records.names is not None:
        columns["name"], columns["name_offset"] = _concatenate_names(records.names)
    # safetensors writes the memory of an array and ignores its strides.
    return {name: np.ascontiguousarray(column) for name, column in columns.items()}


def _concatenate_names(names: Sequence[str]) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
    encoded = [os.fsencode(name) for name in names]
    return np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([0, *map(len, encoded)], dtype=np.uint64)


def _make_relative(file: Path, root: Path) -> str:
    return str(file.relative_to(root)) if file.is_relative_to(root) else str(file)
