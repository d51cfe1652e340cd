"""Reads the traces of a run: positions not trained exactly once, differing weights, repeated steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import final

import numpy as np


@final
@dataclass(frozen=True)
class Weights:
    """What the checksums of all processes say.

    Attributes:
        steps: different weights, one after the other, that lead to the last ones.
        strays: checksums of some process that are none of these. The last ones of a process that was lost do not
            count: it may have made steps that nobody else has seen.
        others: processes that no fault had hit, and that did not come to the end.
        repeated: steps begun again, over all losses. repeated_most: by one process at once.
    """

    steps: int
    strays: int
    others: int
    repeated: int
    repeated_most: int


@final
class Steps:
    """The weights of a run in their order, by checksum: how many steps lie before each.

    Args:
        traces: checksums that each process has written at the beginning of its steps. victims: those that were lost.
        given: (weights at the beginning of a step, weights after it) that some process gave away.
    """

    def __init__(
        self, traces: Mapping[str, Sequence[int]], victims: Set[str], given: Sequence[Sequence[int]] = ()
    ) -> None:
        self.spared = {process: trace[-1] for process, trace in traces.items() if process not in victims and trace}
        (self.end, self.alive), *_ = Counter(self.spared.values()).most_common()
        self._before: dict[int, int] = {}
        for trace in (*traces.values(), *given):
            for first, after in pairwise(trace):
                if first != after:
                    self._before.setdefault(after, first)
        order = self._back(self.end)
        self.number = {checksum: place for place, checksum in enumerate(reversed(order))}

    def place(self, checksum: int) -> int:
        """Steps before these weights, also on a way that was given up and made again from a checkpoint; -1: unknown."""
        for distance, found in enumerate(self._back(checksum)):
            if found in self.number:
                return self.number[found] + distance
        return -1

    def _back(self, checksum: int) -> list[int]:
        order, seen = [checksum], {checksum}
        while (first := self._before.get(order[-1])) is not None and first not in seen:
            order.append(first)
            seen.add(first)
        return order


def weights(traces: Mapping[str, Sequence[int]], victims: Set[str], *, given_up: int = 1) -> Weights:
    """Compares the checksums that each process has written at the beginning of its steps.

    Args:
        traces: by process. victims: those that a fault has hit.
        given_up: so many of the last steps of a lost process may be unknown to the others: one that nobody else has
            seen; more where the run went back to a checkpoint.
    """
    steps = Steps(traces, victims)
    strays, again = 0, list[int]()
    repeated = set[int]()
    for process, trace in traces.items():
        kept = trace if steps.spared.get(process) == steps.end else trace[: max(0, len(trace) - given_up)]
        strays += sum(checksum not in steps.number for checksum in kept)
        known = [steps.number[checksum] for checksum in trace if checksum in steps.number]
        for first, after in pairwise(known):
            if after <= first:
                again.append(first - after + 1)
                repeated |= set(range(after, first + 1))
    others = len(steps.spared) - steps.alive
    return Weights(len(steps.number), strays, others, len(repeated), max(again, default=0))


def read_weights(folder: Path) -> dict[str, list[int]]:
    """By the number of the process."""
    return {path.stem: np.fromfile(path, "<u4").tolist() for path in folder.glob("*.weights")}


def read_given(folder: Path) -> list[list[int]]:
    """Pairs of checksums; see `Steps`."""
    found = [np.fromfile(path, "<u4").reshape(-1, 2).tolist() for path in folder.glob("*.given")]
    return [pair for pairs in found for pair in pairs]


def lost_positions(run: Path, positions: int) -> int:
    """Positions that did not come, or came more than once, and those beyond the end."""
    found = [np.fromfile(path, "<i8").reshape(-1, 3)[:, 0] for path in run.glob("ids*.bin")]
    counts = np.bincount(np.concatenate(found), minlength=positions)
    return int((counts[:positions] != 1).sum() + (counts[positions:] != 0).sum())


def losses(run: Path) -> dict[int, float]:
    """By step."""
    with (run / "metrics.jsonl").open() as file:
        records = [json.loads(line) for line in file]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}
