"""Panels of the ranks: the stages of each rank's step, and its own work over the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.observe.stragglers import COLUMNS, COMPUTE_STAGES, ROW_FILE_KIND, describe_stragglers
from headway.page import panel
from headway.page.panel import Panel
from headway.report.thinning import round_value, split_into_points

# Ranks of a chart: as many rows as can be read.
MAX_RANKS = 64


def build_panels(run: RunFolder) -> list[Panel]:
    """Builds the panels of each rank's stages, and of its computation over the run; empty for a run of one rank."""
    table = row_file.read_rows(run.rows_path(ROW_FILE_KIND))
    if table is None or table.columns != COLUMNS or not len(table.steps):
        return []
    # A resumed run may have written an interval twice: the first of each position counts.
    positions, first_rows = np.unique(table.positions, return_index=True)
    seconds = table.values[first_rows].astype(np.float64)
    compute_ms = 1e3 * seconds[:, :, : len(COMPUTE_STAGES)].sum(axis=2)
    mean_ms = 1e3 * seconds.mean(axis=0)
    shown_ranks = sorted(np.argsort(-compute_ms.mean(axis=0), kind="stable")[:MAX_RANKS].tolist())
    names = [f"rank {table.names[rank]}" for rank in shown_ranks]
    omitted = f" Of {len(table.names)} ranks these are the {MAX_RANKS} slowest." if len(table.names) > MAX_RANKS else ""
    intervals = split_into_points(len(positions))
    samples = run.read_provenance(samples=int)["samples"]
    options: dict[str, Any] = {"section": "Time", "width": "full"}
    stacks = [
        (stage, [round_value(mean_ms[rank, column]) for rank in shown_ranks])
        for column, stage in enumerate(COLUMNS)
        if mean_ms[:, column].any()
    ]
    note = (
        f"{describe_stragglers(seconds)} In exchange and reduce, and on a GPU in log, a rank waits for others.{omitted}"
    )
    title = "Step time of each rank by stage"
    stage_panel = panel.bars("ranks", title, names, stacks, x_label="mean ms per step", order=340, note=note, **options)
    # Each column is the median of neighbouring intervals, at the epoch in which the last of them ended.
    epochs = [float(positions[interval[-1]]) / samples for interval in intervals]
    rows = [
        (name, [round_value(np.median(compute_ms[interval, rank])) for interval in intervals])
        for name, rank in zip(names, shown_ranks, strict=True)
    ]
    options |= {"x_label": "epoch", "y_label": "rank", "z_label": "ms per step", "order": 341}
    note = "A step without the waiting for others. A row that stands out all along is a slow host."
    return [stage_panel, panel.grid("ranks-own", "Own work of each rank per step", epochs, rows, note=note, **options)]
