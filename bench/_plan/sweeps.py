"""Published all-reduces by size: latency and seconds per byte from every second size, the others predicted."""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.collectives import LinearCost
from headway.core.line_fit import fit_line

FILE = Path(__file__).with_name("sweeps.csv")
LEAST = 4
"""Sizes of a sweep, for two to be fitted to and two to be predicted."""


@final
@dataclass(frozen=True)
class Sweep:
    """Attributes: points: (bytes, seconds), ascending."""

    system: str
    hardware: str
    gpus: int
    points: tuple[tuple[float, float], ...]

    @property
    def line(self) -> LinearCost:
        """Of every second size, from the smallest on."""
        return fit_line(self.points[::2])

    @property
    def errors(self) -> list[float]:
        """Of the others: predicted over measured, less 1."""
        line = self.line
        return [line.seconds(nbytes) / seconds - 1 for nbytes, seconds in self.points[1::2]]


def sweeps() -> list[Sweep]:
    """Those of the file with enough sizes."""
    found = defaultdict[tuple[str, str, int], list[tuple[float, float]]](list)
    with FILE.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            key = one["system"], one["hardware"], int(one["gpus"])
            found[key].append((float(one["bytes"]), float(one["seconds"])))
    return [Sweep(*key, tuple(sorted(points))) for key, points in found.items() if len(points) >= LEAST]
