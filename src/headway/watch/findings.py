"""Turns the numbers of a watch into its report: limit, patterns, advice, and what stays unknown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.doctor.loop_advice import WORTH, LoopAdviser
from headway.doctor.loop_observation import LoopFacts, LoopObservation, LoopPattern, RankTime, format_share
from headway.doctor.loop_verdict import LoopCosts, compute_costs, describe_too_few_steps, judge_loop
from headway.observe import patterns
from headway.observe.patterns import MAX_CHANCE, RecurringPattern
from headway.observe.step_marks import STAGES, WAIT, WARM_UP_STEPS, FloatArray, LoopStart, StepSeries

# Waits below this share of the time are not searched for patterns.
MIN_WAIT_SHARE = 0.01
# Smallest change of a step's time over a watch that is reported.
MIN_DRIFT = 0.1
# If the median wait is below this share of the mean, the workers keep up but the queue runs dry at times.
MAX_MEDIAN_WAIT_SHARE = 0.1


def conclude_watch(
    series: StepSeries,
    starts: Sequence[LoopStart],
    facts: LoopFacts,
    *,
    ranks: Sequence[RankTime] = (),
    windows: FloatArray | None = None,
) -> LoopObservation:
    """Returns the report of a watch.

    Args:
        series: the steps so far.
        starts: the loops so far.
        facts: facts about the loop.
        ranks: times of all ranks, if they were gathered.
        windows: [windows, ranks] mean seconds of a step without backward; None: one rank, or they were not gathered.
    """
    costs = compute_costs(series, starts, facts)
    gaps = [start.gap_s for start in starts if start.gap_s is not None]
    shared_fields: dict[str, Any] = {
        "device": facts.device,
        "warm_up_steps": WARM_UP_STEPS,
        "epochs": len(starts),
        "batch": facts.samples,
        "between_epochs_s": float(np.mean(gaps)) if gaps else None,
        "ranks": tuple(ranks),
    }
    if costs is None:
        steps = int((series.index > 0).sum())
        missing_fields: dict[str, Any] = dict.fromkeys(
            ("step_s", "p99_s", "samples_s", "wait_share", "wait_low", "wait_high")
        )
        return LoopObservation(
            kind=None,
            sentence=describe_too_few_steps(steps, WARM_UP_STEPS),
            steps=steps,
            **shared_fields,
            **missing_fields,
        )
    # First steps of epochs have their own costs: they count as `first batch` only.
    steady = series.select(series.index > 0)
    verdict = judge_loop(costs, facts)
    found_patterns, period = _find_patterns(steady, costs, facts, windows)
    # Bursts: the queue is full most of the time and runs dry now and then.
    median_wait_s = float(np.median(steady.seconds[:, WAIT]))
    has_bursts = median_wait_s < MAX_MEDIAN_WAIT_SHARE * costs.wait * costs.step_s and all(
        pattern.kind != "workers" for pattern in found_patterns
    )
    adviser = LoopAdviser(verdict.kind, costs, facts, bursts=has_bursts, period=period)
    known_low = not np.isnan(costs.low)
    return LoopObservation(
        kind=verdict.kind,
        sentence=verdict.sentence,
        gain=verdict.gain,
        steps=costs.steps,
        step_s=costs.step_s,
        p99_s=costs.p99_s,
        samples_s=None if facts.samples is None else facts.samples / costs.step_s,
        wait_share=costs.wait,
        wait_low=costs.low if known_low else None,
        wait_high=costs.high if known_low else None,
        stages=costs.stages,
        first_batch_s=costs.first_s,
        syncs=costs.syncs if facts.is_asynchronous else None,
        sync_share=costs.sync if facts.is_asynchronous else None,
        reads=float(steady.reads.mean()),
        read_at=tuple(name for name, _ in facts.places),
        starved=costs.starved,
        patterns=tuple(found_patterns),
        loader="" if facts.loader is None else facts.loader.describe(),
        advice=() if facts.elsewhere else adviser.advise(),
        unknown=tuple(_list_unknown(costs, facts, starts)),
        **shared_fields,
    )


def _find_patterns(
    steady: StepSeries, costs: LoopCosts, facts: LoopFacts, windows: FloatArray | None
) -> tuple[list[LoopPattern], tuple[int, str | None] | None]:
    """Returns all patterns; and the period of the stalls, with the name of the interval that matches it (or None)."""
    found_patterns = []
    waits = steady.seconds[:, WAIT]
    busy_s = steady.seconds.sum(1) - waits
    workers = facts.workers if facts.torch_loader else None
    if costs.wait >= MIN_WAIT_SHARE and (workers_pattern := patterns.find_worker_period(waits, steady.index, workers)):
        found_patterns.append(
            LoopPattern(
                kind="workers", sentence=_describe_workers(workers_pattern, workers), p_value=workers_pattern.p_value
            )
        )
    if costs.first_s is not None and costs.first_s > costs.step_s:
        share = f", {format_share(costs.first)} of the time" if costs.first else ""
        what = f"the first batch of an epoch takes {costs.first_s:.3g} s longer than the others{share}"
        found_patterns.append(LoopPattern(kind="first batch", sentence=what, p_value=None))
    period: tuple[int, str | None] | None = None
    period_pattern = patterns.find_period(busy_s)
    updates_per_step = float(steady.updates.mean())
    # What the loop does at known intervals, to explain a period.
    intervals = dict(facts.every)
    if facts.batches:
        intervals["the epoch"] = facts.batches
    if 0 < updates_per_step < 0.9:
        # Gradient accumulation makes every n-th step longer.
        intervals["the optimizer's step"] = round(1 / updates_per_step)
    if period_pattern is not None:
        name = patterns.match_interval(period_pattern.period, intervals)
        period = period_pattern.period, name
        match_text = "" if name is None else f", as often as {name}"
        what = f"one step in {period_pattern.period} takes {_compare_times(period_pattern)}{match_text}"
        found_patterns.append(LoopPattern(kind="period", sentence=what, p_value=period_pattern.p_value))
    drift = patterns.find_drift(waits + busy_s)
    if drift is not None and drift.p_value < MAX_CHANCE and abs(drift.change) >= MIN_DRIFT:
        direction = "longer" if drift.change > 0 else "shorter"
        what = f"steps get {direction}: by {format_share(abs(drift.change))} of the median during the watch"
        found_patterns.append(LoopPattern(kind="drift", sentence=what, p_value=drift.p_value))
    if windows is not None and (slow_rank := patterns.find_slow_rank(windows, costs.step_s)):
        found_patterns.append(LoopPattern(kind="slow rank", sentence=_describe_slow_rank(slow_rank), p_value=None))
    return found_patterns, period


def _describe_workers(pattern: RecurringPattern, workers: int | None) -> str:
    what = f"one batch in {pattern.period} makes the loop wait {_compare_times(pattern)}"
    if workers is None:
        return f"{what}, as if {pattern.period} workers delivered at the same time"
    return f"{what}: the {workers} workers deliver at the same time, and are too slow"


def _compare_times(pattern: RecurringPattern) -> str:
    return f"{1e3 * pattern.large:.3g} ms, the others {1e3 * pattern.rest:.3g} ms"


def _describe_slow_rank(slow_rank: patterns.SlowRank) -> str:
    delay_text = f"is behind the others by {format_share(slow_rank.behind)} of a step"
    if slow_rank.always:
        return f"rank {slow_rank.rank} {delay_text}, in {format_share(slow_rank.share)} of the windows: check its host"
    if slow_rank.always is None:
        return f"rank {slow_rank.rank} {delay_text}; there are too few steps to tell whether it always is"
    return f"the slowest rank {delay_text}, and it changes: the input is slow on all ranks"


def _list_unknown(costs: LoopCosts, facts: LoopFacts, starts: Sequence[LoopStart]) -> list[str]:
    unknown = []
    seen_stages = {stage.stage for stage in costs.stages}
    if facts.is_asynchronous:
        what = "forward, loss, backward and optimizer show the time to launch work or to wait for room in the queue"
        unknown.append(f"{what}: not the device's own time")
        if costs.starved is None:
            unknown.append("whether the device was idle: this kind of device cannot be queried without a sync")
    missing = [stage for stage in STAGES if stage not in (*seen_stages, "wait", "loss", "other")]
    if "backward" in missing and "forward" not in missing:
        # torch.autograd.grad and compiled functions call no hook of backward.
        missing.remove("backward")
        unknown.append("no backward pass was seen: its time is in another stage")
    if missing:
        verb = "was" if len(missing) == 1 else "were"
        unknown.append(f"{' and '.join(missing)} {verb} not seen: the time is in the stage other")
    if facts.compiled:
        unknown.append("syncs inside of compiled code: they are not counted")
    if facts.exchange:
        unknown.append(
            facts.exchange if costs.exchange is None else f"{facts.exchange}; it takes {format_share(costs.exchange)}"
        )
    if not facts.torch_loader and facts.loader is None:
        what = "neither a torch DataLoader nor a headway.Loader"
        unknown.append(f"how the loader works: it is {what}, so the cause of its waits is unknown")
    if costs.wait >= WORTH and facts.loader is None:
        unknown.append(
            "reading, decoding and collating: here they are one wait; headway doctor RECIPE measures each alone"
        )
    if all(start.first_s is None or start.is_first_loop for start in starts):
        unknown.append("the time of an epoch's beginning: no second epoch began")
    return unknown
