"""Reading alone: records of each format in random order on one thread. Every cache line of them is touched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Literal

import numpy as np

import headway
from bench._common import median
from headway.core.errors import HeadwayError

BATCH = 128


def sets(images: Path, folder: Path) -> Iterator[tuple[str, headway.Dataset]]:
    """The same files in each format; what cannot be had here is said and left out."""
    forms: tuple[Literal["recordio", "tar", "lmdb"], ...] = ("recordio", "tar", "lmdb")
    places = {form: folder / form for form in forms}
    for form, place in places.items():
        try:
            headway.pack(images, place, mode="keep", format=form)
        except HeadwayError as error:
            print(f"{form}: not here ({error})")
    ways: dict[str, tuple[Path, bool | None]] = {
        f"{form}, mapped": (place, True) for form, place in places.items() if place.exists()
    }
    ways |= {"recordio, read()": (places["recordio"], False), "loose files, read()": (images, None)}
    for name, (place, mapped) in ways.items():
        try:
            yield name, headway.open(place, mapped=mapped)
        except HeadwayError as error:
            print(f"reading {name}: not here ({error})")


def read(data: headway.Dataset, order: headway.Order, seconds: float) -> tuple[float, float]:
    """(images/s, MB/s)."""
    images = total = position = touched = 0
    started = perf_counter()
    while (taken := perf_counter() - started) < seconds:
        _, ids = order(np.arange(position, position + BATCH))
        position += BATCH
        for record in data.read(ids):
            line = np.frombuffer(record, np.uint8)[::64]
            touched += int(line.sum())
            total += len(record)
        images += len(ids)
    assert touched
    return images / taken, total / taken / 1e6


def rows(images: Path, folder: Path, rounds: int, seconds: float) -> list[tuple[str, ...]]:
    """The table: formats take turns."""
    found = {name: (data, list[tuple[float, float]]()) for name, data in sets(images, folder)}
    for _ in range(rounds):
        for data, speeds in found.values():
            speeds.append(read(data, headway.Order(len(data), seed=1), seconds))
    table: list[tuple[str, ...]] = [("reading alone, one thread", "images/s (95 %)", "MB/s")]
    for name, (data, speeds) in found.items():
        middle, low, high = median([images_s for images_s, _ in speeds])
        table.append((name, f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]", f"{median([mb for _, mb in speeds])[0]:,.0f}"))
        data.close()
    return table
