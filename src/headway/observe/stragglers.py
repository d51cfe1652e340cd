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
COMPUTE_STAGES = ("wait", "augment", "forward", "loss", "backward", "optimizer")
# Stages in which a rank waits for others: on a CPU in all exchanges inside of the network together and in the
# all-reduce, on a GPU at the read of the losses.
WAITING_STAGES = ("exchange", "reduce", "log")
COLUMNS = (*COMPUTE_STAGES, *WAITING_STAGES)

# Name of the row file with seconds per step by rank and COLUMNS.
ROW_FILE_KIND = "ranks"
# Share of the delay that one stage has to explain to be named.
MIN_STAGE_SHARE = 0.8

StageSeconds = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank that computes longest, over some steps.

    Attributes:
        rank: Number of the rank.
        stage: Stage in which it loses time; None if no single stage explains the delay.
        seconds: Seconds per step by which its computation exceeds the median of the others.
        share: Share of a step that the others wait longer than this rank: the time that it costs them.
    """

    rank: int
    stage: str | None
    seconds: float
    share: float


def find_slowest_rank(seconds: StageSeconds) -> SlowestRank | None:
    """Returns the slowest of several ranks; None for a single rank, or if a number is missing.

    Args:
        seconds: [ranks, COLUMNS] seconds per step.
    """
    if len(seconds) < 2 or not np.isfinite(seconds).all():
        return None
    compute_s = seconds[:, : len(COMPUTE_STAGES)]
    waited_s = seconds[:, len(COMPUTE_STAGES) :].sum(axis=1)
    total_compute = compute_s.sum(axis=1)
    rank = int(total_compute.argmax())
    is_other = np.arange(len(seconds)) != rank
    delay_s = float(total_compute[rank] - np.median(total_compute[is_other]))
    stage_delays_s = compute_s[rank] - np.median(compute_s[is_other], axis=0)
    stage = (
        COMPUTE_STAGES[stage_delays_s.argmax()]
        if delay_s > 0 and stage_delays_s.max() >= MIN_STAGE_SHARE * delay_s
        else None
    )
    step_s = float(np.median((total_compute + waited_s)[is_other]))
    # The slow rank waits least, and the difference is what it costs the others.
    held_up_s = max(0.0, float(np.median(waited_s[is_other]) - waited_s[rank]))
    return SlowestRank(rank=rank, stage=stage, seconds=delay_s, share=held_up_s / step_s if step_s > 0 else 0.0)


def describe_stragglers(seconds: StageSeconds) -> str:
    """Returns sentences: whether the others wait for a rank, whether it is always the same one, and where to look.

    Args:
        seconds: [intervals, ranks, COLUMNS] seconds per step.
    """
    compute_s = seconds[:, :, : len(COMPUTE_STAGES)].sum(axis=2)
    slow_rank = find_slow_rank(compute_s, float(np.median(seconds.sum(axis=2))))
    slowest_by_interval = [slowest for slowest in map(find_slowest_rank, seconds) if slowest is not None]
    if slow_rank is None:
        median_share = (
            float(np.median([slowest.share for slowest in slowest_by_interval])) if slowest_by_interval else 0.0
        )
        return f"No rank delays the others: the median wait for the slowest one is {median_share:.1%} of a step."
    frequency = f"{slow_rank.share:.0%} of {len(seconds)} intervals"
    waits = f"and the others wait for it {slow_rank.behind:.0%} of a step"
    sentence = f"Rank {slow_rank.rank} is the slowest in {frequency}, {waits}."
    if slow_rank.always is None:
        return f"{sentence} Too few intervals to tell if it stays so."
    if not slow_rank.always:
        return (
            f"The slowest rank changes (rank {slow_rank.rank} in {frequency}), {waits}. No single host is slow: "
            "look at what all hosts share, such as data, network and other load."
        )
    # The stage is named only if it was the cause in most of the intervals.
    stages = Counter(slowest.stage for slowest in slowest_by_interval if slowest.rank == slow_rank.rank)
    stage, times = stages.most_common(1)[0]
    stage_text = f" It loses time in {stage}." if stage is not None and 2 * times > stages.total() else ""
    return f"{sentence} Look at its host.{stage_text}"
