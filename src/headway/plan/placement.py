"""Where jobs go: on which pods, so that least crosses from pod to pod.

A job on k pods sums its gradients around them: each of the k sends 2 (k - 1) / k times the gradients' bytes in a step,
so that 2 (k - 1) times these leave pods. What is to be least is the sum of that over the jobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from typing import Any, final

from headway.core.errors import UsageError

MAX_EXACT_JOBS = 8
"""Up to so many jobs, all ways are weighed."""
MAX_TRIES = 300_000
"""Of them, after which the search is given up."""


@final
@dataclass(frozen=True)
class PlacedJob:
    """A job among others. Attributes: nodes: that it wants. gradient_bytes: that its ranks sum up in a step."""

    nodes: int
    gradient_bytes: float


@final
@dataclass(frozen=True)
class Placement:
    """Attributes: parts: nodes of each job on each pod. exact: nothing crosses less; else it is a good one."""

    jobs: tuple[PlacedJob, ...]
    pods: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    exact: bool

    def count_bytes_between(self, job: int) -> float:
        """That leave pods in one of its steps."""
        return 2 * (sum(part > 0 for part in self.parts[job]) - 1) * self.jobs[job].gradient_bytes

    @property
    def total_bytes(self) -> float:
        """In one step of each job."""
        return sum(map(self.count_bytes_between, range(len(self.jobs))))

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {**asdict(self), "bytes_between": [self.count_bytes_between(job) for job in range(len(self.jobs))]}


def parse_jobs(text: str, gradient_bytes: float) -> list[PlacedJob]:
    """Of `NODES,NODES:MB,...`. Args: gradient_bytes: of a job that does not say it. Raises UsageError."""
    found = []
    for part in text.split(","):
        nodes, _, megabytes = part.strip().partition(":")
        try:
            found.append(PlacedJob(int(nodes), float(megabytes) * 1e6 if megabytes else gradient_bytes))
        except ValueError:
            fix = "Write nodes, and megabytes of gradients if you know them: 30,12:400,8."
            raise UsageError(f"{part.strip()!r} is no job", where="--jobs", fix=fix) from None
    return found


def place_jobs(jobs: Sequence[PlacedJob], pods: Sequence[int]) -> Placement:
    """Args: pods: free nodes of each. Raises UsageError: a job wants no node, or there are not enough of them."""
    for job in jobs:
        if job.nodes < 1 or not 0 <= job.gradient_bytes < float("inf"):
            what = (
                f"a job wants 1 node or more and has some gradients, not {job.nodes} and {job.gradient_bytes:g} bytes"
            )
            raise UsageError(what, where="--jobs", fix="Write nodes, and megabytes of gradients: 30,12:400,8.")
    wanted, there = sum(job.nodes for job in jobs), sum(pods)
    if wanted > there:
        raise UsageError(f"the jobs want {wanted:,} nodes, and {there:,} are there", where="--jobs")
    parts = _place_exactly(jobs, pods) if len(jobs) <= MAX_EXACT_JOBS else None
    return Placement(tuple(jobs), tuple(pods), tuple(parts or _place_greedily(jobs, pods)), parts is not None)


JobParts = list[tuple[int, ...]]


class _TooManyError(Exception):
    """Ways to weigh."""


def _place_exactly(jobs: Sequence[PlacedJob], pods: Sequence[int]) -> JobParts | None:
    """Pod after pod is closed, with some jobs that end in it, and at most one that goes on elsewhere and fills it.

    That is enough. Jobs and pods, joined where a job is on a pod, need no circle: nodes can be moved around one until a
    part is gone. So some pod is joined to one job that goes on; more of that job on it is never worse; and without that
    pod the same holds of what is left.
    """
    tried = 0

    @cache
    def least(left: tuple[int, ...], free: tuple[int, ...]) -> tuple[float, tuple[int, tuple[int, ...]] | None]:
        """(cost, (size of the pod to close, nodes of each job on it)) of what is left of jobs and pods."""
        nonlocal tried
        if not any(left):
            return 0.0, None
        if sum(left) > sum(free):
            return float("inf"), None
        best: tuple[float, tuple[int, tuple[int, ...]] | None] = (float("inf"), None)
        for size in sorted(set(free), reverse=True):
            others = list(free)
            others.remove(size)
            for here, going_on in _list_fillings(left, size):
                tried += 1
                if tried > MAX_TRIES:
                    raise _TooManyError
                cost = 0.0 if going_on is None else jobs[going_on].gradient_bytes
                if cost >= best[0]:
                    continue
                rest = tuple(nodes - part for nodes, part in zip(left, here, strict=True))
                cost += least(rest, tuple(others))[0]
                if cost < best[0]:
                    best = cost, (size, here)
        return best

    try:
        left, free = tuple(job.nodes for job in jobs), tuple(sorted(pods))
        columns = dict[int, tuple[int, ...]]()
        while (found := least(left, free)[1]) is not None:
            size, here = found
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
    """(nodes of each job, job that goes on elsewhere) of a pod; from the fullest to the empty one."""
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
    """The largest first, each where it fits most tightly; else over the emptiest pods."""
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
