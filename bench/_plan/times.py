"""Published minutes to 75.9 % of ResNet-50 on ImageNet, at scales whose images/s are predicted: from those, and from
the epochs that official runs took by their batch."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bench._plan.scaling import predicted, rows
from headway.plan.convergence import Epochs, fit, official

FILE = Path(__file__).with_name("times.csv")
SAMPLES, EVALUATED, EVERY = 1_281_167, 50_000, 4
"""Of ImageNet; images of an evaluation, and epochs from one to the next (MLPerf's rules)."""
FORWARD = 1 / 3
"""Of a training step, that an evaluated image takes."""


@final
@dataclass(frozen=True)
class Time:
    """Attributes: minutes: published; planned: predicted."""

    series: str
    gpus: int
    batch: int
    epochs: float
    minutes: float
    planned: float

    @property
    def error(self) -> float:
        return self.planned / self.minutes - 1


def times() -> list[Time]:
    """Of the file. Earlier rules asked for other targets, so that runs under them are not in it."""
    epochs_of: Epochs = fit(official())
    found = []
    with FILE.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            gpus = int(one["gpus"])
            row = next(row for row in rows() if row.series == one["series"] and row.gpus == gpus)
            images_s, batch = predicted(row).value, row.batch * gpus
            epochs = epochs_of.epochs(batch)
            seconds = (SAMPLES * epochs + EVALUATED * FORWARD * epochs / EVERY) / images_s
            found.append(Time(row.series, gpus, batch, epochs, float(one["minutes"]), seconds / 60))
    return found
