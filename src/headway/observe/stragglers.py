"""Stragglers: the rank that the others wait for, and the stage in which it loses time.

Ranks meet in every step, so a rank that finishes early waits for the all-reduce until the last one arrives. The slow
rank is therefore the one that waits least.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.observe.patterns import find_slow_rank
from headway.page import panel
from headway.page.panel import Panel

# Stages of a rank's own work: while they last, the others wait.
OWN_STAGES = ("wait", "augment", "forward", "loss", "backward", "optimizer")
# Stages in which a rank waits for others: on a CPU in the all-reduce, on a GPU at the read of the losses.
WAITING_STAGES = ("reduce", "log")
COLUMNS = (*OWN_STAGES, *WAITING_STAGES)

# Name of the row file with seconds per step by rank and COLUMNS.
KIND = "ranks"
# Share of the delay that one stage has to explain to be named.
NAMED_SHARE = 0.8
# Ranks and columns of a chart.
MAX_RANKS, MAX_POINTS = 64, 240

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
    slowest = find_slow_rank(own, float(np.median(seconds.sum(axis=2))))
    each = [one for one in map(find_slowest_rank, seconds) if one is not None]
    if slowest is None:
        middle = float(np.median([one.share for one in each])) if each else 0.0
        return f"No rank delays the others: the median wait for the slowest one is {middle:.1%} of a step."
    of = f"of {len(seconds)} intervals"
    waits = f"and the others wait for it {slowest.behind:.0%} of a step"
    if slowest.always is None:
        slow = f"Rank {slowest.rank} is the slowest in {slowest.share:.0%} {of}, {waits}."
        return f"{slow} Too few intervals to tell if it stays so."
    if not slowest.always:
        return (
            f"The slowest rank changes (rank {slowest.rank} in {slowest.share:.0%} {of}), {waits}. No single host is "
            "slow: look at what all hosts share, such as data, network and other load."
        )
    # The stage is named only if it was the cause in most of the intervals.
    stages = Counter(one.stage for one in each if one.rank == slowest.rank)
    stage, times = stages.most_common(1)[0]
    lost = f" It loses time in {stage}." if stage is not None and 2 * times > stages.total() else ""
    return f"Rank {slowest.rank} is the slowest in {slowest.share:.0%} {of}, {waits}. Look at its host.{lost}"


def build_panels(run: RunFolder) -> list[Panel]:
    """Builds the stages of each rank's step, and its own work over the run; empty for a run of one rank."""
    table = row_file.read_rows(run.rows_path(KIND))
    if table is None or table.columns != COLUMNS or not len(table.steps):
        return []
    # A resumed run may have written an interval twice: the first of each position counts.
    positions, places = np.unique(table.positions, return_index=True)
    seconds = table.values[places].astype(np.float64)
    own, mean = 1e3 * seconds[:, :, : len(OWN_STAGES)].sum(axis=2), 1e3 * seconds.mean(axis=0)
    shown = sorted(np.argsort(-own.mean(axis=0), kind="stable")[:MAX_RANKS].tolist())
    names = [f"rank {table.names[rank]}" for rank in shown]
    left = f" Of {len(table.names)} ranks these are the {MAX_RANKS} slowest." if len(table.names) > MAX_RANKS else ""
    parts = np.array_split(np.arange(len(positions)), min(MAX_POINTS, len(positions)))
    samples = run.read_provenance(samples=int)["samples"]
    more: dict[str, Any] = {"section": "Time", "width": "full"}
    stacks = [
        (stage, [_round(mean[rank, place]) for rank in shown])
        for place, stage in enumerate(COLUMNS)
        if mean[:, place].any()
    ]
    note = f"{describe_stragglers(seconds)} In reduce, and on a GPU in log, a rank waits for others.{left}"
    title = "Step time of each rank by stage"
    bars = panel.bars("ranks", title, names, stacks, x_label="mean ms per step", order=340, note=note, **more)
    # Each column is the median of neighbouring intervals, at the epoch in which the last of them ended.
    epochs = [float(positions[part[-1]]) / samples for part in parts]
    rows = [(name, [_round(np.median(own[part, n])) for part in parts]) for name, n in zip(names, shown, strict=True)]
    more |= {"x_label": "epoch", "y_label": "rank", "z_label": "ms per step", "order": 341}
    note = "A step without the waiting for others. A row that stands out all along is a slow host."
    return [bars, panel.grid("ranks-own", "Own work of each rank per step", epochs, rows, note=note, **more)]


def _round(value: Any) -> float:
    """Rounds to four digits, to keep the page small."""
    return float(f"{value:.4g}")
