"""Panels of the numbers that callbacks log."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.page import panel
from headway.page.panel import Panel
from headway.setup.run_log import NON_METRIC_KEYS
from headway.training.callback_context import FIRST_ORDER, SECTION

# A callback that logs a number for each layer would fill the page.
MAX_CURVES = 24


def build_panels(records: Sequence[dict[str, Any]]) -> list[Panel]:
    """Builds a curve over the epochs for each number that callbacks logged. Args: records: those of metrics.jsonl."""
    logged = [record for record in records if record["kind"] == "callback"]
    names = list(dict.fromkeys(name for record in logged for name in record if name not in NON_METRIC_KEYS))
    note = f"The first {MAX_CURVES} of {len(names)} numbers; metrics.jsonl has all." if len(names) > MAX_CURVES else ""
    panels = []
    for number, name in enumerate(names[:MAX_CURVES]):
        points = [(record["epoch"], record[name]) for record in logged if name in record]
        x, y = [epoch for epoch, _ in points], [value for _, value in points]
        # Digits in place of the name, which may hold any letter.
        panels.append(
            panel.lines(
                f"callback-curve-{number:02}",
                name.replace("_", " "),
                [(name, x, y)],
                x_label="epoch",
                y_label=name,
                section=SECTION,
                order=FIRST_ORDER - 10,
                note=note,
            )
        )
    return panels
