"""Error of a trained network by the size of its training set: a power law, with a floor where the data show one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.statistics import compute_student_t

Float64 = NDArray[np.float64]
Points = tuple[tuple[float, float], ...]

# Largest number of samples that an answer names.
MOST_SAMPLES = 1e18
# Shares of the smallest error at which a floor is tried, and rounds in which the best of them is refined.
FLOORS, ROUNDS = 81, 4
# Squared residuals per point, in logarithms, below which the pure law counts as exact.
EXACT = 1e-16


@final
@dataclass(frozen=True)
class ErrorCurve:
    """Fitted law error = floor + scale * samples ** exponent.

    Source: Hestness et al. 2017 (arXiv 1712.00409), section 2, whose last term is the irreducible error.
    """

    floor: float
    """0: the points do not show one."""
    floor_low: float
    """The 95 % interval of the floor; 0 to 0 without one."""
    floor_high: float
    scale: float
    exponent: float
    spread: float
    """Standard deviation of ln error around the law."""
    points: Points
    """Pairs (samples, error), ascending."""

    @property
    def low(self) -> float:
        """Samples of the smallest fitted set."""
        return self.points[0][0]

    @property
    def high(self) -> float:
        """Samples of the largest fitted set."""
        return self.points[-1][0]

    @property
    def freedom(self) -> int:
        """Points beyond the fitted parameters; with none, no interval is known."""
        return len(self.points) - (3 if self.floor else 2)

    def __call__(self, samples: float) -> float:
        """Returns the error with so many samples."""
        return self.floor + self.scale * float(samples**self.exponent)

    def predict_band(self, samples: float) -> tuple[float, float]:
        """Predicts the 95 % interval of a new run with so many samples, if the law continues.

        Without points to spare it is (0, infinity).
        """
        low, high = self._predict_bands(np.array([samples], np.float64))
        return float(low[0]), float(high[0])

    def predict_samples(self, error: float) -> tuple[float, float, float]:
        """Returns the samples that an error needs, and the 95 % interval: the sets whose band holds that error.

        Without points to spare the interval is (0, infinity).

        Raises UsageError if the error does not fall with samples, or if it is not above the floor or needs more than
        1e18 samples.
        """
        self.expect_fall()
        if error <= self.floor:
            about = f"{self.floor:.3g} (95 %: {self.floor_low:.3g} to {self.floor_high:.3g})"
            problem = f"an error of {error:g} is not above {about}, the floor to which these errors fall"
            fix = "More data alone do not lead there: aim higher, or measure a better network or cleaner labels."
            if error > self.floor_low:
                fix = "More sizes may show a lower floor, which the interval allows; else aim higher."
            raise UsageError(problem, where="--error-target", fix=fix)
        log_samples = math.log((error - self.floor) / self.scale) / self.exponent
        if log_samples > math.log(MOST_SAMPLES):
            problem = f"an error of {error:g} would need more than 10^18 samples, as samples^{self.exponent:.3f} falls"
            raise UsageError(problem, where="--error-target", fix="Aim higher, or measure a better network.")
        if self.freedom < 1:
            return math.exp(log_samples), 0.0, math.inf
        # The edges of the band have no inverse: they are read off a grid, 0.2 % apart.
        samples = math.exp(log_samples)
        bottom = min(self.low, samples) / 1e3
        grid = np.geomspace(bottom, MOST_SAMPLES, math.ceil(500 * math.log(MOST_SAMPLES / bottom)))
        low, high = self._predict_bands(grid)
        inside = np.flatnonzero((low <= error) & (error <= high))
        # An exact law has a band that is thinner than the grid.
        first, last = (samples, samples) if inside.size == 0 else (grid[inside[0]], grid[inside[-1]])
        return samples, min(samples, float(first)), math.inf if last == grid[-1] else max(samples, float(last))

    def expect_fall(self) -> None:
        """Raises UsageError if the error does not fall with more samples."""
        if self.exponent >= 0:
            problem = f"the error does not fall with more data (exponent {self.exponent:+.3f})"
            fix = "Leave out the sets on which the network no longer learns."
            raise UsageError(problem, where="--errors-at", fix=fix)

    def _predict_bands(self, samples: Float64) -> tuple[Float64, Float64]:
        """Predicts the bands of several sizes; float64 [n] each."""
        if self.freedom < 1:
            return np.zeros_like(samples), np.full_like(samples, math.inf)
        fits = _fit_floors(self.points)
        if not self.floor:
            fits = fits[:1]
        # The prediction interval of a regression in logarithms. With a floor it is the union over all floors that fit
        # well enough: those for which law and new point together stay within Student's t of the best fit.
        room = compute_student_t(self.freedom) ** 2 * self.spread**2 + min(one.squares for one in fits)
        near = [one for one in fits if one.squares <= room]
        edges = [one.predict_edges(np.log(samples), room - one.squares) for one in near]
        lows, highs = zip(*edges, strict=True)
        return np.min(lows, axis=0), np.max(highs, axis=0)


@final
@dataclass(frozen=True)
class _FloorFit:
    """The best law with a given floor: ln(error - floor) = centre + exponent * (ln samples - mean_log)."""

    floor: float
    centre: float
    exponent: float
    mean_log: float
    # Sum of weights, and weighted sum of squared deviations of ln samples from their mean.
    weight: float
    deviations: float
    # Squared residuals of ln error.
    squares: float

    def predict_edges(self, log_samples: Float64, room: float) -> tuple[Float64, Float64]:
        """Returns the lowest and the highest error that add at most `room` to the squared residuals."""
        far = log_samples - self.mean_log
        above = np.exp(self.centre + self.exponent * far)
        error = self.floor + above
        leverage = (1 / self.weight + far**2 / self.deviations) * (above / error) ** 2
        # Far away the width exceeds what exp can hold, which is a band without an end.
        width = np.minimum(np.sqrt(room * (1 + leverage)), 700.0)
        return error * np.exp(-width), error * np.exp(width)


def fit_error_curve(points: Sequence[tuple[float, float]]) -> ErrorCurve:
    """Fits the law by least squares in logarithms.

    The floor is fitted from four points on, and kept if it shortens the residuals more than chance does in 95 of 100
    cases (F test). On 11 measured curves a fit with a floor in any case gave no upper bound for most answers.

    Args:
        points: pairs (samples, error), all above 0.

    Raises UsageError if there are fewer than two different sizes, or a number is not positive.
    """
    if any(not (x > 0 and y > 0) for x, y in points):
        raise UsageError("samples and errors are numbers above 0", where="--errors-at")
    if len({x for x, _ in points}) < 2:
        problem = "an error by samples needs 2 points or more with different numbers of samples"
        raise UsageError(problem, where="--errors-at", fix="Train on two subsets more, each half of the one before.")
    known = tuple(sorted((float(x), float(y)) for x, y in points))
    fits = _fit_floors(known)
    pure, best = fits[0], min(fits, key=lambda one: one.squares)
    free = len(known) - 3
    shown = free >= 1 and best.floor > 0 and best.exponent < 0 and pure.squares > EXACT * len(known)
    if shown:
        gain = (pure.squares - best.squares) * free / max(best.squares, EXACT)
        shown = len({x for x, _ in known}) >= 4 and gain > compute_student_t(free) ** 2
    chosen = best if shown else pure
    spread = math.sqrt(chosen.squares / max(1, free if shown else free + 1))
    floors = [0.0]
    if shown:
        room = best.squares + compute_student_t(free) ** 2 * spread**2
        floors = [one.floor for one in fits if one.squares <= room]
    scale = math.exp(chosen.centre - chosen.exponent * chosen.mean_log)
    return ErrorCurve(chosen.floor, min(floors), max(floors), scale, chosen.exponent, spread, known)


@lru_cache(maxsize=16)
def _fit_floors(points: Points) -> tuple[_FloorFit, ...]:
    """Fits the law for floors from 0, which comes first, to nearly the smallest error."""
    smallest = min(error for _, error in points)
    # Dense near the smallest error, where the law bends most.
    floors = smallest * (1 - np.geomspace(1, 1e-3, FLOORS))
    fits = [_fit_floor(points, float(floor)) for floor in floors]
    for _ in range(ROUNDS):
        at = min(range(len(fits)), key=lambda place: fits[place].squares)
        low, high = fits[max(0, at - 1)].floor, fits[min(len(fits) - 1, at + 1)].floor
        fits += [_fit_floor(points, float(floor)) for floor in np.linspace(low, high, 11)[1:-1]]
        fits.sort(key=lambda one: one.floor)
    return tuple(fits)


def _fit_floor(points: Points, floor: float) -> _FloorFit:
    samples, errors = (np.array(side) for side in zip(*points, strict=True))
    log_samples, above = np.log(samples), errors - floor
    # A relative error of `errors` moves ln(errors - floor) by errors / above as much: weights undo that.
    weights = (above / errors) ** 2
    weight = float(weights.sum())
    mean_log, centre = (float((weights * side).sum()) / weight for side in (log_samples, np.log(above)))
    far = log_samples - mean_log
    deviations = float((weights * far**2).sum())
    exponent = float((weights * far * (np.log(above) - centre)).sum()) / deviations
    residuals = np.log(errors) - np.log(floor + np.exp(centre + exponent * far))
    return _FloorFit(floor, centre, exponent, mean_log, weight, deviations, float((residuals**2).sum()))
