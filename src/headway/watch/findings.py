"""From the numbers of a watch to what it says: patterns, advice, what cannot be told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headway.doctor.loop_advice import WORTH, Adviser
from headway.doctor.loop_observation import Facts, Observed, PatternSeen, RankTime, percent
from headway.doctor.loop_verdict import Costs, costs, judge, too_few
from headway.observe import patterns
from headway.observe.patterns import MAX_CHANCE, RecurringPattern
from headway.observe.step_marks import STAGES, WAIT, WARM_UP_STEPS, LoopStart, Numbers, StepSeries

SEEN = 0.01
"""Share of the time that waits have to take before a pattern of theirs is worth a line."""
DRIFTED = 0.1
"""Change of a step's time over a watch that is worth a line."""
BURSTS = 0.1
"""Where the median wait is less than so much of the mean, the workers keep up, and the queue runs dry at times."""


def concluded(
    series: StepSeries,
    starts: Sequence[LoopStart],
    facts: Facts,
    *,
    ranks: Sequence[RankTime] = (),
    windows: Numbers | None = None,
) -> Observed:
    """What a watch says.

    Args:
        windows: [windows, ranks] own seconds of a step of all ranks; None: one rank, or they were not gathered.
    """
    found = costs(series, starts, facts)
    between = [one.before_s for one in starts if one.before_s is not None]
    given: dict[str, Any] = {
        "device": facts.device,
        "warm_up_steps": WARM_UP_STEPS,
        "epochs": len(starts),
        "batch": facts.samples,
        "between_epochs_s": float(np.mean(between)) if between else None,
        "ranks": tuple(ranks),
    }
    if found is None:
        steps = int((series.index > 0).sum())
        nothing: dict[str, Any] = dict.fromkeys(("step_s", "p99_s", "samples_s", "wait_share", "wait_low", "wait_high"))
        return Observed(kind=None, sentence=too_few(steps, WARM_UP_STEPS), steps=steps, **given, **nothing)
    steady = series.select(series.index > 0)
    judged = judge(found, facts)
    seen, period = _patterns(series, steady, found, facts, windows)
    median_wait_s = float(np.median(steady.seconds[:, WAIT]))
    bursts = median_wait_s < BURSTS * found.wait * found.step_s and all(one.kind != "workers" for one in seen)
    adviser = Adviser(judged.kind, found, facts, bursts=bursts, period=period)
    known_low = not np.isnan(found.low)
    return Observed(
        kind=judged.kind,
        sentence=judged.sentence,
        gain=judged.gain,
        steps=found.steps,
        step_s=found.step_s,
        p99_s=found.p99_s,
        samples_s=None if facts.samples is None else facts.samples / found.step_s,
        wait_share=found.wait,
        wait_low=found.low if known_low else None,
        wait_high=found.high if known_low else None,
        stages=found.stages,
        first_batch_s=found.first_s,
        syncs=found.syncs if facts.asynchronous else None,
        sync_share=found.sync if facts.asynchronous else None,
        reads=float(steady.reads.mean()),
        read_at=tuple(name for name, _ in facts.places),
        starved=found.starved,
        patterns=tuple(seen),
        advice=() if facts.elsewhere else adviser.advise(),
        unknown=tuple(_unknown(found, facts, starts)),
        **given,
    )


def _patterns(
    series: StepSeries, steady: StepSeries, found: Costs, facts: Facts, windows: Numbers | None
) -> tuple[list[PatternSeen], tuple[int, str | None] | None]:
    """(all patterns, what the stalls' period is and is known as)."""
    out = []
    waits, own = steady.seconds[:, WAIT], steady.seconds.sum(1) - steady.seconds[:, WAIT]
    workers = facts.workers if facts.torch_loader else None
    if found.wait >= SEEN and (one := patterns.find_worker_period(waits, steady.index, workers)):
        out.append(PatternSeen(kind="workers", sentence=_of_workers(one, workers), p_value=one.p_value))
    if found.first_s is not None and found.first_s > found.step_s:
        share = f", {percent(found.first)} of the time" if found.first else ""
        what = f"the first batch of an epoch takes {found.first_s:.3g} s longer than another one{share}"
        out.append(PatternSeen(kind="first batch", sentence=what, p_value=None))
    period: tuple[int, str | None] | None = None
    again = patterns.find_period(own)
    accumulates = float(steady.updates.mean())
    known = dict(facts.every)
    if facts.batches:
        known["the epoch"] = facts.batches
    if 0 < accumulates < 0.9:
        known["the optimizer's step"] = round(1 / accumulates)
    if again is not None:
        name = patterns.match_interval(again.period, known)
        period = again.period, name
        named = "" if name is None else f", as often as {name}"
        what = f"one step in {again.period} takes the loop {_instead(again)}{named}"
        out.append(PatternSeen(kind="period", sentence=what, p_value=again.p_value))
    drift = patterns.find_drift(waits + own)
    if drift is not None and drift.p_value < MAX_CHANCE and abs(drift.change) >= DRIFTED:
        way = "longer" if drift.change > 0 else "shorter"
        what = f"steps get {way}: by {percent(abs(drift.change))} of the median over what was watched"
        out.append(PatternSeen(kind="drift", sentence=what, p_value=drift.p_value))
    if windows is not None and (slow := patterns.find_slow_rank(windows, found.step_s)):
        out.append(PatternSeen(kind="slow rank", sentence=_of_rank(slow), p_value=None))
    return out, period


def _of_workers(one: RecurringPattern, workers: int | None) -> str:
    what = f"one batch in {one.period} is waited for {_instead(one)}"
    if workers is None:
        return f"{what}, as if {one.period} workers brought theirs together"
    return f"{what}: the {workers} workers bring theirs together, and are too slow"


def _instead(one: RecurringPattern) -> str:
    return f"{1e3 * one.large:.3g} ms, the others {1e3 * one.rest:.3g} ms"


def _of_rank(slow: patterns.SlowRank) -> str:
    behind = f"is behind the others by {percent(slow.behind)} of a step"
    if slow.always:
        return f"rank {slow.rank} {behind}, in {percent(slow.share)} of the windows: look at its host"
    if slow.always is None:
        return f"rank {slow.rank} {behind}; too few steps to tell whether it always is"
    return f"the slowest rank {behind}, and it is another one each time: the input is slow on all of them"


def _unknown(found: Costs, facts: Facts, starts: Sequence[LoopStart]) -> list[str]:
    out = []
    seen = {one.stage for one in found.stages}
    if facts.asynchronous:
        what = (
            "forward, loss, backward and optimizer are the time to hand the work over, or to wait for room in the queue"
        )
        out.append(f"{what}: not the device's own time")
        if found.starved is None:
            out.append("whether the device ran out of work: this kind of device does not say without waiting for it")
    missing = [stage for stage in STAGES if stage not in (*seen, "wait", "loss", "other")]
    if "backward" in missing and "forward" not in missing:
        missing.remove("backward")
        out.append("no backward pass was seen: it is in another stage")
    if missing:
        out.append(f"{' and '.join(missing)} {'was' if len(missing) == 1 else 'were'} not seen: in the stage other")
    if facts.compiled:
        out.append("values that are read inside of compiled code: they are not counted")
    if facts.exchange:
        out.append(
            facts.exchange if found.exchange is None else f"{facts.exchange}; it takes {percent(found.exchange)}"
        )
    if not facts.torch_loader:
        out.append("how the loader works: it is no torch DataLoader, so what its waits are made of is not known")
    if found.wait >= WORTH:
        out.append(
            "reading, decoding and collating: all of it is one wait here; headway doctor RECIPE measures each alone"
        )
    if all(one.first_s is None or one.begins for one in starts):
        out.append("what the beginning of an epoch takes: no second one began")
    return out
