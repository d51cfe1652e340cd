"""Published minutes to 75.9 % of ResNet-50 on ImageNet, at scales whose images/s are predicted: computed from these and
the epochs that official runs took at their batch."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from bench._plan.buckets import make_even_buckets
from bench._plan.scaling import basis_of, cluster_of, gradient_bytes, rows
from headway.plan.convergence import ConvergencePoint, EpochsLaw, fit_epochs, interpolate_epochs, load_official_points
from headway.plan.job import FORWARD_SHARE, TrainingJob
from headway.plan.losses import load_priors
from headway.plan.scaling import predict_scaling
from headway.plan.step import NCCL_ALGORITHMS

FILE = Path(__file__).with_name("times.csv")
SAMPLES, EVALUATED, EVERY = 1_281_167, 50_000, 4
"""Of ImageNet; images of an evaluation, and epochs from one to the next (MLPerf's rules)."""
WHOLE_RUN = "whole run incl. evaluation"
"""A series' clock, by whose images/s evaluations are paid for already."""


@final
@dataclass(frozen=True)
class Time:
    """Attributes: minutes: published; planned: predicted, with its band from low to high."""

    series: str
    gpus: int
    batch: int
    epochs: float
    minutes: float
    planned: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.planned / self.minutes - 1


def times() -> list[Time]:
    """Of the file. Earlier rules asked for other targets, so that runs under them are not in it."""
    epochs_of: EpochsLaw = interpolate_epochs(load_official_points())
    found, priors = [], load_priors("field")
    with FILE.open(encoding="utf-8", newline="") as file:
        for one in csv.DictReader(file):
            gpus = int(one["gpus"])
            row = next(row for row in rows() if row.series == one["series"] and row.gpus == gpus)
            basis = basis_of(row, priors)
            compute, epochs = basis.parameters.compute, epochs_of.predict_epochs(row.batch * gpus)
            job = TrainingJob(
                samples=SAMPLES,
                encoded_bytes=None,
                compute=compute,
                losses=basis.parameters.losses,
                algorithms=NCCL_ALGORITHMS,
                covariance=priors.band**2 * basis.calibration.covariance,
                gradients=tuple(make_even_buckets(gradient_bytes(row))),
                bucket_bytes=1,  # as they are
                epochs=epochs_of,
                per_device=float(row.batch),
                evaluations=0 if row.clock == WHOLE_RUN else round(epochs / EVERY),
                evaluation_s=EVALUATED * compute.sample_s * FORWARD_SHARE,
            )
            planned = predict_scaling(job, cluster_of(row), [row.nodes])[0]
            found.append(
                Time(row.series, gpus, row.batch * gpus, epochs, float(one["minutes"]), planned.hours * 60,
                     planned.low_hours * 60, planned.high_hours * 60)
            )  # fmt: skip
    return found


def leave_one_out(points: Sequence[ConvergencePoint]) -> list[tuple[ConvergencePoint, float]]:
    """Cross-validate the law: fit without each inner point and predict it.

    Returns:
        Pairs (point, predicted over measured epochs, less 1). The smallest and the largest batch are always fitted.
    """
    ordered = sorted(points, key=lambda one: one.batch)
    found = []
    for at in range(1, len(ordered) - 1):
        one = ordered[at]
        found.append((one, fit_epochs([*ordered[:at], *ordered[at + 1 :]]).predict_epochs(one.batch) / one.epochs - 1))
    return found
