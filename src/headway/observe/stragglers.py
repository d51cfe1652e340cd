"""Stragglers: which rank the others wait for, and in which stage its time goes.

Ranks meet in every step, so a rank that is done early waits for the sums as long as the last one still computes: the
one that is slow waits least, and the waiting of the others is its doing.
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

OWN_STAGES = ("wait", "augment", "forward", "loss", "backward", "optimizer")
"""Stages that a rank spends on its own part of a step: as long as it does, the others wait."""
WAITING_STAGES = ("reduce", "log")
"""Stages in which it waits for the others: on a CPU for the sums, on a GPU where the host reads the losses."""
COLUMNS = (*OWN_STAGES, *WAITING_STAGES)

KIND = "ranks"
"""Name of the run's file of rows: seconds of a step by rank and COLUMNS."""
NAMED_SHARE = 0.8
"""Share of what a rank takes longer than the others that one stage has to explain to be named."""
MAX_RANKS, MAX_POINTS = 64, 240
"""Ranks, and columns, of a picture."""

StageSeconds = NDArray[np.float64]


@final
@dataclass(frozen=True, kw_only=True)
class SlowestRank:
    """The rank whose own part of a step takes longest, over some steps.

    Attributes:
        stage: in which it loses its time; None where no single one explains it.
        seconds: by which its own part is longer than the median of the others, a step.
        share: of their step, that the others wait longer than this rank does: how much it holds them up.
    """

    rank: int
    stage: str | None
    seconds: float
    share: float


def find_slowest_rank(seconds: StageSeconds) -> SlowestRank | None:
    """The slowest of several ranks; None for a single one, and where something is not known: missing is not zero.

    Args:
        seconds: [ranks, COLUMNS], of a step.
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
    """Whether the others wait for a rank, whether always for the same one, and where to look.

    Args:
        seconds: [intervals, ranks, COLUMNS], of a step.
    """
    own = seconds[:, :, : len(OWN_STAGES)].sum(axis=2)
    found = find_slow_rank(own, float(np.median(seconds.sum(axis=2))))
    each = [one for one in map(find_slowest_rank, seconds) if one is not None]
    if found is None:
        middle = float(np.median([one.share for one in each])) if each else 0.0
        return f"No rank holds the others up: in the median they wait for the slowest one {middle:.1%} of a step."
    of = f"of {len(seconds)} intervals"
    waits = f"and the others wait for it {found.behind:.0%} of a step"
    if found.always is None:
        return f"Rank {found.rank} is the slowest in {found.share:.0%} {of}, {waits}: too few to tell whether it stays."
    if not found.always:
        return (
            f"The slowest rank changes (rank {found.rank} in {found.share:.0%} {of}), {waits}. No host is slow by "
            "itself: look at what all share, the data, the network, other load."
        )
    stages = Counter(one.stage for one in each if one.rank == found.rank)
    stage, times = stages.most_common(1)[0]
    lost = f" It loses its time in {stage}." if stage is not None and 2 * times > stages.total() else ""
    return f"Rank {found.rank} is the slowest in {found.share:.0%} {of}, {waits}: look at its host.{lost}"


def build_panels(run: RunFolder) -> list[Panel]:
    """Where each rank's step goes, and its own part over the run; nothing of a run of one rank."""
    table = row_file.read_rows(run.rows_path(KIND))
    if table is None or table.columns != COLUMNS or not len(table.steps):
        return []
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
    return [
        panel.bars(
            "ranks",
            "Where each rank's step goes",
            names,
            stacks,
            x_label="ms a step, in the mean",
            order=340,
            note=f"{describe_stragglers(seconds)} In reduce, and on a GPU in log, a rank waits for others.{left}",
            **more,
        ),
        panel.grid(
            "ranks-own",
            "Own part of each rank's step",
            [float(positions[part[-1]]) / samples for part in parts],
            [(name, [_round(np.median(own[part, n])) for part in parts]) for name, n in zip(names, shown, strict=True)],
            x_label="epoch",
            y_label="rank",
            z_label="ms a step",
            order=341,
            note="All of a step but the waiting for others: a row that stands out all along is a slow host.",
            **more,
        ),
    ]


def _round(value: Any) -> float:
    """Four digits, for a file of a size."""
    return float(f"{value:.4g}")
