"""Panels of asynchronous training: the age of the weights that each gradient was computed at."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from headway.core.errors import DataError
from headway.core.run_folder import RunFolder
from headway.page import panel
from headway.page.panel import Panel
from headway.parallel.update_log import read_updates

MAX_BARS = 40
"""Longest delay with a bar of its own; longer ones share the last."""


def build_panels(run: RunFolder, train: list[dict[str, Any]]) -> list[Panel]:
    """Builds the histogram of delays and the curve of corrections; empty for a run that was not asynchronous.

    Args:
        train: records of kind `train`.
    """
    if not run.updates_path.exists():
        return []
    options: dict[str, Any] = {"section": "Training", "width": "half"}
    try:
        updates = read_updates(run.updates_path)
    except DataError as error:
        return [panel.text("async-delay", "Delay of updates", str(error), order=260, **options)]
    if not updates:
        return []
    delays = [update.staleness for update in updates]
    counts = Counter(min(delay, MAX_BARS) for delay in delays)
    shown = range(max(counts) + 1)
    names = [f"{delay} or more" if delay == MAX_BARS else str(delay) for delay in shown]
    by_worker = Counter(update.worker for update in updates)
    shares = ", ".join(f"rank {worker} {number:,}" for worker, number in sorted(by_worker.items()))
    note = (
        f"Updates between reading the weights and applying the gradient: mean {np.mean(delays):.2f}, with"
        f" {len(by_worker)} workers {len(by_worker) - 1} are expected, whatever their speeds. Updates made by {shares}."
        f" This run is not reproducible, but replayable: headway replay {run.folder}."
    )
    bars = panel.bars(
        "async-delay",
        "Delay of updates",
        names,
        [("updates", [counts[delay] for delay in shown])],
        x_label="updates",
        order=260,
        note=note,
        **options,
    )
    corrected = [record for record in train if record.get("correction") is not None]
    if not corrected:
        return [bars]
    curve = panel.lines(
        "async-correction",
        "Correction for delay",
        [("correction", [record["epoch"] for record in corrected], [record["correction"] for record in corrected])],
        x_label="epoch",
        y_label="relative to the gradient",
        order=261,
        note="What compensation adds to a gradient, relative to it: strength x |gradient x (weights - weights read)|."
        " Near 0 it changes nothing.",
        **options,
    )
    return [bars, curve]
