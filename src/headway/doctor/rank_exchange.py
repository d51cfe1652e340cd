"""Measures the work of ranks together: training, summing gradients alone, and training with other buckets and
algorithms.

Every rank calls these functions, and all run the same number of steps: rank 0 decides how many.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from typing import Any, TypeVar, final

import torch

from headway.comm.algorithm_choice import SMALL_TRIAL_ELEMENTS, list_candidates
from headway.comm.comm_recipe import Algorithm, CommRecipe
from headway.core.exchange_waits import EXCHANGES
from headway.core.group import Group
from headway.core.profile import Throughput
from headway.core.statistics import compute_median_interval
from headway.doctor.loop_measurement import build_wait, run_steps
from headway.doctor.measurement_job import format_override
from headway.doctor.rate_measurement import build_window, choose_window_s, is_settled
from headway.launch.ranks import Ranks
from headway.training.trainer import Trainer

T = TypeVar("T")

# Windows of the steps that all ranks run together.
WINDOWS, WINDOW_S = 9, 0.3
# Minimum, whatever the limit.
FEWEST_WINDOWS = 3
# Seconds that `measure_together` takes with short steps.
TOGETHER_S = 4.0
# The same for trials.
SHORT_WINDOWS, SHORT_WINDOW_S = 5, 0.2
# Warm-up steps before the first window; the last two give the time of a step.
SETTLES = 5
# A single small sum may have to wait for a core, so the median of many is taken.
TINY_SUMS = 50
# Factor between the bucket sizes that are tried.
FEW = 4
# Smaller buckets cost one latency each, on any link.
LEAST_BUCKET_BYTES = 10_000
# About the time that ranks need to connect again.
MEET_S = 1.0
# Smaller gains are noise.
GAIN = 1.01


@final
@dataclass(frozen=True)
class JointRate:
    """Rate of all ranks together."""

    # Images/s of all ranks together.
    rate: Throughput
    # Number of timed steps.
    steps: int
    # Seconds of a step that the rank that waits least waits: `reduce`, and each exchange inside of the network.
    waits: Mapping[str, float] = field(default_factory=dict)


@final
@dataclass(frozen=True)
class ExchangeMeasurement:
    """The sums of a step with nothing else running."""

    # Seconds of all sums of a step, and the bytes of its buckets.
    seconds: float
    bytes: int
    # Seconds of the sum of a few bytes.
    latency_s: float
    buckets: int
    # The algorithm of most buckets.
    algorithm: str


@final
@dataclass(frozen=True)
class CommTrial:
    """A change of the communication that was faster."""

    name: str
    override: str
    # Speed-up of steps with ready batches.
    gain: float


def measure_together(
    trainer: Trainer, ranks: Ranks, *, windows: int = WINDOWS, window_s: float = WINDOW_S, limit_s: float = inf
) -> JointRate:
    """Measures images/s of all ranks.

    Args:
        limit_s: fewer windows are timed if they would take longer, but at least FEWEST_WINDOWS.
    """
    wait: Callable[[], object] = build_wait(trainer.setup.device)
    control = ranks.world.control
    trainer.run(SETTLES - 2)
    wait()
    control.barrier()
    begun = perf_counter()
    trainer.run(2)
    wait()
    a_step = (perf_counter() - begun) / 2
    steps = max(1, round(window_s / a_step))
    fit = int(min(windows, limit_s / (steps * a_step)))
    # Rank 0 decides both: ranks that disagree would wait for each other for ever.
    steps, windows = _broadcast_from_rank_0(control, [steps, max(FEWEST_WINDOWS, fit)])
    window = build_window(lambda: run_steps(trainer, steps, wait), least_s=0.0)
    rates, first, before = [], trainer.step, trainer.clock.seconds
    for _ in range(windows):
        control.barrier()
        rates.append(window())
    middle, low, high = compute_median_interval(rates)
    timed = trainer.step - first
    after = trainer.clock.seconds
    mine = {
        stage: (after[stage] - before.get(stage, 0.0)) / timed for stage in (*EXCHANGES, "reduce") if stage in after
    }
    # The others also wait for slower ranks, which is no cost of the exchange.
    waits = [json.loads(text) for text in control.gather_bytes(json.dumps(mine).encode())]
    least = min(waits, key=lambda one: sum(one.values()))
    return JointRate(Throughput(value=middle, low=low, high=high, windows=windows), timed, least)


def measure_exchange(trainer: Trainer, ranks: Ranks, *, limit_s: float) -> ExchangeMeasurement:
    """Measures the run's own sums of its own buckets until the time is known to 3 %; the weights do not change.

    Call it after a step: the parameters without gradient and the order of the others are known then.
    """
    wait: Callable[[], object] = build_wait(trainer.setup.device)
    control, world = ranks.world.control, ranks.world
    nothing = torch.zeros((), device=world.device)

    def time_sums(count: int) -> float:
        wait()
        control.barrier()
        begun = perf_counter()
        for _ in range(count):
            ranks.prepare_for_backward(1 / world.size)
            ranks.finish(nothing, bad=0, stopping=False)
        wait()
        return (perf_counter() - begun) / count

    # The first two sums are a warm-up and give the number of sums in a window.
    count = _broadcast_from_rank_0(control, max(1, round(choose_window_s() / time_sums(2))))
    seconds, since = list[float](), perf_counter()
    while True:
        seconds.append(time_sums(count))
        late = len(seconds) >= 3 and perf_counter() - since >= limit_s
        if _broadcast_from_rank_0(control, is_settled(seconds) or late):
            break
    trainer.setup.model.zero_grad(set_to_none=True)
    buckets = ranks.reducer.buckets
    algorithm = Counter(ranks.reducer.algorithms).most_common(1)[0][0]
    latency = _measure_latency(ranks, algorithm, wait)
    return ExchangeMeasurement(
        statistics.median(seconds), sum(one.nbytes for one in buckets), latency, len(buckets), algorithm
    )


def _measure_latency(ranks: Ranks, algorithm: Algorithm, wait: Callable[[], object]) -> float:
    few, taken = torch.zeros(SMALL_TRIAL_ELEMENTS, device=ranks.world.device), []
    for _ in range(TINY_SUMS):
        begun = perf_counter()
        ranks.communicator.all_reduce(few, algorithm=algorithm, tag="a few bytes").wait()
        wait()
        taken.append(perf_counter() - begun)
    return statistics.median(taken)


def try_alternatives(
    trainer: Trainer, ranks: Ranks, options: CommRecipe, now: JointRate, *, limit_s: float
) -> tuple[list[CommTrial], list[str]]:
    """Tries other buckets and algorithms in steps of the run itself; gains below `GAIN` are left out.

    The sums differ by rounding alone, as the wire format of the gradients stays. The gain is over the faster of the
    measurements before and afterwards, and counts only if the intervals are apart from the medians.

    Args:
        options: of the recipe; restored afterwards. now: the rate with them.
        limit_s: no trial begins that would end later.

    Returns:
        faster changes; and overrides for which no time was left.
    """
    begun = perf_counter()
    a_step = trainer.setup.plan.get_batch_size(trainer.position) / now.rate.value
    one_s = SETTLES * a_step + SHORT_WINDOWS * max(SHORT_WINDOW_S, a_step) + MEET_S
    trials, laid = list[tuple[dict[str, Any], Throughput]](), {_read_bucket_sizes(ranks)}
    changes = _broadcast_from_rank_0(ranks.world.control, list_alternatives(ranks, options))
    while changes:
        since = perf_counter()
        if not _broadcast_from_rank_0(ranks.world.control, since - begun + 2 * one_s <= limit_s):
            # There must be time for this trial and for the recipe's own options once more.
            break
        change = changes.pop(0)
        _meet_with(trainer, ranks, options.model_copy(update=change))
        if "bucket_mb" in change and _read_bucket_sizes(ranks) in laid:
            # A large parameter has its own bucket, so another size may give the same buckets.
            continue
        laid.add(_read_bucket_sizes(ranks))
        trials.append((change, measure_together(trainer, ranks, windows=SHORT_WINDOWS, window_s=SHORT_WINDOW_S).rate))
        one_s = perf_counter() - since
    late = [_format_change(change) for change in changes]
    _meet_with(trainer, ranks, options)
    if not trials:
        return [], late
    again = measure_together(trainer, ranks, windows=SHORT_WINDOWS, window_s=SHORT_WINDOW_S).rate
    return select_faster(trials, max(now.rate, again, key=lambda one: one.value)), late


def list_alternatives(ranks: Ranks, options: CommRecipe) -> list[dict[str, Any]]:
    """Returns other values for the recipe's `comm`: two bucket sizes, and each algorithm that differs on this world."""
    buckets = [one.nbytes for one in ranks.reducer.buckets]
    whole, size = sum(buckets), ranks.reducer.bucket_bytes
    sizes: list[float] = [size * FEW] if size < whole else []
    smaller = min(size, whole) / FEW
    sizes += [smaller, smaller / FEW][: 2 - len(sizes)]
    changes: list[dict[str, Any]] = [
        {"bucket_mb": float(f"{one / 1e6:.3g}")} for one in sizes if one >= LEAST_BUCKET_BYTES
    ]
    used = set(ranks.reducer.algorithms)
    return changes + [{"algorithm": one} for one in list_candidates(ranks.communicator) if {one} != used]


def select_faster(trials: Sequence[tuple[dict[str, Any], Throughput]], now: Throughput) -> list[CommTrial]:
    """Returns the changes that are faster than the run now, beyond the noise."""
    return [
        CommTrial(_name_change(change), _format_change(change), rate.value / now.value)
        for change, rate in trials
        if rate.value >= GAIN * now.value and rate.low > now.value and rate.value > now.high
    ]


def _name_change(change: Mapping[str, Any]) -> str:
    if "bucket_mb" in change:
        return f"gradients in buckets of {change['bucket_mb']:g} MB"
    return f"gradients summed by {change['algorithm']}"


def _format_change(change: Mapping[str, Any]) -> str:
    return format_override({f"comm__{key}": value for key, value in change.items()})


def _read_bucket_sizes(ranks: Ranks) -> tuple[int, ...]:
    return tuple(one.nbytes for one in ranks.reducer.buckets)


def _meet_with(trainer: Trainer, ranks: Ranks, options: CommRecipe) -> None:
    """Connects the ranks again with these options."""
    ranks.options = options
    trainer.recovery.meet()


def _broadcast_from_rank_0(control: Group, mine: T) -> T:
    """Returns rank 0's value on all ranks."""
    value: T = json.loads(control.broadcast_bytes(json.dumps(mine).encode()))
    return value
