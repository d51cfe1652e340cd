"""The table of classes: the worst first, the best and the last evaluation side by side, and not too long."""

from __future__ import annotations

from typing import Any

import numpy as np

from headway.report.class_table import MOST_CLASSES, build_class_table
from headway.setup.class_counts import ClassCounts


def record(step: int, right: list[int], taken: list[int]) -> dict[str, Any]:
    counts = ClassCounts(count=np.full(len(right), 4), predicted=np.array(taken), right=np.array(right))
    return {"step": step, "epoch": step / 10, "classes": counts.to_json()}


def test_the_worst_class_comes_first() -> None:
    evaluated = [record(10, [4, 1, 3], [4, 2, 6]), record(20, [4, 0, 3], [4, 0, 3])]
    (table,) = build_class_table(evaluated, {"step": 20}, "abc")
    assert table.data["columns"] == ["class", "samples", "precision", "recall", "F1"]
    assert table.data["rows"] == [
        ["b", "4", "0.0%", "0.0%", "0.0%"],
        ["c", "4", "100.0%", "75.0%", "85.7%"],
        ["a", "4", "100.0%", "100.0%", "100.0%"],
    ]
    (table,) = build_class_table(evaluated, {"step": 10}, "abc")
    assert table.data["rows"][0] == ["b", "4", "50.0%", "25.0%", "33.3%", "0.0%", "0.0%", "0.0%"]
    assert "epoch 1, whose weights are saved, and at the last, epoch 2" in table.note


def test_a_thousand_classes_are_cut() -> None:
    right = list(range(1000))
    (table,) = build_class_table([record(1, right, [1000] * 1000)], None, [f"class {number}" for number in right])
    assert [row[0] for row in table.data["rows"]] == [f"class {number}" for number in range(MOST_CLASSES)]
    assert "100 of 1,000 classes" in table.note
    assert build_class_table([{"step": 1, "epoch": 1.0}], None, "abc") == []
