"""Readings of the load of a device or a host, as a run has sampled them, and their lines over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core import row_file
from headway.observe.utilisation import LoadStatistics, resample, summarise_load
from headway.report.thinning import round_value, split_into_points

Numbers = NDArray[np.float64]
# (label, times, values)
LoadLine = tuple[str, list[float], list[float | None]]


@final
@dataclass(frozen=True)
class LoadReadings:
    """Readings of one device, by column."""

    columns: Mapping[str, Numbers]

    def __getitem__(self, name: str) -> Numbers:
        return self.columns[name]

    def compute_mean(self, name: str) -> float:
        """Computes the mean of the known readings; NaN if there are none."""
        # NVML does not know every value on every device: unknown readings are NaN.
        known = self[name][np.isfinite(self[name])]
        return float(known.mean()) if len(known) else float("nan")

    def summarise(self, name: str) -> LoadStatistics | None:
        # Samples come at uneven times, and statistics of swings and periods need even ones.
        spacing_s, values = resample(self["seconds"], self[name])
        return summarise_load(values, spacing_s)


def read_load(path: Path) -> LoadReadings | None:
    """Reads the load of one device or host; None if there are no rows."""
    table = row_file.read_rows(path)
    if table is None or not len(table.steps):
        return None
    values = table.values[:, 0].astype(np.float64)
    return LoadReadings({name: values[:, place] for place, name in enumerate(table.columns)})


def choose_time_unit(readings: LoadReadings) -> tuple[str, float]:
    """Chooses (name, seconds) of the time unit that suits the length of a run."""
    longest = float(readings["seconds"].max())
    return ("seconds", 1.0) if longest < 300 else ("minutes", 60.0) if longest < 4 * 3600 else ("hours", 3600.0)


def average_blocks(
    readings: LoadReadings, name: str, factor: float, scale: float
) -> tuple[list[float], list[float | None], list[float | None], list[float | None]]:
    """Merges neighbours of a column to (times, means, lowest, highest), without unknown readings."""
    known = np.isfinite(readings[name])
    at, values = readings["seconds"][known] / scale, factor * readings[name][known]
    parts = [part for part in split_into_points(len(at)) if len(part)]
    times = [float(f"{at[part].mean():.6g}") for part in parts]
    means, least, most = ([round_value(of(values[part])) for part in parts] for of in (np.mean, np.min, np.max))
    return times, [*means], [*least], [*most]
