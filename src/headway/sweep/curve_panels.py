"""Panels and table of a curve of steps to a target by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from headway.page import panel
from headway.page.panel import Panel
from headway.sweep.steps_curve import StepsCurve

SECTION = "Batch"
REGIMES = {"perfect": "perfect scaling", "diminishing": "diminishing returns", "none": "no gain"}
Row = tuple[str, ...]


def list_rows(curve: StepsCurve, samples: int) -> list[Row]:
    """Lists a heading and a row for each batch. Args: samples: size of the training set, for the epochs."""
    rows: list[Row] = [("batch", "lr", "steps", "epochs", "regime", "steps by learning rate, one seed; -: not reached")]
    regimes: dict[int, str] = {point.batch: point.regime for point in curve.list_points()}
    lacking = {run.batch for run in curve.list_missing()}
    for batch in curve.batches:
        tried = "  ".join(f"{lr:g}: {_format_tried(steps)}" for lr, steps in curve.list_tuned(batch).items())
        best, steps = curve.search(batch)[1], curve.compute_steps(batch)
        lr = "" if best is None else f"{best:g}{' (at the edge)' if curve.is_at_edge(batch) else ''}"
        known = (
            ("", "")
            if steps is None
            else (_format_steps(steps, curve.list_seed_steps(batch)), f"{steps * batch / samples:.1f}")
        )
        other = "missing" if batch in lacking else "not reached" if steps is None else "after a gap"
        rows.append((str(batch), lr, *known, regimes.get(batch, other), tried))
    return rows


def _format_tried(steps: float) -> str:
    return f"{steps:.0f}" if math.isfinite(steps) else "-"


def _format_steps(mean: float, seeds: Sequence[float]) -> str:
    """Formats the mean of the seeds, with the fewest and the most steps if there are several."""
    return f"{mean:.0f}" if len(seeds) == 1 else f"{mean:.0f} ({min(seeds):.0f} to {max(seeds):.0f})"


def build_panels(curve: StepsCurve, name: str, title: str, rows: Sequence[Row], order: int = 0) -> list[Panel]:
    """Builds the chart of a curve with its regimes, and its table; without a point the table alone.

    Args:
        name: end of the panels' names.
        title: beginning of their titles.
        rows: what `list_rows` returns, perhaps with more columns.
        order: place on the page.
    """
    layout: dict[str, Any] = {"width": "full", "section": SECTION}
    heading, *cells = rows
    runs = panel.table(f"runs-{name}", f"{title}, by batch", heading, cells, **layout, order=order + 2)
    points = curve.list_points()
    if not points:
        return [runs]
    ideal = [points[0].steps * points[0].batch / point.batch for point in points]
    series = [("if steps fell as the batch grows", [point.batch for point in points], ideal)]
    for regime, words in REGIMES.items():
        places = [place for place, point in enumerate(points) if point.regime == regime]
        if places:
            # Each part begins where the one before ends, so that the line has no gap.
            part = points[max(0, places[0] - 1) : places[-1] + 1]
            series.append((words, [point.batch for point in part], [point.steps for point in part]))
    seeds = f"Means of {len(curve.seeds)} seeds" if len(curve.seeds) > 1 else "One seed"
    note = f"{seeds}, each batch with the learning rate that needs the fewest steps."
    axes: dict[str, Any] = {"x_label": "batch", "y_label": "steps", "log_x": True, "log_y": True}
    return [panel.lines(f"curve-{name}", title, series, **axes, note=note, **layout, order=order + 1), runs]
