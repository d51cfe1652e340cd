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
from headway.observe.step_marks import STAGES, WAIT, WARM_UP_STEPS, LoopStart, Numbers, StepSeries

# Share of the time from which a pattern of the waits is reported.
SEEN = 0.01
# Change of a step's time over a watch that is reported.
DRIFTED = 0.1
# If the median wait is below this share of the mean, the workers keep up but the queue runs dry at times.
BURSTS = 0.1


def conclude_watch(
    series: StepSeries,
    starts: Sequence[LoopStart],
    facts: LoopFacts,
    *,
    ranks: Sequence[RankTime] = (),
    windows: Numbers | None = None,
) -> LoopObservation:
    """Builds the report of a watch.

    Args:
        windows: [windows, ranks] own seconds of a step of all ranks; None: one rank, or they were not gathered.
    """
    costs = compute_costs(series, starts, facts)
    between = [one.before_s for one in starts if one.before_s is not None]
    given: dict[str, Any] = {
        "device": facts.device,
        "warm_up_steps": WARM_UP_STEPS,
        "epochs": len(starts),
        "batch": facts.samples,
        "between_epochs_s": float(np.mean(between)) if between else None,
        "ranks": tuple(ranks),
    }
    if costs is None:
        steps = int((series.index > 0).sum())
        nothing: dict[str, Any] = dict.fromkeys(("step_s", "p99_s", "samples_s", "wait_share", "wait_low", "wait_high"))
        return LoopObservation(
            kind=None, sentence=describe_too_few_steps(steps, WARM_UP_STEPS), steps=steps, **given, **nothing
        )
    # First steps of epochs have their own costs: they count as `first batch` only.
    steady = series.select(series.index > 0)
    judged = judge_loop(costs, facts)
    seen, period = _find_patterns(series, steady, costs, facts, windows)
    # Bursts: the queue is full most of the time and runs dry now and then.
    median_wait_s = float(np.median(steady.seconds[:, WAIT]))
    bursts = median_wait_s < BURSTS * costs.wait * costs.step_s and all(one.kind != "workers" for one in seen)
    adviser = LoopAdviser(judged.kind, costs, facts, bursts=bursts, period=period)
    known_low = not np.isnan(costs.low)
    return LoopObservation(
        kind=judged.kind,
        sentence=judged.sentence,
        gain=judged.gain,
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
        patterns=tuple(seen),
        advice=() if facts.elsewhere else adviser.advise(),
        unknown=tuple(_list_unknown(costs, facts, starts)),
        **given,
    )


def _find_patterns(
    series: StepSeries, steady: StepSeries, costs: LoopCosts, facts: LoopFacts, windows: Numbers | None
) -> tuple[list[LoopPattern], tuple[int, str | None] | None]:
    """Returns all patterns, and the period of the stalls with the known interval of that length."""
    out = []
    waits, own = steady.seconds[:, WAIT], steady.seconds.sum(1) - steady.seconds[:, WAIT]
    workers = facts.workers if facts.torch_loader else None
    if costs.wait >= SEEN and (one := patterns.find_worker_period(waits, steady.index, workers)):
        out.append(LoopPattern(kind="workers", sentence=_describe_workers(one, workers), p_value=one.p_value))
    if costs.first_s is not None and costs.first_s > costs.step_s:
        share = f", {format_share(costs.first)} of the time" if costs.first else ""
        what = f"the first batch of an epoch takes {costs.first_s:.3g} s longer than the others{share}"
        out.append(LoopPattern(kind="first batch", sentence=what, p_value=None))
    period: tuple[int, str | None] | None = None
    again = patterns.find_period(own)
    accumulates = float(steady.updates.mean())
    known = dict(facts.every)
    if facts.batches:
        known["the epoch"] = facts.batches
    if 0 < accumulates < 0.9:
        # Gradient accumulation makes every n-th step longer.
        known["the optimizer's step"] = round(1 / accumulates)
    if again is not None:
        name = patterns.match_interval(again.period, known)
        period = again.period, name
        named = "" if name is None else f", as often as {name}"
        what = f"one step in {again.period} takes {_compare_times(again)}{named}"
        out.append(LoopPattern(kind="period", sentence=what, p_value=again.p_value))
    drift = patterns.find_drift(waits + own)
    if drift is not None and drift.p_value < MAX_CHANCE and abs(drift.change) >= DRIFTED:
        way = "longer" if drift.change > 0 else "shorter"
        what = f"steps get {way}: by {format_share(abs(drift.change))} of the median during the watch"
        out.append(LoopPattern(kind="drift", sentence=what, p_value=drift.p_value))
    if windows is not None and (slow := patterns.find_slow_rank(windows, costs.step_s)):
        out.append(LoopPattern(kind="slow rank", sentence=_describe_slow_rank(slow), p_value=None))
    return out, period


def _describe_workers(one: RecurringPattern, workers: int | None) -> str:
    what = f"one batch in {one.period} makes the loop wait {_compare_times(one)}"
    if workers is None:
        return f"{what}, as if {one.period} workers delivered at the same time"
    return f"{what}: the {workers} workers deliver at the same time, and are too slow"


def _compare_times(one: RecurringPattern) -> str:
    return f"{1e3 * one.large:.3g} ms, the others {1e3 * one.rest:.3g} ms"


def _describe_slow_rank(slow: patterns.SlowRank) -> str:
    behind = f"is behind the others by {format_share(slow.behind)} of a step"
    if slow.always:
        return f"rank {slow.rank} {behind}, in {format_share(slow.share)} of the windows: check its host"
    if slow.always is None:
        return f"rank {slow.rank} {behind}; there are too few steps to tell whether it always is"
    return f"the slowest rank {behind}, and it changes: the input is slow on all ranks"


def _list_unknown(costs: LoopCosts, facts: LoopFacts, starts: Sequence[LoopStart]) -> list[str]:
    out = []
    seen = {one.stage for one in costs.stages}
    if facts.is_asynchronous:
        what = "forward, loss, backward and optimizer show the time to launch work or to wait for room in the queue"
        out.append(f"{what}: not the device's own time")
        if costs.starved is None:
            out.append("whether the device was idle: this kind of device cannot be queried without a sync")
    missing = [stage for stage in STAGES if stage not in (*seen, "wait", "loss", "other")]
    if "backward" in missing and "forward" not in missing:
        missing.remove("backward")
        out.append("no backward pass was seen: its time is in another stage")
    if missing:
        verb = "was" if len(missing) == 1 else "were"
        out.append(f"{' and '.join(missing)} {verb} not seen: the time is in the stage other")
    if facts.compiled:
        out.append("syncs inside of compiled code: they are not counted")
    if facts.exchange:
        out.append(
            facts.exchange if costs.exchange is None else f"{facts.exchange}; it takes {format_share(costs.exchange)}"
        )
    if not facts.torch_loader:
        out.append("how the loader works: it is not a torch DataLoader, so the cause of its waits is unknown")
    if costs.wait >= WORTH:
        out.append("reading, decoding and collating: here they are one wait; headway doctor RECIPE measures each alone")
    if all(one.first_s is None or one.begins for one in starts):
        out.append("the time of an epoch's beginning: no second epoch began")
    return out
