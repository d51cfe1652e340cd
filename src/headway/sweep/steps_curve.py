"""The curve of steps to a target by batch, from kept runs: which runs are missing, and where more samples stop to help.

The method is from Shallue et al. 2018, "Measuring the Effects of Data Parallelism on Neural Network Training" (arXiv
1811.03600): each batch gets the learning rate that needs the fewest steps. No rule scales it. Pure: numbers in, numbers
out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, final

Regime = Literal["perfect", "diminishing", "none"]

GRID, STEP, MOST = 4, 2.0, 4
"""Learning rates of a search, the factor between two, and the most by which it is extended at either end."""
PATIENCE = 1.5
"""Times the steps of the best rate of a search so far after which another one is given up. It can no longer win, but
what is near the best one is still told."""
PERFECT, NONE = 0.575, 0.9
"""Steps over those of half the batch: up to the first (0.5 and 15 %) scaling is perfect, from the second there is
none."""


@final
@dataclass(frozen=True, order=True)
class CurveRun:
    """One run to the target."""

    batch: int
    lr: float
    seed: int


@final
@dataclass(frozen=True)
class CurvePoint:
    """One batch of the curve. Attributes: steps: mean steps to the target. regime: how it scales up to here."""

    batch: int
    steps: float
    regime: Regime


@final
@dataclass(frozen=True)
class PerfectScaling:
    """The end of perfect scaling.

    Attributes:
        batch: the largest batch of it; None if it is not known.
        how: whether it ends there, or why it is not known.
    """

    batch: int | None
    how: str


def compute_steps_to(
    evaluations: Sequence[tuple[int, float | None]],
    target: float,
    *,
    start: float | None = None,
    higher_is_better: bool = True,
) -> float | None:
    """Computes the steps to a target, along a line between the evaluation before and the one that reached it.

    Args:
        evaluations: (step, metric), the oldest first. One that is None or not finite counts as not made.
        start: metric before the first step, such as that of chance. None: it is not known, and a target that the first
            evaluation reaches counts as reached at its step.
        higher_is_better: direction of the metric.

    Returns:
        None if no evaluation reaches the target.
    """
    sign = 1.0 if higher_is_better else -1.0
    before = None if start is None else (0, start)
    for step, value in evaluations:
        # A line through NaN would be NaN everywhere.
        if value is None or not math.isfinite(value):
            continue
        if sign * value >= sign * target:
            if before is None:
                return float(step)
            share = (target - before[1]) / (value - before[1])
            return before[0] + share * (step - before[0])
        before = (step, value)
    return None


def extend_grid(scores: Mapping[float, float], grid: Sequence[float]) -> tuple[list[float], float | None]:
    """Returns the learning rates that a search still needs, and the best one: it goes on until the best is inside.

    Args:
        scores: a score for each rate that was tried, the largest is best; -inf: the run has not reached its target.
        grid: the rates that it begins with.

    Returns:
        no rates, and the best one, once it is known. If that still lies at the edge after `MOST` more on its side, it
        is that. There is no best one if no rate of the grid reaches the target.
    """
    missing = [lr for lr in grid if lr not in scores]
    if missing:
        return missing, None
    tried, best = sorted(scores), _find_best(scores)
    if scores[best] == -math.inf:
        return [], None
    low, high = grid[0] / STEP**MOST, grid[-1] * STEP**MOST
    if best == tried[0] and best > low * 1.01:
        return [best / STEP], None
    if best == tried[-1] and best < high / 1.01:
        return [best * STEP], None
    return [], best


def is_at_edge(scores: Mapping[float, float]) -> bool:
    """Returns True if the best learning rate is the lowest or the highest one tried: a better one may lie beyond."""
    return _find_best(scores) in (min(scores), max(scores))


def _find_best(scores: Mapping[float, float]) -> float:
    # The lowest rate among equals.
    return max(sorted(scores), key=lambda lr: scores[lr])


def find_regimes(
    batches: Sequence[int], steps: Sequence[float], perfect: float = PERFECT, none: float = NONE
) -> list[Regime]:
    """Finds the regime of each batch, from the smallest on.

    It is `perfect` as long as each doubling divides the steps by nearly two, `none` from where no doubling saves much,
    and `diminishing` between. Batches that are further apart are judged by their mean doubling.

    Args:
        steps: steps to the target, of each batch.
    """
    factors = [
        (steps[place + 1] / steps[place]) ** (1 / math.log2(after / before))
        for place, (before, after) in enumerate(pairwise(batches))
    ]
    last_perfect = next((place for place, factor in enumerate(factors) if factor > perfect), len(factors))
    first_none = len(factors)
    while first_none > last_perfect and factors[first_none - 1] >= none:
        first_none -= 1
    return [
        "perfect" if place <= last_perfect else "none" if place > first_none else "diminishing"
        for place in range(len(steps))
    ]


@final
class StepsCurve:
    """The runs of one curve that are kept, by batch, and those that are missing.

    A search with one seed finds the learning rate of each batch, and other seeds then train with it.

    Args:
        grids: the learning rates that the search of each batch begins with, the smallest batch first.
        tuning_seed: seed of the searches.
        seeds: seeds of the curve.
        steps: steps to the target of each kept run; infinite if it was not reached.
    """

    def __init__(
        self,
        grids: Mapping[int, Sequence[float]],
        *,
        tuning_seed: int,
        seeds: Sequence[int],
        steps: Mapping[CurveRun, float],
    ) -> None:
        self._grids, self._tuning_seed, self.seeds = grids, tuning_seed, tuple(seeds)
        self._steps = steps

    @property
    def batches(self) -> list[int]:
        """The batches of the curve, the smallest first."""
        return list(self._grids)

    def list_tuned(self, batch: int) -> dict[float, float]:
        """Lists the steps by learning rate, of the search; infinite if the target was not reached, or the run was given
        up."""
        found = {
            run.lr: steps for run, steps in self._steps.items() if (run.batch, run.seed) == (batch, self._tuning_seed)
        }
        return dict(sorted(found.items()))

    def search(self, batch: int) -> tuple[list[float], float | None]:
        """Returns the learning rates that the search of a batch still needs, and the best one; see `extend_grid`."""
        return extend_grid(self._score(batch), self._grids[batch])

    def is_at_edge(self, batch: int) -> bool:
        """Returns True if the chosen learning rate is the lowest or the highest one tried."""
        return self.search(batch)[1] is not None and is_at_edge(self._score(batch))

    def list_missing(self) -> list[CurveRun]:
        """Lists the runs that are missing as things stand, the smallest batch first; more may follow from them."""
        missing = []
        for batch in self._grids:
            rates, best = self.search(batch)
            missing += [CurveRun(batch, lr, self._tuning_seed) for lr in rates]
            if best is not None:
                runs = [CurveRun(batch, best, seed) for seed in self.seeds]
                missing += [run for run in runs if run not in self._steps]
        return missing

    def limit_steps(self, run: CurveRun) -> float:
        """Computes the steps after which a run is given up: infinite while no rate of its search has reached the
        target, and for the seeds of the curve."""
        if run.seed != self._tuning_seed:
            return math.inf
        return PATIENCE * min(self.list_tuned(run.batch).values(), default=math.inf)

    def list_seed_steps(self, batch: int) -> list[float]:
        """Lists the steps of a batch by seed; none if one is missing or has not reached the target."""
        best = self.search(batch)[1]
        if best is None:
            return []
        found = [self._steps.get(CurveRun(batch, best, seed), math.inf) for seed in self.seeds]
        return found if found and max(found) < math.inf else []

    def compute_steps(self, batch: int) -> float | None:
        """Computes the mean steps of a batch over the seeds; None if one is missing or has not reached the target."""
        found = self.list_seed_steps(batch)
        return statistics.fmean(found) if found else None

    def list_points(self) -> list[CurvePoint]:
        """Lists the points from the smallest batch on, up to the first one that is not known."""
        known = []
        for batch in self._grids:
            steps = self.compute_steps(batch)
            if steps is None:
                break
            known.append((batch, steps))
        regimes = find_regimes([batch for batch, _ in known], [steps for _, steps in known])
        return [CurvePoint(*one, regime) for one, regime in zip(known, regimes, strict=True)]

    def find_perfect_scaling(self) -> PerfectScaling:
        """Finds the largest batch of perfect scaling. What is missing may extend or end it."""
        points = self.list_points()
        perfect = [point.batch for point in points if point.regime == "perfect"]
        has_ended = len(perfect) < len(points)
        if not has_ended and self.list_missing():
            return PerfectScaling(None, "runs are missing")
        if not perfect:
            return PerfectScaling(None, f"batch {self.batches[0]} does not reach the target")
        edges = [str(point.batch) for point in points[: len(perfect) + 1] if self.is_at_edge(point.batch)]
        if edges:
            what = "void, the best learning rate lies at the edge of its sweep"
            return PerfectScaling(None, f"{what}: batch {', '.join(edges)}")
        how = "largest batch of it" if has_ended else "no batch that reaches the target is beyond it"
        return PerfectScaling(perfect[-1], how)

    def _score(self, batch: int) -> dict[float, float]:
        return {lr: -steps for lr, steps in self.list_tuned(batch).items()}
