"""The table of precision, recall and F1 by class, at the best and at the last evaluation of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.page import panel
from headway.page.panel import Panel
from headway.setup.class_counts import ClassCounts

SCORES = ("precision", "recall", "F1")
# Most rows: a thousand would be longer than the rest of the page.
MOST_CLASSES = 100


def build_class_table(
    evaluated: Sequence[dict[str, Any]], best: dict[str, Any] | None, classes: Sequence[str]
) -> list[Panel]:
    """Builds the table from the records of a run; empty if its labels are numbers.

    Args:
        evaluated: records of evaluations, the last one last.
        best: metrics of the best evaluation, with its step.
        classes: names of the classes.
    """
    # Runs of older versions have no counts.
    records = [record for record in evaluated if "classes" in record]
    if not records:
        return []
    last = records[-1]
    kept = next((record for record in records if best is not None and record["step"] == best["step"]), last)
    moments = [kept] if kept is last else [kept, last]
    counts = [ClassCounts.from_json(record["classes"]) for record in moments]
    columns = ["class", "samples", *SCORES]
    note = f"Evaluation at epoch {round(kept['epoch'], 1):g}"
    if len(moments) > 1:
        columns += [f"{score}, last" for score in SCORES]
        note += f", whose weights are saved, and at the last, epoch {round(last['epoch'], 1):g}"
    scores = [(one.precision, one.recall, one.f1) for one in counts]
    # The classes that need attention come first.
    order = counts[0].f1.argsort(kind="stable").tolist()[:MOST_CLASSES]
    rows = [
        [
            classes[index],
            f"{int(counts[0].count[index]):,}",
            *(f"{values[index]:.1%}" for moment in scores for values in moment),
        ]
        for index in order
    ]
    note += ". The lowest F1 comes first; a share of nothing is 0."
    if len(order) < len(classes):
        note += f" {len(order)} of {len(classes):,} classes; metrics.jsonl has the counts of all."
    wide: dict[str, Any] = {"section": "Evaluation", "width": "full", "order": 405, "note": note}
    return [panel.table("classes", "Precision, recall and F1 by class", columns, rows, **wide)]
