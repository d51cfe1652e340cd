"""Metrics of a whole set against their definitions, one sample and one threshold at a time."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.setup.class_counts import ClassCounts
from headway.setup.set_metrics import (
    ClassScores,
    LabelScores,
    RankingScores,
    SetMetric,
    ValueScores,
    compute_auc,
    compute_average_precision,
)

CLASSES = 4
pairs = st.lists(st.tuples(st.integers(0, CLASSES - 1), st.integers(0, CLASSES - 1)), min_size=1, max_size=30)
ranked = st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=20)


def mean(values: Sequence[Fraction]) -> float:
    return float(sum(values, Fraction(0)) / len(values)) if values else 0.0


def share(above: int, below: int) -> Fraction:
    return Fraction(above, below) if below else Fraction(0)


@given(pairs)
def test_scores_of_classes_by_counting(pairs: list[tuple[int, int]]) -> None:
    precision, recall, f1, balanced = [], [], [], []
    for one in range(CLASSES):
        right = sum(label == predicted == one for label, predicted in pairs)
        count, taken = sum(label == one for label, _ in pairs), sum(predicted == one for _, predicted in pairs)
        if count:
            balanced.append(share(right, count))
        if count or taken:
            precision.append(share(right, taken))
            recall.append(share(right, count))
            f1.append(share(2 * right, count + taken))
    metric = ClassScores(("precision", "recall", "f1", "balanced_accuracy"), CLASSES)
    labels, predicted = torch.tensor(pairs).T
    outputs = torch.nn.functional.one_hot(predicted, CLASSES).float()
    found = evaluate(metric, outputs, labels)
    assert list(found.values()) == pytest.approx([mean(precision), mean(recall), mean(f1), mean(balanced)], abs=1e-12)


def evaluate(metric: SetMetric, outputs: torch.Tensor, labels: torch.Tensor) -> dict[str, float]:
    """As an evaluation does it: in batches, the last one short."""
    found = [metric.collect(outputs[low : low + 7], labels[low : low + 7]) for low in range(0, len(outputs), 7)]
    return dict(metric.compute(torch.cat(found).numpy()))


def arrays(ranked: list[tuple[int, bool]]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    return np.array([score for score, _ in ranked], np.float32), np.array([positive for _, positive in ranked])


@given(ranked)
def test_auc_is_the_share_of_pairs_in_the_right_order(ranked: list[tuple[int, bool]]) -> None:
    wins = [
        Fraction((one > other) * 2 + (one == other), 2)
        for one, positive in ranked
        if positive
        for other, also in ranked
        if not also
    ]
    found = compute_auc(*arrays(ranked))
    assert found is None if not wins else found == pytest.approx(mean(wins), abs=1e-12)


@given(ranked)
def test_average_precision_goes_through_every_threshold(ranked: list[tuple[int, bool]]) -> None:
    positives = sum(positive for _, positive in ranked)
    expected, recall = Fraction(0), Fraction(0)
    for threshold in sorted({score for score, _ in ranked}, reverse=True):
        taken = [positive for score, positive in ranked if score >= threshold]
        now = share(sum(taken), positives)
        expected += (now - recall) * share(sum(taken), len(taken))
        recall = now
    found = compute_average_precision(*arrays(ranked))
    assert found is None if not positives else found == pytest.approx(float(expected), abs=1e-12)


def test_means_over_classes_and_labels() -> None:
    torch.manual_seed(0)
    outputs, labels = torch.randn(50, 3), torch.randint(0, 3, (50,))
    by_class = evaluate(RankingScores(("auc",), is_multi=False), outputs, labels)
    scores = outputs.softmax(1).numpy()
    expected = [compute_auc(scores[:, one], labels.numpy() == one) for one in range(3)]
    assert by_class["auc"] == pytest.approx(np.mean(expected))  # type: ignore[arg-type]
    several = (torch.rand(50, 3) > 0.5).float()
    several[:, 2] = 0
    found = evaluate(RankingScores(("auc", "mean_average_precision"), is_multi=True), outputs, several)
    for name, function in (("auc", compute_auc), ("mean_average_precision", compute_average_precision)):
        # The third label occurs nowhere, and is left out.
        values = [function(outputs[:, one].numpy(), several[:, one].numpy() > 0) for one in range(2)]
        assert found[name] == pytest.approx(np.mean(values))  # type: ignore[arg-type]
    counts = ClassCounts.from_labels(several.numpy() > 0.5, outputs.numpy() > 0)
    means = evaluate(LabelScores(("precision", "recall", "f1", "micro_f1")), outputs, several)
    right = int(((several > 0) & (outputs > 0)).sum())
    assert means["micro_f1"] == pytest.approx(2 * right / (int(several.sum()) + int((outputs > 0).sum())))
    assert means["f1"] == pytest.approx(counts.f1.mean())
    assert counts.count[2] == 0
    assert counts.f1[2] == 0
    assert np.isnan(evaluate(RankingScores(("auc",), is_multi=True), outputs * torch.nan, several)["auc"])


def test_scores_of_numbers() -> None:
    torch.manual_seed(0)
    labels, outputs = torch.randn(40, 2), torch.randn(40, 2)
    labels[:, 1] = 3
    found = evaluate(ValueScores(("rmse", "r2")), outputs, labels)
    errors = (labels - outputs).double()
    assert found["rmse"] == pytest.approx(float(errors.square().mean(0).sqrt().mean()))
    explained = 1 - float(errors[:, 0].square().sum() / (labels[:, 0] - labels[:, 0].mean()).double().square().sum())
    assert found["r2"] == pytest.approx(explained / 2, abs=1e-6)
    exact = evaluate(ValueScores(("rmse", "r2")), labels[:, 1:], labels[:, 1])
    assert exact == {"rmse": 0, "r2": 1}


@pytest.mark.check
def test_scikit_learn_has_the_same_values() -> None:
    from sklearn import metrics

    torch.manual_seed(0)
    outputs, labels = torch.randn(200, 5), torch.randint(0, 5, (200,))
    found = evaluate(ClassScores(("precision", "recall", "f1", "balanced_accuracy"), 5), outputs, labels)
    predicted = outputs.argmax(1)
    expected = metrics.precision_recall_fscore_support(labels, predicted, average="macro", zero_division=0)[:3]
    assert list(found.values()) == pytest.approx([*expected, metrics.balanced_accuracy_score(labels, predicted)])
    several = (torch.rand(200, 5) > 0.7).float()
    ranking = evaluate(RankingScores(("auc", "mean_average_precision"), is_multi=True), outputs, several)
    assert ranking["auc"] == pytest.approx(metrics.roc_auc_score(several, outputs))
    assert ranking["mean_average_precision"] == pytest.approx(metrics.average_precision_score(several, outputs))
    values = evaluate(ValueScores(("rmse", "r2")), outputs, several)
    assert values["r2"] == pytest.approx(metrics.r2_score(several, outputs))
    assert values["rmse"] == pytest.approx(metrics.root_mean_squared_error(several, outputs))
