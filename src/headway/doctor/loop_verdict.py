"""What limits a loop that was watched: rules over shares of its time. Functions of numbers alone.

Only what can be saved is a limit: waiting for batches, for values, for other ranks, stalls, and the handing over of
work to a device that has nothing to do. Forward, backward and the optimizer on a CPU are the work itself: they limit
where nothing else does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.profile import LimitKind
from headway.doctor.loop_observation import Facts, StageTime, percent
from headway.observe.patterns import estimate_share
from headway.observe.step_marks import BACKWARD, STAGES, WAIT, LoopStart, Numbers, StepSeries

LEAST_STEPS = 20
"""Of fewer nothing is said."""
LIMIT = 0.1
"""Share of the time from which what can be saved is called the limit: at most 1.11 times the samples/s."""
OWN = 0.2
"""The same for the loop's own code, of which some is needed."""
LONG = 3.0
"""A step is a stall where the loop takes so many times the median for it, waiting for its batch left out."""
OFTEN = 0.5
"""Syncs a step, from which they set the pace. Share of the steps, from which a device that has nothing to do waits."""
LEAST_COMPARED = 10
"""Steps with an exchange, and without, that are needed to tell its time."""


@final
@dataclass(frozen=True, kw_only=True)
class Costs:
    """Where the time of the counted steps went.

    Attributes:
        steps: that have a batch before them in their epoch.
        step_s: mean of a step, first batches spread over the steps of an epoch in it. p99_s: without these.
        stages: all that were seen.
        wait, low, high: share, and its 95 % interval.
        first_s: of an epoch's first batch and its end, over another batch's wait; None: no epoch but the first of the
            process began. first: its share; 0 where the length of an epoch is not known.
        stall: share of what long steps take over the median. stalls: how many of them. stalled: in which stage.
        exchange: share of the exchange of gradients that backward waits for; None: not known.
        syncs: a step. sync: share of the time in them.
        drained, starved: share of the steps in which the device had nothing to do when a batch was asked for, and when
            it came; None: not known.
    """

    steps: int
    step_s: float
    p99_s: float
    stages: tuple[StageTime, ...]
    wait: float
    low: float
    high: float
    first_s: float | None
    first: float
    stall: float
    stalls: int
    stalled: str
    exchange: float | None
    syncs: float
    sync: float
    drained: float | None
    starved: float | None

    def share(self, *stages: str) -> float:
        return sum(one.share for one in self.stages if one.stage in stages)


@final
@dataclass(frozen=True)
class Judged:
    """Attributes: kind: None: it cannot be told. sentence: without the kind, and without a full stop. gain: at most."""

    kind: LimitKind | None
    sentence: str
    gain: float | None


def costs(series: StepSeries, starts: Sequence[LoopStart], facts: Facts) -> Costs | None:
    """Of the steps that are no first ones of an epoch; None: there are fewer than LEAST_STEPS."""
    steady = series.select(series.index > 0)
    if len(steady) < LEAST_STEPS:
        return None
    seconds, step = steady.seconds, steady.seconds.sum(1)
    means = seconds.mean(0)
    first_s = _first(starts, float(means[WAIT]))
    epoch = facts.batches or _length(starts)
    spread = 0.0 if first_s is None or epoch is None else first_s / epoch
    total = float(means.sum()) + spread
    _, low, high = estimate_share(seconds[:, WAIT], step)
    within = float(means.sum()) / total
    stall, stalls, stalled = _stalls(steady, facts.asynchronous)
    spent: list[tuple[str, float]] = [
        (stage, float(mean)) for stage, mean in zip(STAGES, means, strict=True) if mean > 0
    ]
    if spread > 0:
        spent.insert(int(means[WAIT] > 0), ("first batch", spread))
    return Costs(
        steps=len(steady),
        step_s=total,
        p99_s=float(np.percentile(step, 99)),
        stages=tuple(StageTime(stage=stage, seconds=mean, share=mean / total) for stage, mean in spent),
        wait=float(means[WAIT]) / total,
        low=low * within,
        high=high * within,
        first_s=first_s,
        first=spread / total,
        stall=stall / len(steady) / total,
        stalls=stalls,
        stalled=stalled,
        exchange=_exchange(steady, total),
        syncs=float(steady.syncs.mean()),
        sync=float(steady.sync_s.mean()) / total,
        drained=_known(steady.before),
        starved=_known(steady.after),
    )


def judge(found: Costs, facts: Facts) -> Judged:
    """What limits."""
    if facts.elsewhere:
        what = (
            "the batches are asked for on another thread than the one that trains, so what this one waits is not seen"
        )
        return Judged(None, f"{what}; wrap what the training loop itself iterates over", None)
    limits = [*_shares(found), *(_of_device(found) if facts.asynchronous else _of_host(found))]
    best = max(limits, key=lambda one: one.gain or 0.0, default=None)
    if best is not None:
        return best
    return _device(found) if facts.asynchronous else _host(found)


def too_few(steps: int, warm_up: int) -> str:
    what = f"{steps} steps were seen after {warm_up} of warm-up, those with an epoch's first batch left out"
    return f"{what}; {LEAST_STEPS} are needed"


def _shares(found: Costs) -> list[Judged]:
    """Limits that are a share of the time on any device."""
    out = []
    if found.wait >= LIMIT and not _hidden(found):
        what = f"the loop waits {percent(found.wait)} of its time for batches"
        out.append(_gains("host/IO limited", what, "a batch that cost nothing", found.wait))
    if found.first >= LIMIT:
        what = f"the first batches of epochs take {percent(found.first)} of the time"
        out.append(_gains("stall limited", what, "epochs that began at once", found.first))
    if found.stall >= LIMIT:
        what = f"{found.stalls} of {found.steps} steps take more than {LONG:g} times the median, mostly in the stage"
        what = f"{what} {found.stalled}: {percent(found.stall)} of the time"
        out.append(_gains("stall limited", what, "doing without them", found.stall))
    if found.exchange is not None and found.exchange >= LIMIT:
        what = f"backward waits {percent(found.exchange)} of the time for the exchange of gradients"
        out.append(_gains("communication limited", what, "an exchange that cost nothing", found.exchange))
    return out


def _hidden(found: Costs) -> bool:
    """Whether the device had work left nearly whenever a batch came: then the waits for it cost nothing."""
    return found.starved is not None and found.starved < LIMIT


def _of_host(found: Costs) -> list[Judged]:
    own = found.share("other") - (found.stall if found.stalled == "other" else 0.0)
    if own < OWN:
        return []
    what = f"the loop spends {percent(own)} of its time in code of its own between the stages"
    return [_gains("host/IO limited", what, "doing without it", own)]


def _of_device(found: Costs) -> list[Judged]:
    """Limits of a device that works on its own."""
    if found.syncs >= OFTEN:
        # While the host waits for a value the device works; without the waits a step would take the host's own time,
        # or the device's, which is no less than the waits.
        saved = min(found.sync, 1 - found.sync)
        waits = f"Python waits for the device {found.syncs:.2g} times a step, {percent(found.sync)} of the time"
        if saved >= LIMIT:
            return [_gains("sync limited", waits, "waiting for nothing", saved)]
        if found.sync < LIMIT:
            what = f"{waits}: when it asks, the device is through; handing over the work takes the rest"
            return [Judged("launch limited", what, None)] if found.wait < LIMIT else []
        return []
    if found.drained is None or found.drained < OFTEN:
        return []
    handing = found.share("forward", "loss", "backward", "optimizer")
    what = f"in {percent(found.drained)} of the steps the device had nothing left to do when the loop asked for a batch"
    if found.share("other") > handing:
        share = found.share("other")
        what = f"{what}, and the loop's own code takes {percent(share)} of the time"
        return [_gains("host/IO limited", what, "doing without it", share)]
    if found.wait < handing:
        return [Judged("launch limited", f"{what}: it is faster than the loop hands it the work", None)]
    return []


def _device(found: Costs) -> Judged:
    """Of a device that works on its own, where nothing else limits."""
    wait = f"the loop waits {percent(found.wait)} of its time for batches"
    if found.syncs >= OFTEN:
        what = f"Python waits for the device {percent(found.sync)} of the time, in which it works"
        return Judged("device limited", what, None)
    if found.starved is None:
        what = f"{wait}; whether the device limits or the handing over of its work is not known without waiting for it"
        return Judged(None, what, None)
    if found.starved < OFTEN:
        what = f"the device had work left in {percent(1 - found.starved)} of the steps when the next batch came"
        return Judged("device limited", f"{what}; {wait}", None)
    what = f"the device had nothing left to do in {percent(found.starved)} of the steps when the next batch came"
    return Judged("host/IO limited", f"{what}; {wait}", None)


def _host(found: Costs) -> Judged:
    work = found.share("forward", "loss", "backward", "optimizer")
    what = f"forward, loss, backward and optimizer take {percent(work)} of the time, waiting for batches"
    return Judged("device limited", f"{what} {percent(found.wait)}", None)


def _gains(kind: LimitKind, what: str, without: str, share: float) -> Judged:
    gain = 1 / max(1 - share, 1e-3)
    return Judged(kind, f"{what}; {without} would give at most {gain:.3g} times the samples/s", gain)


def _first(starts: Sequence[LoopStart], wait: float) -> float | None:
    """Seconds that an epoch's beginning and end take over an ordinary wait. The watch's first loop starts the process
    up, too; it counts for its end alone."""
    firsts = [one.first_s for one in starts if one.first_s is not None and not one.begins]
    ends = [one.end_s for one in starts if one.end_s is not None]
    if not firsts:
        return None
    return max(0.0, float(np.mean(firsts)) - wait) + (float(np.mean(ends)) if ends else 0.0)


def _length(starts: Sequence[LoopStart]) -> float | None:
    whole = [one.batches for one in starts if one.batches]
    return float(np.mean(whole)) if whole else None


def _stalls(steady: StepSeries, asynchronous: bool) -> tuple[float, int, str]:
    """(seconds that long steps take over the median, how many there are, the stage that most of it is in).

    Steps with an update of the weights are compared with each other, and the others with each other. Where the device
    works on its own, a long step is one in which it ran out of work: else the host waited for room in its queue.
    """
    own = steady.seconds.sum(1) - steady.seconds[:, WAIT] - steady.sync_s
    over, found, count = np.zeros(len(STAGES)), 0.0, 0
    ran_out = np.append(steady.before[1:], np.nan) == 1
    for group in (steady.updates > 0, steady.updates == 0):
        if not group.any():
            continue
        middle = float(np.median(own[group]))
        long = group & (own > LONG * middle)
        if asynchronous:
            long &= ran_out
        found += float((own[long] - middle).sum())
        count += int(long.sum())
        over += np.maximum(steady.seconds[long] - np.median(steady.seconds[group], 0), 0.0).sum(0)
    over[WAIT] = 0.0
    return found, count, STAGES[int(over.argmax())]


def _exchange(steady: StepSeries, total: float) -> float | None:
    """From steps with an exchange and without one, as accumulating gradients makes them."""
    yes, no = steady.exchanged == 1, steady.exchanged == 0
    if min(yes.sum(), no.sum()) < LEAST_COMPARED:
        return None
    backward = steady.seconds[:, BACKWARD]
    longer = float(np.median(backward[yes]) - np.median(backward[no]))
    return max(0.0, longer) * float(yes.mean()) / total


def _known(flags: Numbers) -> float | None:
    known = flags[~np.isnan(flags)]
    return float(known.mean()) if len(known) >= LEAST_STEPS else None
