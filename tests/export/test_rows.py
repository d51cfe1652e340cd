"""Columns and metrics of an export are those of the run's own task."""

from __future__ import annotations

import csv
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.data.columns import LabelKind
from headway.export.export_run import PREDICT_SOURCE
from headway.export.manifest import Manifest
from headway.export.rows import check_ranking, check_task, make_columns
from headway.export.task_metrics import compute_metrics
from headway.setup.metric_catalog import build_metrics
from headway.setup.recipe import MetricRecipe
from headway.setup.task import Classification, MultiLabel, Regression, TargetSpec, Task
from headway.training.prediction_rows import write_rows

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox", "gnu")
ACTIVATIONS: dict[str, Any] = {
    "softmax": lambda outputs: outputs.softmax(1),
    "sigmoid": torch.sigmoid,
    "identity": lambda outputs: outputs,
}
SEEDS = st.integers(0, 2**32 - 1)


def make_manifest(task: LabelKind, names: tuple[str, ...]) -> Manifest:
    return Manifest(
        task=task,
        activation={"class": "softmax", "multi": "sigmoid", "value": "identity"}[task],
        names=names,
        outputs=len(names),
        threshold=0.5 if task == "multi" else None,
        size=(8, 8),
        channels=3,
        crop_share=1.0,
        scaled=False,
        decoder="native",
        files={},
        targets={},
        run={},
        data={},
        versions={},
        processor={},
    )


def make_case(kind: str, seed: int) -> tuple[Task, Manifest, torch.Tensor, torch.Tensor]:
    """A task, its manifest, outputs and labels of nine samples."""
    random = torch.Generator().manual_seed(seed)
    if kind == "class":
        outputs, labels = 3 * torch.randn(9, 7, generator=random), torch.randint(7, (9,), generator=random)
        return (
            Classification(TargetSpec(kind="class", classes=NAMES, numbers=1)),
            make_manifest("class", NAMES),
            outputs,
            labels,
        )
    if kind == "multi":
        outputs = 3 * torch.randn(9, 7, generator=random)
        labels = torch.randint(2, (9, 7), generator=random, dtype=torch.uint8).float()
        return (
            MultiLabel(TargetSpec(kind="multi", classes=NAMES, numbers=7)),
            make_manifest("multi", NAMES),
            outputs,
            labels,
        )
    if kind == "number":
        target, names = TargetSpec(kind="value", classes=(), numbers=1), ("value",)
    elif kind == "numbers":
        target, names = TargetSpec(kind="value", classes=(), numbers=3), ("0", "1", "2")
    else:
        target, names = TargetSpec(kind="value", classes=("x", "y"), numbers=2), ("x", "y")
    outputs = torch.randn(9, target.numbers, generator=random)
    labels = torch.randn((9, target.numbers) if target.numbers > 1 else (9,), generator=random)
    return Regression(target), make_manifest("value", names), outputs, labels


KINDS = ("class", "multi", "number", "numbers", "named numbers")


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS)
def test_the_columns_are_those_of_the_task(kind: str, seed: int) -> None:
    task, manifest, outputs, _ = make_case(kind, seed)
    assert make_columns(manifest, ACTIVATIONS[manifest.activation](outputs).numpy()) == task.predict(outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_of_the_script_are_those_of_the_verb(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("onnxruntime")
    script = runpy.run_path(str(PREDICT_SOURCE))
    _, manifest, outputs, _ = make_case(kind, 24)
    found = ACTIVATIONS[manifest.activation](outputs).numpy()
    write_rows(make_columns(manifest, found), None, as_json=False)
    by_verb = capsys.readouterr().out
    rows = [script["make_row"](one, manifest.to_json()) for one in found]
    table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    assert capsys.readouterr().out == by_verb


@given(SEEDS, st.integers(1, 7))
def test_the_best_classes(seed: int, top: int) -> None:
    _, manifest, outputs, _ = make_case("class", seed)
    values, places = outputs.softmax(1).topk(top)
    for row, best, ids in zip(make_columns(manifest, outputs.softmax(1).numpy(), top), values, places, strict=True):
        keys = [""] + [f"_{number}" for number in range(2, top + 1)]
        expected: dict[str, Any] = {}
        for key, value, place in zip(keys, best.tolist(), ids.tolist(), strict=True):
            expected |= {f"label{key}": NAMES[place], f"probability{key}": round(value, 6)}
        assert row == expected
        assert list(row) == list(expected)


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS)
def test_the_metrics_are_those_of_the_task(kind: str, seed: int) -> None:
    task, manifest, outputs, labels = make_case(kind, seed)
    found = compute_metrics(manifest, ACTIVATIONS[manifest.activation](outputs).numpy(), labels.numpy())
    expected = {"loss": task.loss(outputs, labels), **task.metrics(outputs, labels)}
    if kind == "class":
        target = TargetSpec(kind="class", classes=NAMES, numbers=1)
        expected["top5"] = build_metrics([MetricRecipe(name="top5")], target, 7, Path()).per_sample["top5"](
            outputs, labels
        )
    assert list(found) == list(expected)
    slack = np.zeros(len(outputs))
    if kind == "multi":
        # float32 rounds a probability near 1 by 6e-8, which is much of what is left of a label that is wrong.
        right = torch.where(labels > 0.5, outputs.double(), -outputs.double()).sigmoid()
        slack = (1.2e-7 / right).mean(dim=1).numpy()
    for name, values in expected.items():
        within = 1e-4 * np.abs(values.numpy()) + 1e-5 + (slack if name == "loss" else 0)
        assert (np.abs(found[name] - values.numpy()) <= within)[slack < 0.1].all(), name


def test_probabilities_rounded_to_0_and_1_give_a_finite_loss() -> None:
    classes = compute_metrics(make_manifest("class", ("a", "b")), np.float32([[1, 0], [1, 0]]), np.array([0, 1]))
    assert classes["loss"].tolist() == [0, pytest.approx(87.3, abs=0.1)]
    labels = compute_metrics(make_manifest("multi", ("a", "b")), np.float32([[1, 0]]), np.array([[0, 1]]))
    assert labels["loss"].tolist() == [pytest.approx(87.3, abs=0.1)]
    assert labels["exact"].tolist() == [0]


def test_what_cannot_be_ranked_or_exported_is_refused() -> None:
    class Own(Regression):
        activation = None

    numbers = TargetSpec(kind="value", classes=(), numbers=1)
    check_task(Regression(numbers))
    with pytest.raises(UsageError, match='Set the attribute activation = "softmax", "sigmoid" or "identity"'):
        check_task(Own(numbers))
    check_ranking(make_manifest("class", NAMES), 7)
    check_ranking(make_manifest("multi", NAMES), None)
    with pytest.raises(UsageError, match="there are 7 classes"):
        check_ranking(make_manifest("class", NAMES), 8)
    for other in (make_manifest("multi", NAMES), make_manifest("value", NAMES)):
        with pytest.raises(UsageError, match="does not choose one of several classes"):
            check_ranking(other, 1)
    with pytest.raises(UsageError, match=r"no metrics of a task of your own\. .*headway evaluate RUN"):
        compute_metrics(replace(make_manifest("class", NAMES), task="own"), np.zeros((1, 7), np.float32), np.zeros(1))
