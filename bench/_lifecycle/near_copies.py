"""Near copies: the time of comparing 20,000 images, planted copies that are found, and what they cost an addition.

Planted copies of each photograph: half its size, JPEG of quality 50, 10 % brighter, 10 % darker, and all at once. A
copy is found if it is a near copy of the photograph itself, whatever its siblings are. False are pairs of different
photographs. The threshold was chosen on every second photograph; the claims are of the others.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance

import headway
from bench._common import Claim, median, table
from bench._data import images
from bench._lifecycle.labels import find_groups
from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.copies.hash_search import MAX_BITS, HashSearch, count_bits
from headway.lifecycle.copies.image_hashes import THUMBNAIL_SIZE, ImageHashes, compute_dhash, find_flat
from headway.lifecycle.copies.near_copies import MIN_CORRELATION, correlate_pairs, find_near_copies
from headway.lifecycle.store.store import Store

COUNT, ROUNDS = 20_000, 7


def shrink(image: Image.Image) -> Image.Image:
    return image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BICUBIC)


def brighten(factor: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: ImageEnhance.Brightness(image).enhance(factor)


COPIES: dict[str, tuple[Callable[[Image.Image], Image.Image], int]] = {
    "half the size": (shrink, 92),
    "quality 50": (lambda image: image, 50),
    "10 % brighter": (brighten(1.1), 92),
    "10 % darker": (brighten(0.9), 92),
    "all at once": (lambda image: brighten(1.1)(shrink(image)), 50),
}
"""Change and JPEG quality of each planted copy."""


def measure_near_copies(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Compares 20,000 hashes, hashes some 1,500 photographs, and adds them to stores."""
    rounds = 1 if options.quick else ROUNDS
    claims = [time_comparison(rounds)]
    measure_digits(folder / "digits")
    source = images(folder / "photographs", most=20 if options.quick else None)
    if source is None:
        return claims
    return [*claims, *find_planted(source, folder), time_additions(folder, 1 if options.quick else 3)]


def time_comparison(rounds: int) -> Claim:
    """Times all pairs of 20,000 images that are decoded and hashed already."""
    generator = np.random.default_rng(0)
    # Smooth pictures: neighbouring pixels of a photograph are alike, and so are their hashes' bits.
    coarse = generator.integers(0, 256, size=(COUNT, 4, 3)).astype(np.float32)
    fine = np.repeat(np.repeat(coarse, 4, axis=1), 6, axis=2) + generator.normal(0, 12, size=(COUNT, *THUMBNAIL_SIZE))
    thumbnails = np.clip(fine, 0, 255).astype(np.uint8)
    hashes = ImageHashes(
        digests=generator.integers(0, 256, size=(COUNT, 32), dtype=np.uint8),
        dhash=compute_dhash(thumbnails),
        thumbnails=thumbnails,
        is_good=np.ones(COUNT, np.bool_),
        is_flat=find_flat(thumbnails),
        resolution=np.ones(COUNT, np.int64),
        size_bytes=np.ones(COUNT, np.int64),
    )
    seconds = []
    for _ in range(rounds):
        started = time.process_time()
        find_near_copies(hashes)
        seconds.append(time.process_time() - started)
    value, low, high = median(seconds)
    how = (
        f"{COUNT:,} images of which nearly all are kept, median of {rounds}: {low:.2f} to {high:.2f}; without decoding"
    )
    return Claim("near_copies_cpu_s", value, "s", how)


def find_planted(source: Path, folder: Path) -> list[Claim]:
    """Packs photographs with copies, and compares each copy with its photograph, and different photographs."""
    files = sorted(source.rglob("*.JPEG"))
    pool = folder / "pool" / "unknown"
    pool.mkdir(parents=True)
    kinds = {re.sub("[^a-z0-9]+", "_", kind): kind for kind in COPIES}
    for number, file in enumerate(files):
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        (pool / f"{number:04d}-original.jpg").write_bytes(file.read_bytes())
        for name, kind in kinds.items():
            change, quality = COPIES[kind]
            change(image).save(pool / f"{number:04d}-{name}.jpg", quality=quality)
    headway.pack(folder / "pool", folder / "packed", mode="keep")
    started = time.process_time()
    with closing(headway.open(folder / "packed")) as dataset:
        hashes = hash_images(dataset)
        names = [Path(dataset.name(place)).stem.partition("-")[::2] for place in range(len(dataset))]
    print(f"Decoding and hashing: {1e3 * (time.process_time() - started) / len(names):.2f} ms of CPU an image\n")
    photograph = np.array([int(number) for number, _ in names])
    place_of = {name: place for place, name in enumerate(names)}
    original = np.array([place_of[number, "original"] for number, _ in names])
    # Every pair of different photographs whose hashes differ in few bits, their copies included.
    search = HashSearch()
    search.add(hashes.dhash)
    first, second = (np.concatenate(side) for side in zip(*search.find(hashes.dhash), strict=True))
    strangers = (first < second) & (photograph[first] != photograph[second])
    first, second = first[strangers], second[strangers]
    copies = np.flatnonzero(original != np.arange(len(names)))
    is_few = count_bits(hashes.dhash[copies] ^ hashes.dhash[original[copies]]) <= MAX_BITS
    correlation = np.where(is_few, correlate_pairs(hashes, copies, original[copies]), -1)
    stranger = correlate_pairs(hashes, first, second)
    halves = [photograph % 2 == 0, photograph % 2 == 1]
    rows = [("least correlation", "found, half of the threshold", "false", "found, other half", "false")]
    for least in (0.97, 0.975, 0.98, 0.985, 0.99):
        cells = []
        for half in halves:
            false = int((stranger[half[first] & half[second]] >= least).sum())
            cells += [f"{(correlation[half[copies]] >= least).mean():.2%}", f"{false}"]
        rows.append((f"{least}", *cells))
    table(rows)
    is_found = correlation >= MIN_CORRELATION
    rows = [("planted copy", "found", "share")]
    other = halves[1][copies]
    for name, kind in kinds.items():
        mine = other & np.array([names[place][1] == name for place in copies])
        count, total = int(is_found[mine].sum()), int(mine.sum())
        rows.append((kind, f"{count} of {total}", f"{count / total:.2%}"))
    table(rows)
    total, found = int(other.sum()), int(is_found[other].sum())
    false = int((stranger[halves[1][first] & halves[1][second]] >= MIN_CORRELATION).sum())
    how = f"{total:,} copies of {int(halves[1].sum()) // (1 + len(COPIES))} photographs"
    share = false / max(found + false, 1)
    return [
        Claim("near_copies_found", found / total, "", f"by the pair with the photograph itself; {how}"),
        Claim("near_copies_false", share, "", f"{false} of {found + false:,} pairs; {how}"),
    ]


def measure_digits(folder: Path) -> None:
    """Prints how many handwritten digits are out, of which nobody has planted a copy."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    group, kept = find_groups(digits.images.astype(np.int64), labels, folder)
    wrong = float((labels[~kept] != labels[group[~kept]]).mean())
    print(f"Plain digits: {(~kept).mean():.1%} are out, {wrong:.1%} of them for a digit of another class\n")


def time_additions(folder: Path, rounds: int) -> Claim:
    """Adds the photographs and their copies to stores, with a search for near copies and without."""
    times: dict[bool, list[float]] = {False: [], True: []}
    found = 0
    for number in range(rounds):
        for ignore in (False, True) if number % 2 else (True, False):
            store = Store.make(folder / f"store-{number}-{ignore}")
            store.create("photographs")
            started = time.process_time()
            outcome = store.add("photographs", folder / "pool", ignore_near_copies=ignore)
            times[ignore].append(time.process_time() - started)
            found = max(found, len(outcome.near_copies))
            added = outcome.version.counts["added"]
    with_search, without = (1e3 * median(times[ignore])[0] / added for ignore in (False, True))
    print(
        f"An addition: {with_search:.2f} ms of CPU an image, without a search {without:.2f} ms; {found:,} near copies\n"
    )
    how = f"{added:,} photographs and copies, median of {rounds}; the addition alone takes {without:.2f}"
    return Claim("near_copies_addition_ms", with_search - without, "ms", f"CPU an image; {how}")
