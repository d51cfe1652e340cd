"""Prediction of a sweep's time from the costs of a trial, before it begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import final

from headway.sweep.budget import Plan
from headway.sweep.costs import TrialCosts
from headway.sweep.rungs import Bracket


@final
@dataclass(frozen=True, kw_only=True)
class TrialShape:
    """The lengths of a trial that decide its costs.

    Attributes:
        costs: seconds of its parts.
        steps: steps of a full training.
        evaluations, checkpoints: those of a full training, without those of rungs.
    """

    costs: TrialCosts
    steps: int
    evaluations: float
    checkpoints: float


@final
@dataclass(frozen=True, kw_only=True)
class SweepPrediction:
    """The predicted time of a sweep.

    Attributes:
        core_s: seconds of cores; on a GPU, of devices.
        wall_s: seconds until its end, if nothing else runs.
        own_loaders_s: `core_s` if each trial had a loader of its own.
    """

    core_s: float
    wall_s: float
    own_loaders_s: float

    @property
    def share_gain(self) -> float:
        """How many times as much the sweep would cost with own loaders."""
        return self.own_loaders_s / self.core_s


def predict_sweep(
    plan: Plan, shapes: Sequence[TrialShape], *, slots: int, together: int, seeds: int, start_s: float
) -> SweepPrediction:
    """Predicts a sweep whose trials are as the given ones on the average.

    Trials of a rung are shared among the slots; those in a slot read each batch once. Rungs follow each other.

    Args:
        shapes: a sample of trials, such as the first ones.
        slots: processes that train at once.
        together: most trials that take turns in one process.
        seeds: full trainings of the winner at the end.
        start_s: seconds until a process is ready.
    """
    sums = [_predict_one(plan, shape, slots, together, seeds) for shape in shapes]
    core, wall, own = (sum(parts) / len(sums) for parts in zip(*sums, strict=True))
    once = start_s + sum(shape.costs.open_s for shape in shapes) / len(shapes)
    return SweepPrediction(core_s=core + slots * once, wall_s=wall + once, own_loaders_s=own + slots * once)


def _predict_one(plan: Plan, shape: TrialShape, slots: int, together: int, seeds: int) -> tuple[float, float, float]:
    """Returns core seconds, wall seconds and core seconds with own loaders if all trials are as one."""
    core = wall = own = 0.0
    for bracket in plan.brackets:
        counts = _count_trials(plan, bracket)
        # Each trial ends once, at some rung.
        ends = counts[0] * shape.costs.end_s
        core, wall, own = core + ends, wall + ends / slots, own + ends
        for rung, trials in enumerate(counts):
            before = bracket.levels[rung - 1] if rung else Fraction(0)
            level = bracket.levels[rung]
            loads = _share_out(trials, slots)
            seconds = [_cost_slot(shape, load, together, before, level) for load in loads]
            core += sum(seconds)
            wall += max(seconds, default=0.0)
            own += sum(load * _cost_slot(shape, 1, 1, before, level) for load in loads)
    alone = _cost_slot(shape, 1, 1, Fraction(0), Fraction(1)) + shape.costs.end_s
    return core + seeds * alone, wall + math.ceil(seeds / slots) * alone, own + seeds * alone


def _count_trials(plan: Plan, bracket: Bracket) -> Sequence[int]:
    """Returns how many trials train to each rung."""
    if plan.method != "asha":
        return bracket.sizes
    # As many as halving would start for this budget; the sizes of asha's bracket are only the most of each rung.
    levels, eta = bracket.levels, plan.eta
    trials = 1
    while _cost_promotions(trials + 1, levels, eta) <= plan.budget and trials < bracket.sizes[0]:
        trials += 1
    return [trials // eta**rung for rung in range(len(levels))]


def _cost_promotions(trials: int, levels: Sequence[Fraction], eta: int) -> Fraction:
    befores = (Fraction(0), *levels)
    work = Fraction(0)
    for rung, (level, before) in enumerate(zip(levels, befores, strict=False)):
        work += (trials // eta**rung) * (level - before)
    return work


def _share_out(trials: int, slots: int) -> list[int]:
    """Returns how many trials each slot gets."""
    most = math.ceil(trials / slots)
    loads = []
    while trials:
        loads.append(min(most, trials))
        trials -= loads[-1]
    return loads


def _cost_slot(shape: TrialShape, trials: int, together: int, before: Fraction, level: Fraction) -> float:
    """Returns the seconds in which a slot takes trials from one level to another."""
    costs = shape.costs
    steps = math.ceil(level * shape.steps) - math.ceil(before * shape.steps)
    share = float(level - before)
    # The last evaluation and checkpoint of a full training are counted among its own.
    ends = 0 if level == 1 else 1
    each = steps * costs.step_s
    each += (share * shape.evaluations + ends) * costs.evaluate_s
    each += (share * shape.checkpoints + ends) * costs.checkpoint_s
    each += costs.build_s if before == 0 else 0.0
    cohorts = math.ceil(trials / together)
    return trials * each + cohorts * steps * costs.decode_s
