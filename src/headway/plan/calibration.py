"""Calibration of a step's parameters by measured runs on one device, one node or several.

A run gives the length of a step, not its parts. Published runs tell how likely each part is (`losses`); the most
probable parameters explain the measured runs within their error. One run moves the compute time alone. Runs on other
numbers of devices, or with other batches, move what they tell about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from headway.core.errors import UsageError
from headway.plan.losses import LossPriors, StepLosses
from headway.plan.step import ComputeTime

# Relative error of a measured run, from one day to the next.
RUN_ERROR = 0.03
# Parameters in the order of a vector. All are moved by their logarithm, `hidden` by its logit.
PARAMETERS = ("sample time", "fixed time", "contention", "jitter", "inside", "between", "hidden")
# Nothing is known of the time of a sample before a run is measured.
SAMPLE_SPREAD = 50.0
# Step of the numerical derivatives, largest step of an iteration, and iterations. Five are enough for runs that agree.
DERIVATIVE_STEP, LARGEST_STEP, MAX_ROUNDS = 0.02, 1.0, 30

Vector = npt.NDArray[np.floating[Any]]


@final
@dataclass(frozen=True)
class MeasuredRun:
    """Measured throughput of a data-parallel run.

    Attributes:
        ranks: number of devices.
        samples_per_rank: samples of one device per step.
        images_s: throughput of all devices together.
    """

    ranks: int
    samples_per_rank: float
    images_s: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.ranks * self.samples_per_rank / self.images_s


@final
@dataclass(frozen=True)
class StepParameters:
    """Parameters of a step's length, beside batch and network."""

    compute: ComputeTime
    losses: StepLosses

    def move(self, by: Sequence[float] | Vector) -> StepParameters:
        """Returns the parameters moved by a vector in the order of `PARAMETERS`. A value of 0, or all hidden, stays."""
        factors = np.exp(np.clip(by, -20.0, 20.0))
        losses, odds = self.losses, factors[6]
        compute = ComputeTime(
            fixed_s=float(self.compute.fixed_s * factors[1]),
            sample_s=float(self.compute.sample_s * factors[0]),
            # The optimizer's products take as long as the device is slow.
            update_s=float(self.compute.update_s * factors[0]),
        )
        return StepParameters(
            compute,
            StepLosses(
                contention=float(losses.contention * factors[2]),
                jitter=float(losses.jitter * factors[3]),
                inside=float(losses.inside * factors[4]),
                between=float(losses.between * factors[5]),
                hidden=float(losses.hidden * odds / (losses.hidden * odds + (1 - losses.hidden))),
            ),
        )


@final
@dataclass(frozen=True)
class Calibration:
    """Parameters that measured runs make most probable.

    Attributes:
        moved: by how much each parameter left its median, as in `StepParameters.move`.
        covariance: of the errors of `moved`; float64 [7, 7].
    """

    parameters: StepParameters
    moved: Vector
    covariance: Vector


def calibrate(
    runs: Sequence[MeasuredRun],
    predict_seconds: Callable[[StepParameters, MeasuredRun], float],
    priors: LossPriors,
    fixed_s: float,
) -> Calibration:
    """Finds the most probable parameters, by Gauss-Newton on ln(seconds of a step).

    Args:
        predict_seconds: predicts the seconds of a run's step.
        fixed_s: likely fixed time of a step, before `priors.fixed` scales it.

    Raises UsageError if there is no run, or a number of one is not positive.
    """
    if not runs:
        raise UsageError("a calibration needs at least one measured run")
    if any(not (run.ranks >= 1 and run.samples_per_rank > 0 and run.images_s > 0) for run in runs):
        raise UsageError("devices, samples and images/s of a measured run must be above 0")
    center = _choose_center(runs, priors, fixed_s)
    spreads = np.array([SAMPLE_SPREAD, *priors.spreads])
    # A spread of 0 fixes a parameter.
    precision = np.diag(1 / np.maximum(spreads, 1e-6) ** 2)
    measured = np.log([run.seconds for run in runs])
    moved = np.zeros(len(PARAMETERS))
    for _ in range(MAX_ROUNDS):
        predicted, slopes = _differentiate(runs, predict_seconds, center, moved)
        curvature = slopes.T @ slopes / RUN_ERROR**2 + precision
        gradient = slopes.T @ (measured - predicted) / RUN_ERROR**2 - precision @ moved
        step = np.clip(np.linalg.solve(curvature, gradient), -LARGEST_STEP, LARGEST_STEP)
        moved = moved + step
        if np.abs(step).max() < 1e-4:
            break
    return Calibration(center.move(moved), moved, np.linalg.inv(curvature))


def _choose_center(runs: Sequence[MeasuredRun], priors: LossPriors, fixed_s: float) -> StepParameters:
    """Chooses the medians, and the time of a sample that the run on the fewest devices has without any loss."""
    first = min(runs, key=lambda run: (run.ranks, run.samples_per_rank))
    fixed = min(priors.fixed * fixed_s, 0.5 * first.seconds)
    return StepParameters(ComputeTime(fixed, (first.seconds - fixed) / first.samples_per_rank), priors.losses)


def _differentiate(
    runs: Sequence[MeasuredRun],
    predict_seconds: Callable[[StepParameters, MeasuredRun], float],
    center: StepParameters,
    moved: Vector,
) -> tuple[Vector, Vector]:
    """Returns ln(seconds) of each run, and its derivatives by each parameter."""

    def predict(by: Vector) -> Vector:
        parameters = center.move(by)
        return np.array([math.log(predict_seconds(parameters, run)) for run in runs])

    here = predict(moved)
    slopes = [(predict(moved + DERIVATIVE_STEP * unit) - here) / DERIVATIVE_STEP for unit in np.eye(len(PARAMETERS))]
    return here, np.array(slopes).T


def compute_root(covariance: Vector) -> Vector:
    """Computes R with R R' = covariance, by its eigenvectors: some variances may be 0."""
    values, vectors = np.linalg.eigh(covariance)
    root: Vector = vectors * np.sqrt(np.maximum(values, 0.0))
    return root
