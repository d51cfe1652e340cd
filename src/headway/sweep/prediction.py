"""Prediction of a sweep's time from the costs of a trial, before it begins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

from headway.sweep.budget import Plan
from headway.sweep.costs import TrialCosts
from headway.sweep.rungs import Bracket

FEEDING_COST = 0.97
"""Share of the core seconds without a feeder below which one is used: predictions repeat within 3 %."""
FEED_S = 0.0005
"""Seconds of a core in which a feeder and one of its slots pass a batch on. Measured for batches of 64: 0.11 ms for the
packets, and once a batch 0.15 ms (64 pixels) to 1.2 ms (224 pixels) for the copy."""


@final
@dataclass(frozen=True, kw_only=True)
class TrialShape:
    """The lengths of a trial that decide its costs.

    Attributes:
        costs: seconds of its parts.
        steps: steps of a full training.
        evaluations, checkpoints: those of a full training, without those of rungs.
        weight: how many trials of the sweep are like it.
    """

    costs: TrialCosts
    steps: int
    evaluations: float
    checkpoints: float
    weight: float = 1.0


@final
@dataclass(frozen=True, kw_only=True)
class SweepPrediction:
    """The predicted time of a sweep.

    Attributes:
        core_s: seconds of cores; on a GPU, of devices.
        wall_s: seconds until its end, if nothing else runs.
        own_loaders_s: `core_s` if each trial had a loader of its own.
        feeds: True if a feeder decodes for all slots.
    """

    core_s: float
    wall_s: float
    own_loaders_s: float
    feeds: bool = False

    @property
    def share_gain(self) -> float:
        """How many times as much the sweep would cost with own loaders."""
        return self.own_loaders_s / self.core_s


def predict_sweep(
    plan: Plan,
    shapes: Sequence[TrialShape],
    *,
    slots: int,
    together: int,
    seeds: int,
    start_s: float,
    feeds: bool = False,
) -> SweepPrediction:
    """Predicts a sweep whose trials are as the given ones on the average.

    Trials of a rung are shared among the slots; those in a slot read each batch once, and with a feeder those of all
    slots. Rungs follow each other.

    Args:
        shapes: a sample of trials.
        slots: processes that train at once.
        together: most trials that take turns in one process.
        seeds: full trainings of the winner at the end.
        start_s: seconds until a process is ready.
        feeds: a feeder decodes for all slots. It is one more process that opens the data, and takes its time from the
            slots' cores.
    """
    sums = [_predict_one(plan, shape, slots, together, seeds, feeds) for shape in shapes]
    weights = [shape.weight for shape in shapes]
    core, wall, own = (statistics.fmean(parts, weights) for parts in zip(*sums, strict=True))
    once = start_s + statistics.fmean([shape.costs.open_s for shape in shapes], weights)
    # The feeder starts beside the last slot, but its start takes a core's time too.
    core_s = core + (slots + feeds) * once
    wall_s = wall + once * (1 + feeds / slots)
    return SweepPrediction(core_s=core_s, wall_s=wall_s, own_loaders_s=own + slots * once, feeds=feeds)


def choose_feeding(*args: Any, slots: int, **more: Any) -> SweepPrediction:
    """Predicts a sweep with a feeder and without one, and returns the cheaper prediction; see `predict_sweep`."""
    without = predict_sweep(*args, slots=slots, **more)
    if slots == 1:
        return without
    fed = predict_sweep(*args, slots=slots, **more, feeds=True)
    return fed if fed.core_s < FEEDING_COST * without.core_s else without


def _predict_one(
    plan: Plan, shape: TrialShape, slots: int, together: int, seeds: int, feeds: bool
) -> tuple[float, float, float]:
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
            work = [load * _cost_work(shape, before, level) for load in loads]
            decoding = [math.ceil(load / together) * _cost_decoding(shape, before, level) for load in loads]
            own += sum(work) + trials * _cost_decoding(shape, before, level)
            if feeds and len(loads) > 1:
                # The first slot has most trials; the others read its batches.
                passed = len(loads) * _count_steps(shape, before, level) * FEED_S
                once = decoding[0] + passed
                core, wall = core + sum(work) + once, wall + max(work) + once / slots
            else:
                seconds = [one + other for one, other in zip(work, decoding, strict=True)]
                core, wall = core + sum(seconds), wall + max(seconds, default=0.0)
    begin, end = Fraction(0), Fraction(1)
    # A seed has batches of its own, for which the data are opened anew.
    alone = _cost_work(shape, begin, end) + _cost_decoding(shape, begin, end) + shape.costs.open_s + shape.costs.end_s
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


def _count_steps(shape: TrialShape, before: Fraction, level: Fraction) -> int:
    return math.ceil(level * shape.steps) - math.ceil(before * shape.steps)


def _cost_decoding(shape: TrialShape, before: Fraction, level: Fraction) -> float:
    """Returns the seconds in which the batches from one level to another are decoded once."""
    return _count_steps(shape, before, level) * shape.costs.decode_s


def _cost_work(shape: TrialShape, before: Fraction, level: Fraction) -> float:
    """Returns the seconds in which a trial comes from one level to another, without decoding."""
    costs, steps = shape.costs, _count_steps(shape, before, level)
    share = float(level - before)
    # The last evaluation and checkpoint of a full training are counted among its own.
    ends = 0 if level == 1 else 1
    each = steps * costs.step_s
    each += (share * shape.evaluations + ends) * costs.evaluate_s
    each += (share * shape.checkpoints + ends) * costs.checkpoint_s
    return each + (costs.build_s if before == 0 else 0.0)
