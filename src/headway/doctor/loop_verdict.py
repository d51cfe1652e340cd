"""Finds the limit of a watched loop from the shares of its time. Pure functions of numbers.

These rules are thresholds on shares. `verdict` uses other rules, because a recipe's stages can be measured alone and
their gains predicted.

Only time that can be saved is a limit: waiting for batches, values or other ranks, stalls, and launching work on an
idle device. Forward, backward and the optimizer on a CPU are the work itself: they are the limit only if nothing else
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from headway.core.profile import LimitKind
from headway.doctor.loop_observation import LoopFacts, StageTime, format_share
from headway.observe.patterns import estimate_share
from headway.observe.step_marks import BACKWARD, STAGES, WAIT, FloatArray, LoopStart, StepSeries

# With fewer steps there is no verdict.
LEAST_STEPS = 20
# A share that can be saved is a limit from here on: a gain of at most 1.11 times the samples/s.
LIMIT = 0.1
# The same for the loop's own code, part of which is needed.
OWN = 0.2
# A step is a stall if the loop, without its wait for a batch, takes this many times the median.
LONG = 3.0
# Syncs a step from which they set the pace; share of steps from which an idle device is a limit.
OFTEN = 0.5
# Steps with and without an exchange that are needed to compute its time.
LEAST_COMPARED = 10


@final
@dataclass(frozen=True, kw_only=True)
class LoopCosts:
    """Shares of the time of the counted steps."""

    # Steps that have a batch before them in their epoch.
    steps: int
    # Mean of a step, first batches of epochs spread over it.
    step_s: float
    # 99th percentile, without first batches.
    p99_s: float
    stages: tuple[StageTime, ...]
    # wait, low, high: share of waiting for batches, and its 95 % interval.
    wait: float
    low: float
    high: float
    # Extra seconds of an epoch's first batch and end over a usual wait; None: only one epoch began.
    first_s: float | None
    # Share of `first_s`; 0 if the length of an epoch is unknown.
    first: float
    # Share of the extra time of long steps over the median.
    stall: float
    # Number of long steps, and the stage that most of their extra time is in.
    stalls: int
    stalled: str
    # Share of the gradient exchange that backward waits for; None: unknown.
    exchange: float | None
    # Host-device syncs a step.
    syncs: float
    # Share of the time in host-device syncs.
    sync: float
    # drained, starved: share of steps in which the device was idle when a batch was asked for, and when it came; None:
    # unknown.
    drained: float | None
    starved: float | None

    def sum_shares(self, *stages: str) -> float:
        """Returns the share of these stages together."""
        return sum(one.share for one in self.stages if one.stage in stages)


@final
@dataclass(frozen=True)
class LoopVerdict:
    """The limit of a watched loop."""

    # None: unknown.
    kind: LimitKind | None
    # Without the kind, and without a full stop.
    sentence: str
    # Upper bound of the speed-up; None: unknown.
    gain: float | None


def compute_costs(series: StepSeries, starts: Sequence[LoopStart], facts: LoopFacts) -> LoopCosts | None:
    """Computes the costs from all steps but the first ones of epochs; None: there are fewer than LEAST_STEPS."""
    steady = series.select(series.index > 0)
    if len(steady) < LEAST_STEPS:
        return None
    seconds, step = steady.seconds, steady.seconds.sum(1)
    means = seconds.mean(0)
    first_s = _compute_first_batch_s(starts, float(means[WAIT]))
    epoch = facts.batches or _compute_epoch_length(starts)
    # The extra time of an epoch's first batch is spread over the steps of the epoch.
    spread = 0.0 if first_s is None or epoch is None else first_s / epoch
    total = float(means.sum()) + spread
    _, low, high = estimate_share(seconds[:, WAIT], step)
    within = float(means.sum()) / total
    stall, stalls, stalled = _compute_stalls(steady, facts.is_asynchronous)
    spent: list[tuple[str, float]] = [
        (stage, float(mean)) for stage, mean in zip(STAGES, means, strict=True) if mean > 0
    ]
    if spread > 0:
        spent.insert(int(means[WAIT] > 0), ("first batch", spread))
    return LoopCosts(
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
        exchange=_compute_exchange_share(steady, total),
        syncs=float(steady.syncs.mean()),
        sync=float(steady.sync_s.mean()) / total,
        drained=_average_known(steady.idle_at_request),
        starved=_average_known(steady.idle_at_batch),
    )


def judge_loop(costs: LoopCosts, facts: LoopFacts) -> LoopVerdict:
    """Names the limit with the largest gain, or the work itself if nothing can be saved."""
    if facts.elsewhere:
        what = "another thread asks for the batches, so the waiting time of the training thread is not seen"
        return LoopVerdict(None, f"{what}; wrap the iterable of the training loop itself", None)
    limits = [
        *_find_shared_limits(costs),
        *(_find_device_limits(costs) if facts.is_asynchronous else _find_host_limits(costs)),
    ]
    best = max(limits, key=lambda one: one.gain or 0.0, default=None)
    if best is not None:
        return best
    return _judge_device_work(costs) if facts.is_asynchronous else _judge_host_work(costs)


def describe_too_few_steps(steps: int, warm_up: int) -> str:
    """Explains why there is no verdict yet."""
    what = f"{steps} steps were seen after {warm_up} warm-up steps, without the first ones of epochs"
    return f"{what}; {LEAST_STEPS} are needed"


def _find_shared_limits(costs: LoopCosts) -> list[LoopVerdict]:
    out = []
    if costs.wait >= LIMIT and not _are_waits_hidden(costs):
        what = f"the loop waits {format_share(costs.wait)} of its time for batches"
        out.append(_build_verdict("host/IO limited", what, "a batch that cost nothing", costs.wait))
    if costs.first >= LIMIT:
        what = f"the first batches of epochs take {format_share(costs.first)} of the time"
        out.append(_build_verdict("stall limited", what, "epochs that began at once", costs.first))
    if costs.stall >= LIMIT:
        what = f"{costs.stalls} of {costs.steps} steps take more than {LONG:g} times the median, mostly in the stage"
        what = f"{what} {costs.stalled}: {format_share(costs.stall)} of the time"
        out.append(_build_verdict("stall limited", what, "doing without them", costs.stall))
    if costs.exchange is not None and costs.exchange >= LIMIT:
        what = f"backward waits {format_share(costs.exchange)} of the time for the exchange of gradients"
        out.append(_build_verdict("communication limited", what, "an exchange that cost nothing", costs.exchange))
    return out


def _are_waits_hidden(costs: LoopCosts) -> bool:
    """Returns True if the device still had work almost whenever a batch came: then waiting for batches cost nothing."""
    return costs.starved is not None and costs.starved < LIMIT


def _find_host_limits(costs: LoopCosts) -> list[LoopVerdict]:
    own = costs.sum_shares("other") - (costs.stall if costs.stalled == "other" else 0.0)
    if own < OWN:
        return []
    what = f"the loop spends {format_share(own)} of its time in code of its own between the stages"
    return [_build_verdict("host/IO limited", what, "doing without it", own)]


def _find_device_limits(costs: LoopCosts) -> list[LoopVerdict]:
    """Returns limits of an asynchronous device."""
    if costs.syncs >= OFTEN:
        # While the host waits, the device works. Without syncs a step takes the host's own time or the device's,
        # whichever is longer, and the device's is at least the waits.
        saved = min(costs.sync, 1 - costs.sync)
        waits = f"Python waits for the device {costs.syncs:.2g} times a step, {format_share(costs.sync)} of the time"
        if saved >= LIMIT:
            return [_build_verdict("sync limited", waits, "waiting for nothing", saved)]
        if costs.sync < LIMIT:
            what = f"{waits}: the device has finished by then; launching its work takes the rest"
            return [LoopVerdict("launch limited", what, None)] if costs.wait < LIMIT else []
        return []
    if costs.drained is None or costs.drained < OFTEN:
        return []
    handing = costs.sum_shares("forward", "loss", "backward", "optimizer")
    what = f"in {format_share(costs.drained)} of the steps the device was idle when the loop asked for a batch"
    if costs.sum_shares("other") > handing:
        share = costs.sum_shares("other")
        what = f"{what}, and the loop's own code takes {format_share(share)} of the time"
        return [_build_verdict("host/IO limited", what, "doing without it", share)]
    if costs.wait < handing:
        return [LoopVerdict("launch limited", f"{what}: it is faster than the loop launches its work", None)]
    return []


def _judge_device_work(costs: LoopCosts) -> LoopVerdict:
    """Judges an asynchronous device that has no other limit."""
    wait = f"the loop waits {format_share(costs.wait)} of its time for batches"
    if costs.syncs >= OFTEN:
        what = f"Python waits {format_share(costs.sync)} of the time for the device, which works meanwhile"
        return LoopVerdict("device limited", what, None)
    if costs.starved is None:
        what = f"{wait}; without a sync it is unknown whether the device or launching its work limits"
        return LoopVerdict(None, what, None)
    if costs.starved < OFTEN:
        what = f"the device had work left in {format_share(1 - costs.starved)} of the steps when the next batch came"
        return LoopVerdict("device limited", f"{what}; {wait}", None)
    what = f"the device was idle in {format_share(costs.starved)} of the steps when the next batch came"
    return LoopVerdict("host/IO limited", f"{what}; {wait}", None)


def _judge_host_work(costs: LoopCosts) -> LoopVerdict:
    """Judges a CPU loop that has no other limit."""
    work = costs.sum_shares("forward", "loss", "backward", "optimizer")
    what = f"forward, loss, backward and optimizer take {format_share(work)} of the time, waiting for batches"
    return LoopVerdict("device limited", f"{what} {format_share(costs.wait)}", None)


def _build_verdict(kind: LimitKind, what: str, without: str, share: float) -> LoopVerdict:
    gain = 1 / max(1 - share, 1e-3)
    return LoopVerdict(kind, f"{what}; {without} would give at most {gain:.3g} times the samples/s", gain)


def _compute_first_batch_s(starts: Sequence[LoopStart], wait: float) -> float | None:
    """Returns the extra seconds of an epoch's beginning and end over a usual wait. The watch's first epoch counts for
    its end alone, because its beginning includes the start of the process."""
    firsts = [one.first_s for one in starts if one.first_s is not None and not one.is_first_loop]
    ends = [one.end_s for one in starts if one.end_s is not None]
    if not firsts:
        return None
    return max(0.0, float(np.mean(firsts)) - wait) + (float(np.mean(ends)) if ends else 0.0)


def _compute_epoch_length(starts: Sequence[LoopStart]) -> float | None:
    whole = [one.batches for one in starts if one.batches]
    return float(np.mean(whole)) if whole else None


def _compute_stalls(steady: StepSeries, asynchronous: bool) -> tuple[float, int, str]:
    """Returns the extra seconds of long steps over the median, their number, and their main stage.

    Steps that update the weights are compared with each other, and so are the others. On an asynchronous device a long
    step counts only if the device ran out of work: otherwise the host waited for room in its queue.
    """
    own = steady.seconds.sum(1) - steady.seconds[:, WAIT] - steady.sync_s
    over, extra_s, count = np.zeros(len(STAGES)), 0.0, 0
    ran_out = np.append(steady.idle_at_request[1:], np.nan) == 1
    for group in (steady.updates > 0, steady.updates == 0):
        if not group.any():
            continue
        middle = float(np.median(own[group]))
        long = group & (own > LONG * middle)
        if asynchronous:
            long &= ran_out
        extra_s += float((own[long] - middle).sum())
        count += int(long.sum())
        over += np.maximum(steady.seconds[long] - np.median(steady.seconds[group], 0), 0.0).sum(0)
    over[WAIT] = 0.0
    return extra_s, count, STAGES[int(over.argmax())]


def _compute_exchange_share(steady: StepSeries, total: float) -> float | None:
    """Compares steps with and without an exchange, as gradient accumulation makes them."""
    yes, no = steady.has_exchange == 1, steady.has_exchange == 0
    if min(yes.sum(), no.sum()) < LEAST_COMPARED:
        return None
    backward = steady.seconds[:, BACKWARD]
    longer = float(np.median(backward[yes]) - np.median(backward[no]))
    return max(0.0, longer) * float(yes.mean()) / total


def _average_known(flags: FloatArray) -> float | None:
    known = flags[~np.isnan(flags)]
    return float(known.mean()) if len(known) >= LEAST_STEPS else None
