"""Hashes every image of a data set: decodes it as a thumbnail, and reads its stored bytes.

Thumbnails are decoded by Pillow on every machine, so that it finds the same near copies with the native core and
without it. A store keeps the hashes of its images: they are decoded once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Lock

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray
from PIL import Image

from headway.core.cpu_count import count_usable_cores
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.pack_set import use_strict_pillow
from headway.data.reference import DecodeStatus, decode_one, read_image
from headway.data.version_columns import SAMPLE_ID, has_sample_ids
from headway.lifecycle.copies.hash_cache import KeptHashes, read_kept_hashes, write_kept_hashes
from headway.lifecycle.copies.image_hashes import THUMBNAIL_SIZE, ImageHashes, compute_dhash, find_flat

_CHUNK = 64
LARGE_PIXELS = 16_000_000
"""Pixels from which images are decoded one after the other: a PNG of 100 million takes 300 MB."""
_large = Lock()

Progress = Callable[[int, int], None]
"""Called with (images done, images in all)."""


def _ignore(done: int, total: int) -> None:
    """Shows no progress."""


def hash_images(
    dataset: Dataset, *, threads: int | None = None, kept_only: bool = False, progress: Progress = _ignore
) -> ImageHashes:
    """Decodes every image of a data set as a thumbnail, and hashes it.

    Hashes of a version in a store are read from the store, and those that are missing are kept there.

    Args:
        threads: decoding threads; None: one for each core.
        kept_only: take only what the store has, and decode nothing; the other images are not `is_good`.
        progress: called with (images decoded, images to decode).
    """
    kept = read_kept_hashes(dataset) if has_sample_ids(dataset.columns) else KeptHashes.build_empty(len(dataset))
    missing = np.flatnonzero(~kept.is_there)
    if len(missing) and not kept_only:
        _decode(dataset, missing, kept, threads or count_usable_cores(), progress)
        if has_sample_ids(dataset.columns):
            write_kept_hashes(dataset, kept, missing)
    return ImageHashes(
        digests=_digest(dataset),
        dhash=kept.dhash,
        thumbnails=kept.thumbnails,
        is_good=kept.is_good,
        is_flat=kept.is_flat,
        resolution=dataset.width.astype(np.int64) * dataset.height.astype(np.int64),
        size_bytes=dataset.length.astype(np.int64),
    )


def _digest(dataset: Dataset) -> NDArray[np.uint8]:
    """Returns the SHA-256 of the stored bytes of every image, uint8 [n, 32]."""
    if has_sample_ids(dataset.columns):
        return np.asarray(dataset.columns[SAMPLE_ID])
    digests = np.zeros((len(dataset), 32), np.uint8)

    def digest(chunk: NDArray[np.int64]) -> None:
        for sample, record in zip(chunk.tolist(), dataset.read(chunk), strict=True):
            digests[sample] = np.frombuffer(hashlib.sha256(record).digest(), np.uint8)

    _run(digest, np.arange(len(dataset)), count_usable_cores(), _ignore)
    return digests


def hash_sets(sets: Sequence[Dataset], progress: Progress = _ignore) -> list[ImageHashes]:
    """Hashes the images of several data sets.

    Args:
        progress: called with (images hashed, images of all sets).
    """
    total, parts = sum(map(len, sets)), list[ImageHashes]()
    for dataset in sets:
        before = sum(map(len, parts))

        def report(done: int, of: int, before: int = before) -> None:
            progress(before + done, total)

        parts.append(hash_images(dataset, progress=report))
    return parts


def _decode(dataset: Dataset, samples: NDArray[np.int64], kept: KeptHashes, threads: int, progress: Progress) -> None:
    """Decodes and hashes some images into `kept`."""

    def decode(chunk: NDArray[np.int64]) -> None:
        for sample, record in zip(chunk.tolist(), dataset.read(chunk), strict=True):
            is_whole = len(record) == dataset.length[sample] and crc32c(record) == dataset.crc32c[sample]
            kept.is_good[sample] = is_whole and _decode_thumbnail(dataset, sample, record, kept.thumbnails[sample])

    with use_strict_pillow():
        _run(decode, samples, threads, progress)
    kept.dhash[samples] = compute_dhash(kept.thumbnails[samples])
    kept.is_flat[samples] = find_flat(kept.thumbnails[samples])


def _decode_thumbnail(dataset: Dataset, sample: int, record: memoryview, out: NDArray[np.uint8]) -> bool:
    """Decodes the whole image, whatever its shape, as a gray thumbnail. Returns False if it is damaged."""
    if int(dataset.flags[sample]) & FLAG_RAW:
        try:
            image = read_image(dataset, sample).convert("L")
        # Pixels that do not fit the size in the columns.
        except ValueError:
            return False
        out[:] = np.asarray(image.resize(THUMBNAIL_SIZE[::-1], Image.Resampling.BILINEAR))
        return True
    box = np.array([0, 0, dataset.width[sample], dataset.height[sample]], np.float32)
    with _large if box[2] * box[3] >= LARGE_PIXELS else nullcontext():
        # A JPEG is decoded at an eighth of its size where that is enough.
        return decode_one(record, out[:, :, None], box, scaled=True) is DecodeStatus.OK


def _run(
    work: Callable[[NDArray[np.int64]], None], samples: NDArray[np.int64], threads: int, progress: Progress
) -> None:
    """Runs chunks of samples in threads; numpy, Pillow and hashlib release the interpreter lock."""
    chunks = np.array_split(samples, -(-len(samples) // _CHUNK)) if len(samples) else []
    done = 0
    if threads == 1 or len(chunks) <= 1:
        for chunk in chunks:
            work(chunk)
            done += len(chunk)
            progress(done, len(samples))
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="hash") as pool:
        for chunk, _ in zip(chunks, pool.map(work, chunks), strict=True):
            done += len(chunk)
            progress(done, len(samples))
