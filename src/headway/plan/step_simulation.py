"""Steps of a run, rank by rank and bucket by bucket: what cannot be run here, and what closed forms leave out.

Each rank waits for its batch, computes forward, then backward, in which its buckets become full one after the other; a
bucket's exchange begins when all ranks that take part have it and the bucket before it is through; the step ends with
the last one. Ranks differ by chance, some by more; a loader may give batches late, and its ring of batches absorbs some
of that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from headway.core import collectives
from headway.core.collectives import Algorithm, Network
from headway.core.errors import UsageError
from headway.core.files import write_whole
from headway.plan.cluster import Cluster
from headway.plan.job import TrainingJob
from headway.plan.prediction import Prediction, choose_job_buckets, estimate_halo_s
from headway.plan.step import BACKWARD_SHARE, GPU_ALGORITHMS, ComputeTime, GradientBucket

Seconds = npt.NDArray[np.float64]
_StepSpan = tuple[Seconds, Seconds, Seconds, list[tuple[float, float]]]
"""Of a step: when each rank has its batch, has computed, and is done; and (begin, end) of each bucket."""
TRACED_RANKS = 8
"""Ranks of a trace: the slowest."""
MAX_RANKS = 2**17
"""Of a plan's: 50 steps of so many keep some 160 MB."""


@final
@dataclass(frozen=True, kw_only=True)
class StepScenario:
    """What is simulated. Attributes:
    samples: of a rank in a step.
    jitter: standard deviation of a rank's computing over its mean, anew in each step.
    slow: rank -> by how much its computing is longer, always.
    hiccup: (probability in a step of a rank, seconds that it stands still).
    input_s: seconds in which a rank's loader makes a batch; 0: there always is one.
    input_jitter: standard deviation of it over its mean.
    prefetch_batches: batches that a loader makes before they are wanted.
    accumulate: micro-batches of a step. backward, overlap, wire_ratio: as of `headway.plan.step.predict_step`.
    """

    network: Network
    compute: ComputeTime
    samples: float
    buckets: Sequence[GradientBucket]
    steps: int = 50
    jitter: float = 0.0
    slow: Mapping[int, float] = field(default_factory=dict)
    hiccup: tuple[float, float] = (0.0, 0.0)
    input_s: float = 0.0
    input_jitter: float = 0.0
    prefetch_batches: int = 2
    among: Sequence[Algorithm] = GPU_ALGORITHMS
    accumulate: int = 1
    backward: float = BACKWARD_SHARE
    overlap: bool = True
    wire_ratio: float = 1.0
    seed: int = 0


@final
@dataclass(frozen=True)
class SimulatedSteps:
    """Attributes:
    seconds: of each step.
    input_wait_s: of it, until the last batch was there. computing_s: of the mean rank. slowest_s: more, of the slowest one.
    exposed_s: of the exchange, after that.
    last: rank -> steps in which it was the one that others waited for.
    events: of the slowest ranks, as a trace has them.
    """

    seconds: Seconds
    input_wait_s: Seconds
    computing_s: Seconds
    slowest_s: Seconds
    exposed_s: Seconds
    slowest_counts: dict[int, int]
    events: list[dict[str, Any]]

    @property
    def step_s(self) -> float:
        """In the mean; the first steps, whose batches lie there, are left out where there are enough."""
        return float(self.seconds[min(len(self.seconds) // 5, 10) :].mean())

    def write_trace(self, path: Path) -> None:
        """As a trace for Perfetto or chrome://tracing: a process for each rank, a row for its computing, one for its
        input and one for the exchange."""
        write_whole(path, json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}) + "\n")


def simulate_steps(scenario: StepScenario) -> SimulatedSteps:
    """Raises UsageError: a number is out of range."""
    _check_ranges(scenario)
    ranks, random = scenario.network.ranks, np.random.default_rng(scenario.seed)
    costs = [_find_cost(bucket.nbytes, scenario) for bucket in scenario.buckets] if ranks > 1 else []
    fixed = scenario.accumulate * scenario.compute.fixed_s
    sampled = scenario.accumulate * scenario.compute.sample_s * scenario.samples
    spread = scenario.jitter / scenario.accumulate**0.5  # of several micro-batches together
    slow = np.ones(ranks)
    for rank, more in scenario.slow.items():
        slow[rank] += more
    end = np.zeros(ranks)
    made = np.zeros((scenario.prefetch_batches, ranks))  # when the batch in each place of a rank's ring was taken
    begun = np.zeros(ranks)
    parts: dict[str, list[float]] = {name: [] for name in ("seconds", "waits", "computing", "slowest", "exposed")}
    last = dict[int, int]()
    spans = list[_StepSpan]()
    behind = np.zeros(ranks)
    for number in range(scenario.steps):
        before = float(end.max())
        there = end
        if scenario.input_s:
            taken = scenario.input_s * np.maximum(0.0, 1 + scenario.input_jitter * random.standard_normal(ranks))
            place = number % scenario.prefetch_batches
            begun = np.maximum(begun, made[place]) + taken  # a place is filled anew once its batch was taken
            there = np.maximum(end, begun)
            made[place] = there
        factor = slow * np.maximum(0.1, 1 + spread * random.standard_normal(ranks))
        computing = fixed + sampled * factor
        if scenario.hiccup[0]:
            computing = computing + scenario.hiccup[1] * (random.random(ranks) < scenario.hiccup[0])
        over = there + computing
        exchanges, through = _simulate_exchange(scenario, there, computing, costs)
        end = np.maximum(over, through)
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
    traced = np.argsort(-behind, kind="stable")[:TRACED_RANKS].tolist()
    found = {name: np.array(values) for name, values in parts.items()}
    return SimulatedSteps(
        found["seconds"], found["waits"], found["computing"], found["slowest"], found["exposed"], last,
        _build_trace(traced, spans, 1 - scenario.backward / scenario.accumulate),
    )  # fmt: skip


def _check_ranges(scenario: StepScenario) -> None:
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
            raise UsageError(f"{getattr(scenario, name)} is out of range", where=name)


def _find_cost(nbytes: float, scenario: StepScenario) -> tuple[float, float, float]:
    """Seconds inside the host, between hosts and inside again, of the cheapest algorithm."""
    ratio = scenario.wire_ratio
    algorithm = collectives.choose(nbytes, scenario.network, scenario.among, wire_ratio=ratio).algorithm
    return collectives.phases(algorithm, nbytes, scenario.network, wire_ratio=ratio)


def _simulate_exchange(
    scenario: StepScenario, there: Seconds, computing: Seconds, costs: Sequence[tuple[float, float, float]]
) -> tuple[list[tuple[float, float]], float]:
    """((begin, end) of each bucket, when the last is through)."""
    if not costs:
        return [], 0.0
    meanwhile = scenario.backward / scenario.accumulate if scenario.overlap else 0.0
    backward, hosts = meanwhile * computing, scenario.network.hosts
    starts, done, found = there + computing - backward, 0.0, list[tuple[float, float]]()
    for bucket, (down, across, up) in zip(scenario.buckets, costs, strict=True):
        full = (starts + bucket.ready * backward).reshape(hosts, -1).max(axis=1)  # a host goes on by itself inside
        begins = float((np.maximum(full, done) + down).max())
        found.append((max(done, float(full.min())), begins + across + up))
        done = begins + across + up
    return found, done


def _build_trace(ranks: Sequence[int], spans: Sequence[_StepSpan], forward: float) -> list[dict[str, Any]]:
    found = list[dict[str, Any]]()

    def add(name: str, rank: int, row: str, begins: float, ends: float) -> None:
        if ends > begins:
            times = {"ts": round(begins * 1e6, 3), "dur": round((ends - begins) * 1e6, 3)}
            found.append({"name": name, "ph": "X", "pid": rank, "tid": row, "cat": "simulated", **times})

    for rank in ranks:
        found.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
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
    return found


def simulate_prediction(
    job: TrainingJob, cluster: Cluster, answer: Prediction, *, steps: int = 50, seed: int = 0
) -> SimulatedSteps:
    """The steps of a plan. Raises UsageError: of too many devices."""
    if answer.devices > MAX_RANKS:
        raise UsageError(f"ranks are simulated one by one up to {MAX_RANKS:,}, not {answer.devices:,}", where="--trace")
    network = cluster.build_network(answer.nodes, spread=job.spread)
    each = job.find_largest_share(answer.devices)
    known, compute, backward = answer.input_images_s < float("inf"), job.compute, job.backward
    if answer.strips > 1:  # what strips tell each other takes time, and hides nothing
        longer = replace(compute, fixed_s=compute.fixed_s + estimate_halo_s(job, cluster, each * answer.strips))
        backward *= compute.seconds(each) / longer.seconds(each)
        compute = longer
    return simulate_steps(
        StepScenario(
            network=network,
            compute=compute,
            samples=each,
            buckets=choose_job_buckets(job, cluster, network, each),
            steps=steps,
            jitter=cluster.jitter,
            input_s=answer.batch / answer.input_images_s if known else 0.0,
            among=cluster.algorithms,
            accumulate=job.accumulate,
            backward=backward,
            overlap=cluster.overlap,
            wire_ratio=job.wire_ratio,
            seed=seed,
        )
    )
