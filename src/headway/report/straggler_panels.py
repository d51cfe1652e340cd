"""Panels of the ranks: the stages of each rank's step, and its own work over the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.observe.stragglers import COLUMNS, KIND, OWN_STAGES, describe_stragglers
from headway.page import panel
from headway.page.panel import Panel
from headway.report.thinning import round_value, split_into_points

# Rows of a chart.
MAX_RANKS = 64


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
    parts = split_into_points(len(positions))
    samples = run.read_provenance(samples=int)["samples"]
    more: dict[str, Any] = {"section": "Time", "width": "full"}
    stacks = [
        (stage, [round_value(mean[rank, place]) for rank in shown])
        for place, stage in enumerate(COLUMNS)
        if mean[:, place].any()
    ]
    note = f"{describe_stragglers(seconds)} In reduce, and on a GPU in log, a rank waits for others.{left}"
    title = "Step time of each rank by stage"
    bars = panel.bars("ranks", title, names, stacks, x_label="mean ms per step", order=340, note=note, **more)
    # Each column is the median of neighbouring intervals, at the epoch in which the last of them ended.
    epochs = [float(positions[part[-1]]) / samples for part in parts]
    rows = [
        (name, [round_value(np.median(own[part, n])) for part in parts]) for name, n in zip(names, shown, strict=True)
    ]
    more |= {"x_label": "epoch", "y_label": "rank", "z_label": "ms per step", "order": 341}
    note = "A step without the waiting for others. A row that stands out all along is a slow host."
    return [bars, panel.grid("ranks-own", "Own work of each rank per step", epochs, rows, note=note, **more)]
