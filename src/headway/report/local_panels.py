"""The panel of local steps: how far the ranks were apart when they averaged their weights."""

from __future__ import annotations

from typing import Any

from headway.page import panel
from headway.page.panel import Panel


def build_panels(train: list[dict[str, Any]]) -> list[Panel]:
    """Builds the curve of distances; empty for a run that made no local steps.

    Args:
        train: records of kind `train`.
    """
    known = [record for record in train if "ranks_apart" in record]
    if not known:
        return []
    curve = panel.lines(
        "ranks-apart",
        "Distance of the ranks",
        [("distance", [record["epoch"] for record in known], [record["ranks_apart"] for record in known])],
        x_label="epoch",
        y_label="relative to the mean change",
        order=262,
        note="Root mean square distance of the ranks' weights from their mean at the end of a round, relative to the"
        " mean change of the weights in the round. Above 1 most of what the ranks learn cancels out: shorter rounds"
        " (parallel.every_steps) keep more of it.",
        section="Training",
        width="half",
    )
    return [curve]
