"""Simulation of a run's steps, rank by rank and bucket by bucket, for effects that the closed forms leave out.

Each rank waits for its batch and computes forward, then backward, during which its buckets fill one after the other.
The exchange of a bucket begins when all ranks have it and the bucket before is done. The step ends with the last one.
Ranks differ by chance, some of them always; a loader may be late, and its prefetched batches absorb some of that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from headway.core import collectives
from headway.core.collectives import Algorithm, Network
from headway.core.errors import UsageError
from headway.core.files import write_atomically
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, choose_job_buckets, estimate_strips_s, get_algorithms, get_losses
from headway.plan.step import BACKWARD_SHARE, GPU_ALGORITHMS, ComputeTime, PlannedBucket

Seconds = npt.NDArray[np.float64]
# One step: for each rank, when it has its batch, has computed and is done; and (begin, end) of each bucket.
_StepSpan = tuple[Seconds, Seconds, Seconds, list[tuple[float, float]]]
# Ranks in a trace: the slowest ones.
TRACED_RANKS = 8
# Most ranks of a simulated plan: 50 steps of so many take some 160 MB.
MAX_RANKS = 2**17


@final
@dataclass(frozen=True, kw_only=True)
class StepScenario:
    """Simulated conditions."""

    network: Network
    compute: ComputeTime
    # Micro-batch of a rank.
    samples: float
    buckets: Sequence[PlannedBucket]
    steps: int = 50
    # Standard deviation of a rank's compute time over its mean, drawn anew for each step.
    jitter: float = 0.0
    # For each slow rank, the relative increase of its compute time in all steps.
    slow: Mapping[int, float] = field(default_factory=dict)
    # (probability per step and rank, seconds for which the rank stops).
    hiccup: tuple[float, float] = (0.0, 0.0)
    # Seconds in which a rank's loader makes a batch; 0: a batch is always ready.
    input_s: float = 0.0
    # Standard deviation of `input_s` over its mean.
    input_jitter: float = 0.0
    # Batches that a loader makes ahead.
    prefetch_batches: int = 2
    among: Sequence[Algorithm] = GPU_ALGORITHMS
    accumulate: int = 1
    # The rest as in `predict_step`.
    backward: float = BACKWARD_SHARE
    hidden: float = 1.0
    wire_ratio: float = 1.0
    seed: int = 0


@final
@dataclass(frozen=True)
class SimulatedSteps:
    """Times of the simulated steps, in seconds."""

    seconds: Seconds
    # Part of it until the last rank has its batch.
    input_wait_s: Seconds
    # Mean compute time of the ranks.
    computing_s: Seconds
    # Additional compute time of the slowest rank.
    slowest_s: Seconds
    # Exchange after the slowest rank has computed.
    exposed_s: Seconds
    # For each rank, the steps in which the others waited for it.
    slowest_counts: dict[int, int]
    # Trace of the slowest ranks.
    events: list[dict[str, Any]]

    @property
    def step_s(self) -> float:
        """Mean length of a step, without the first fifth (at most 10), whose batches were prefetched."""
        return float(self.seconds[min(len(self.seconds) // 5, 10) :].mean())

    def write_trace(self, path: Path) -> None:
        """Writes a trace for Perfetto or chrome://tracing: a process per rank, with rows for compute, input and
        exchange."""
        write_atomically(path, json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}) + "\n")


def simulate_steps(scenario: StepScenario) -> SimulatedSteps:
    """Simulates the steps of a scenario. Raises UsageError if a number of it is out of range."""
    _check_ranges(scenario)
    ranks, random = scenario.network.ranks, np.random.default_rng(scenario.seed)
    costs = [_find_cost(bucket.nbytes, scenario) for bucket in scenario.buckets] if ranks > 1 else []
    fixed = scenario.accumulate * scenario.compute.fixed_s
    sampled = scenario.accumulate * scenario.compute.sample_s * scenario.samples
    # Variations of independent micro-batches average out.
    spread = scenario.jitter / scenario.accumulate**0.5
    slow = np.ones(ranks)
    for rank, more in scenario.slow.items():
        slow[rank] += more
    end = np.zeros(ranks)
    # Time at which the batch in each place of a rank's prefetch ring was last taken.
    taken_at = np.zeros((scenario.prefetch_batches, ranks))
    begun = np.zeros(ranks)
    parts: dict[str, list[float]] = {name: [] for name in ("seconds", "waits", "computing", "slowest", "exposed")}
    last = dict[int, int]()
    spans = list[_StepSpan]()
    behind = np.zeros(ranks)
    for number in range(scenario.steps):
        before = float(end.max())
        there = end
        if scenario.input_s:
            making = scenario.input_s * np.maximum(0.0, 1 + scenario.input_jitter * random.standard_normal(ranks))
            place = number % scenario.prefetch_batches
            # A loader makes one batch at a time, and fills a place once its batch was taken.
            begun = np.maximum(begun, taken_at[place]) + making
            there = np.maximum(end, begun)
            taken_at[place] = there
        # A rank is never more than ten times as fast as its mean, however large the jitter.
        factor = slow * np.maximum(0.1, 1 + spread * random.standard_normal(ranks))
        computing = fixed + sampled * factor
        if scenario.hiccup[0]:
            computing = computing + scenario.hiccup[1] * (random.random(ranks) < scenario.hiccup[0])
        over = there + computing
        exchanges, through = _simulate_exchange(scenario, there, computing, costs)
        # Of the exchange, the hidden share overlaps; the rest follows the slowest rank.
        exposed = max(0.0, through - float(over.max()))
        exposed = scenario.hidden * exposed + (1 - scenario.hidden) * sum(sum(parts) for parts in costs)
        end = np.maximum(over, float(over.max()) + exposed) if costs else over
        behind += computing
        slowest = int(over.argmax())
        last[slowest] = last.get(slowest, 0) + 1
        waited = float(there.max()) - before
        parts["seconds"].append(float(end.max()) - before)
        parts["waits"].append(waited)
        parts["computing"].append(float(computing.mean()))
        parts["slowest"].append(float(over.max()) - before - waited - float(computing.mean()))
        parts["exposed"].append(float(end.max()) - float(over.max()))
        spans.append((there, over, end, exchanges))
    # The trace shows the ranks with the most compute time of the whole run.
    traced = np.argsort(-behind, kind="stable")[:TRACED_RANKS].tolist()
    arrays = {name: np.array(values) for name, values in parts.items()}
    return SimulatedSteps(
        arrays["seconds"], arrays["waits"], arrays["computing"], arrays["slowest"], arrays["exposed"], last,
        _build_trace(traced, spans, 1 - scenario.backward / scenario.accumulate),
    )  # fmt: skip


def _check_ranges(scenario: StepScenario) -> None:
    """Raises UsageError if a number of the scenario is out of range."""
    chance, stands = scenario.hiccup
    wrong = {
        "samples": scenario.samples <= 0,
        "steps": scenario.steps < 1,
        "prefetch_batches": scenario.prefetch_batches < 1,
        "accumulate": scenario.accumulate < 1,
        "jitter": not 0 <= scenario.jitter < 1,
        "hiccup": not (0 <= chance <= 1 and stands >= 0),
        "input_s": scenario.input_s < 0 or not 0 <= scenario.input_jitter < 1,
        "slow": any(not 0 <= rank < scenario.network.ranks or more < 0 for rank, more in scenario.slow.items()),
    }
    for name, bad in wrong.items():
        if bad:
            raise UsageError(f"the value {getattr(scenario, name)} is out of range", where=name)


def _find_cost(nbytes: float, scenario: StepScenario) -> tuple[float, float, float]:
    """Returns the seconds (inside the host, between hosts, inside again) of the cheapest algorithm."""
    ratio = scenario.wire_ratio
    _, algorithm = collectives.choose_algorithm(nbytes, scenario.network, scenario.among, wire_ratio=ratio)
    return collectives.predict_phases(algorithm, nbytes, scenario.network, wire_ratio=ratio)


def _simulate_exchange(
    scenario: StepScenario, there: Seconds, computing: Seconds, costs: Sequence[tuple[float, float, float]]
) -> tuple[list[tuple[float, float]], float]:
    """Simulates the exchange of one step. Returns ((begin, end) of each bucket, end of the last one)."""
    if not costs:
        return [], 0.0
    backward, hosts = scenario.backward / scenario.accumulate * computing, scenario.network.hosts
    starts, done, spans = there + computing - backward, 0.0, list[tuple[float, float]]()
    for bucket, (down, across, up) in zip(scenario.buckets, costs, strict=True):
        # Each host reduces on its own as soon as its ranks have the bucket; between hosts all wait for the last one.
        full = (starts + bucket.ready * backward).reshape(hosts, -1).max(axis=1)
        begins = float((np.maximum(full, done) + down).max())
        spans.append((max(done, float(full.min())), begins + across + up))
        done = begins + across + up
    return spans, done


def _build_trace(ranks: Sequence[int], spans: Sequence[_StepSpan], forward: float) -> list[dict[str, Any]]:
    """Builds the trace events of these ranks."""
    events = list[dict[str, Any]]()

    def add(name: str, rank: int, row: str, begins: float, ends: float) -> None:
        if ends > begins:
            times = {"ts": round(begins * 1e6, 3), "dur": round((ends - begins) * 1e6, 3)}
            events.append({"name": name, "ph": "X", "pid": rank, "tid": row, "cat": "simulated", **times})

    for rank in ranks:
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        free = 0.0
        for number, (there, over, end, exchanges) in enumerate(spans):
            add("wait for a batch", rank, "input", free, float(there[rank]))
            forward_ends = float(there[rank] + forward * (over[rank] - there[rank]))
            add("forward", rank, "compute", float(there[rank]), forward_ends)
            add("backward", rank, "compute", forward_ends, float(over[rank]))
            for at, (begins, ends) in enumerate(exchanges):
                add(f"bucket {at}", rank, "exchange", begins, ends)
            add(f"step {number}: waits for others", rank, "compute", float(over[rank]), float(end[rank]))
            free = float(end[rank])
    return events


def simulate_prediction(
    job: TrainingJob, cluster: Cluster, prediction: Prediction, *, steps: int = 50, seed: int = 0
) -> SimulatedSteps:
    """Simulates the steps of a predicted run. Raises UsageError if it has too many devices."""
    if prediction.devices > MAX_RANKS:
        problem = f"a simulation covers up to {MAX_RANKS:,} ranks, not {prediction.devices:,}"
        raise UsageError(problem, where="--trace", fix="Plan fewer nodes.")
    losses = get_losses(job, cluster)
    network = cluster.build_network(prediction.nodes, spread=job.spread)
    each = job.find_largest_share(prediction.devices)
    known, compute, backward = prediction.input_images_s < float("inf"), job.compute, job.backward
    # The halo exchange between strips takes time in every micro-batch, during which no bucket fills, and so do the
    # optimizer's products once a step.
    waits_s = estimate_strips_s(job, cluster, each, prediction.strips)
    waits_s += compute.update_s / job.count_micro_batches(prediction.devices)
    if waits_s:
        longer = replace(compute, fixed_s=compute.fixed_s + waits_s)
        backward *= compute.seconds(each) / longer.seconds(each)
        compute = longer
    # Contention slows all of the compute time.
    crowded = 1 + losses.contention * math.log2(network.ranks_per_host)
    slower = ComputeTime(compute.fixed_s * crowded, compute.sample_s * crowded)
    scenario = StepScenario(
        network=losses.slow_links(network), compute=slower, samples=each,
        buckets=choose_job_buckets(job, cluster, network, each), steps=steps, jitter=losses.jitter / crowded,
        among=get_algorithms(job, cluster), accumulate=job.count_micro_batches(prediction.devices), backward=backward,
        input_s=prediction.batch / prediction.input_images_s if known else 0.0, hidden=losses.hidden,
        wire_ratio=job.wire_ratio, seed=seed,
    )  # fmt: skip
    return simulate_steps(scenario)
