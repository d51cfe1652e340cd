"""What a run left behind: positions that did not come once, weights that were not the same, steps begun again."""

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
        strays: checksums of some process that are none of these. The last one of a process that was lost does not
            count: it may have made a step that nobody else has seen.
        others: processes that no fault had hit, and that did not come to the end.
        repeated: steps begun again, over all losses. repeated_most: by one process at once.
    """

    steps: int
    strays: int
    others: int
    repeated: int
    repeated_most: int


def weights(traces: Mapping[str, Sequence[int]], victims: Set[str]) -> Weights:
    """Compares the checksums that each process has written at the beginning of its steps.

    Args:
        traces: by process. victims: those that a fault has hit.
    """
    spared = {process: trace[-1] for process, trace in traces.items() if process not in victims}
    (end, alive), *_ = Counter(spared.values()).most_common()
    before: dict[int, int] = {}
    for trace in traces.values():
        for first, after in pairwise(trace):
            if first != after:
                before.setdefault(after, first)
    order = [end]
    seen = set(order)
    while (first := before.get(order[-1])) is not None and first not in seen:
        order.append(first)
        seen.add(first)
    number = {checksum: place for place, checksum in enumerate(reversed(order))}
    strays, again = 0, list[int]()
    repeated = set[int]()
    for process, trace in traces.items():
        strays += sum(checksum not in number for checksum in (trace if spared.get(process) == end else trace[:-1]))
        known = [number[checksum] for checksum in trace if checksum in number]
        for first, after in pairwise(known):
            if after <= first:
                again.append(first - after + 1)
                repeated |= set(range(after, first + 1))
    return Weights(len(order), strays, len(spared) - alive, len(repeated), max(again, default=0))


def read_weights(folder: Path) -> dict[str, list[int]]:
    """By the number of the process."""
    return {path.stem: np.fromfile(path, "<u4").tolist() for path in folder.glob("*.weights")}


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
