"""Stragglers: the rank that the others wait for, and the stage in which it loses time.

Ranks meet in every step, so a rank that finishes early waits for the all-reduce until the last one arrives. The slow
rank is therefore the one that waits least.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.observe.patterns import find_slow_rank

# Stages of a rank's own work: while they last, the others wait.
OWN_STAGES = ("wait", "augment", "forward", "loss", "backward", "optimizer")
# Stages in which a rank waits for others: on a CPU in the all-reduce, on a GPU at the read of the losses.
WAITING_STAGES = ("reduce", "log")
COLUMNS = (*OWN_STAGES, *WAITING_STAGES)

# Name of the row file with seconds per step by rank and COLUMNS.
KIND = "ranks"
# Share of the delay that one stage has to explain to be named.
NAMED_SHARE = 0.8

StageSeconds = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank whose own work takes longest, over some steps."""

    rank: int
    # Stage in which it loses time; None if no single stage explains the delay.
    stage: str | None
    # Seconds per step by which its own work exceeds the median of the others.
    seconds: float
    # Share of a step that the others wait longer than this rank: the time that it costs them.
    share: float


def find_slowest_rank(seconds: StageSeconds) -> SlowestRank | None:
    """Finds the slowest of several ranks; None for a single rank, or if a number is missing.

    Args:
        seconds: [ranks, COLUMNS] seconds per step.
    """
    if len(seconds) < 2 or not np.isfinite(seconds).all():
        return None
    own, waited = seconds[:, : len(OWN_STAGES)], seconds[:, len(OWN_STAGES) :].sum(axis=1)
    busy = own.sum(axis=1)
    rank = int(busy.argmax())
    others = np.arange(len(seconds)) != rank
    longer = float(busy[rank] - np.median(busy[others]))
    by_stage = own[rank] - np.median(own[others], axis=0)
    stage = OWN_STAGES[by_stage.argmax()] if longer > 0 and by_stage.max() >= NAMED_SHARE * longer else None
    step = float(np.median((busy + waited)[others]))
    held_up = max(0.0, float(np.median(waited[others]) - waited[rank]))
    return SlowestRank(rank=rank, stage=stage, seconds=longer, share=held_up / step if step > 0 else 0.0)


def describe_stragglers(seconds: StageSeconds) -> str:
    """Describes if the others wait for a rank, if it is always the same one, and the place to look.

    Args:
        seconds: [intervals, ranks, COLUMNS] seconds per step.
    """
    own = seconds[:, :, : len(OWN_STAGES)].sum(axis=2)
    found = find_slow_rank(own, float(np.median(seconds.sum(axis=2))))
    each = [one for one in map(find_slowest_rank, seconds) if one is not None]
    if found is None:
        middle = float(np.median([one.share for one in each])) if each else 0.0
        return f"No rank delays the others: the median wait for the slowest one is {middle:.1%} of a step."
    of = f"of {len(seconds)} intervals"
    waits = f"and the others wait for it {found.behind:.0%} of a step"
    if found.always is None:
        slow = f"Rank {found.rank} is the slowest in {found.share:.0%} {of}, {waits}."
        return f"{slow} Too few intervals to tell if it stays so."
    if not found.always:
        return (
            f"The slowest rank changes (rank {found.rank} in {found.share:.0%} {of}), {waits}. No single host is slow: "
            "look at what all hosts share, such as data, network and other load."
        )
    # The stage is named only if it was the cause in most of the intervals.
    stages = Counter(one.stage for one in each if one.rank == found.rank)
    stage, times = stages.most_common(1)[0]
    lost = f" It loses time in {stage}." if stage is not None and 2 * times > stages.total() else ""
    return f"Rank {found.rank} is the slowest in {found.share:.0%} {of}, {waits}. Look at its host.{lost}"
