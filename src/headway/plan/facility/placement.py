"""Placement of jobs on pods with the least traffic between pods.

A job on k pods runs a ring over them: each pod sends 2 (k - 1) / k times the gradients' bytes per step, so that all
together send 2 (k - 1) times these bytes. The sum of that over all jobs is minimised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from typing import Any, final

from headway.core.errors import UsageError

# Most jobs for which the exact search runs.
MAX_EXACT_JOBS = 8
# Fillings of a pod that the exact search tries before it gives up.
MAX_TRIES = 300_000


@final
@dataclass(frozen=True)
class PlacedJob:
    """One of several jobs in a facility."""

    nodes: int
    # Gradients that its ranks all-reduce per step.
    gradient_bytes: float


@final
@dataclass(frozen=True)
class Placement:
    """Nodes of each job on each pod."""

    jobs: tuple[PlacedJob, ...]
    pods: tuple[int, ...]
    # A row per job: its nodes on each pod.
    parts: tuple[tuple[int, ...], ...]
    # True if no placement has less traffic; False if the greedy search found it.
    exact: bool

    def count_bytes_between(self, job: int) -> float:
        """Counts the bytes that leave pods in one step of a job."""
        return 2 * (sum(part > 0 for part in self.parts[job]) - 1) * self.jobs[job].gradient_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes that leave pods in one step of every job."""
        return sum(map(self.count_bytes_between, range(len(self.jobs))))

    def to_json(self) -> dict[str, Any]:
        """Returns the placement as plain values for JSON."""
        return {**asdict(self), "bytes_between": [self.count_bytes_between(job) for job in range(len(self.jobs))]}


def parse_jobs(text: str, gradient_bytes: float) -> list[PlacedJob]:
    """Parses `NODES,NODES:MB,...`.

    Args:
        gradient_bytes: gradients of a job that does not give them.

    Raises UsageError if a part has another form.
    """
    jobs = []
    for part in text.split(","):
        nodes, _, megabytes = part.strip().partition(":")
        try:
            jobs.append(PlacedJob(int(nodes), float(megabytes) * 1e6 if megabytes else gradient_bytes))
        except ValueError:
            fix = "Write nodes, and megabytes of gradients if you know them: 30,12:400,8."
            raise UsageError(f"{part.strip()!r} is not a job", where="--jobs", fix=fix) from None
    return jobs


def place_jobs(jobs: Sequence[PlacedJob], pods: Sequence[int]) -> Placement:
    """Places jobs on pods.

    Args:
        pods: free nodes of each pod.

    Raises UsageError if a job needs no node, or there are fewer nodes than the jobs need.
    """
    for job in jobs:
        if job.nodes < 1 or not 0 <= job.gradient_bytes < float("inf"):
            problem = f"a job has 1 node or more and gradients of 0 bytes or more, not {job.nodes} nodes"
            problem += f" and {job.gradient_bytes:g} bytes"
            raise UsageError(problem, where="--jobs", fix="Write nodes, and megabytes of gradients: 30,12:400,8.")
    wanted, there = sum(job.nodes for job in jobs), sum(pods)
    if wanted > there:
        fix = "Plan fewer or smaller jobs, or a larger facility."
        raise UsageError(f"the jobs need {wanted:,} nodes, and there are {there:,}", where="--jobs", fix=fix)
    parts = _place_exactly(jobs, pods) if len(jobs) <= MAX_EXACT_JOBS else None
    return Placement(tuple(jobs), tuple(pods), tuple(parts or _place_greedily(jobs, pods)), parts is not None)


JobParts = list[tuple[int, ...]]


class _TooManyError(Exception):
    """The exact search exceeded `MAX_TRIES`."""


def _place_exactly(jobs: Sequence[PlacedJob], pods: Sequence[int]) -> JobParts | None:
    """Finds the placement with the least traffic: closes one pod after the other. None: it takes too many tries.

    A pod is filled with jobs that end in it, and with at most one job that continues elsewhere and takes all nodes
    left. That suffices. Join each job to its pods: this graph needs no cycle, since nodes can be moved around a cycle
    until one of its parts is empty. So some pod is joined to at most one job that continues; more nodes of that job on
    this pod are never worse; and the same argument holds for the remaining pods.
    """
    tried = 0

    @cache
    def find_least(left: tuple[int, ...], free: tuple[int, ...]) -> tuple[float, tuple[int, tuple[int, ...]] | None]:
        """Returns (cost, (size of the pod to close, nodes of each job on it)) for the remaining jobs and pods."""
        nonlocal tried
        if not any(left):
            return 0.0, None
        if sum(left) > sum(free):
            return float("inf"), None
        best: tuple[float, tuple[int, tuple[int, ...]] | None] = (float("inf"), None)
        # Pods with equally many free nodes are interchangeable: one of each size is tried.
        for size in sorted(set(free), reverse=True):
            others = list(free)
            others.remove(size)
            for here, going_on in _list_fillings(left, size):
                tried += 1
                if tried > MAX_TRIES:
                    raise _TooManyError
                cost = 0.0 if going_on is None else jobs[going_on].gradient_bytes
                # Branch and bound: the rest cannot make up for it.
                if cost >= best[0]:
                    continue
                rest = tuple(nodes - part for nodes, part in zip(left, here, strict=True))
                cost += find_least(rest, tuple(others))[0]
                if cost < best[0]:
                    best = cost, (size, here)
        return best

    try:
        # Follow the decisions from the start. The cache holds every state on the way.
        left, free = tuple(job.nodes for job in jobs), tuple(sorted(pods))
        columns = dict[int, tuple[int, ...]]()
        while (parts := find_least(left, free)[1]) is not None:
            size, here = parts
            pod = next(at for at, nodes in enumerate(pods) if nodes == size and at not in columns)
            columns[pod] = here
            left = tuple(nodes - part for nodes, part in zip(left, here, strict=True))
            others = list(free)
            others.remove(size)
            free = tuple(others)
    except _TooManyError:
        return None
    none = (0,) * len(jobs)
    return [tuple(columns.get(pod, none)[job] for pod in range(len(pods))) for job in range(len(jobs))]


def _list_fillings(left: tuple[int, ...], size: int) -> Iterator[tuple[tuple[int, ...], int | None]]:
    """Lists the fillings of a pod, the fullest first, as (nodes of each job, job that continues elsewhere)."""
    open_jobs = [job for job, nodes in enumerate(left) if nodes]
    for count in range(len(open_jobs), -1, -1):
        for ending in combinations(open_jobs, count):
            room = size - sum(left[job] for job in ending)
            if room < 0:
                continue
            here = [left[job] if job in ending else 0 for job in range(len(left))]
            if ending:
                yield tuple(here), None
            for job in open_jobs if room else ():
                if job not in ending and left[job] > room:
                    yield tuple(room if one == job else part for one, part in enumerate(here)), job


def _place_greedily(jobs: Sequence[PlacedJob], pods: Sequence[int]) -> JobParts:
    """Places the largest job first: on the pod that it fills best, or spread over the emptiest pods."""
    free, parts = list(pods), [[0] * len(pods) for _ in jobs]
    for number in sorted(range(len(jobs)), key=lambda job: -jobs[job].nodes):
        nodes = jobs[number].nodes
        while nodes:
            fits = [pod for pod, room in enumerate(free) if room >= nodes]
            pod = min(fits, key=lambda at: free[at]) if fits else max(range(len(free)), key=lambda at: free[at])
            part = min(nodes, free[pod])
            parts[number][pod] += part
            free[pod] -= part
            nodes -= part
    return [tuple(row) for row in parts]
