"""The losses by name: their values by definition, their gradients, their convexity, and the labels that they take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import RecipeError, UsageError
from headway.data.columns import LabelKind
from headway.setup.loss_catalog import LOSSES, SYNONYMS, build_named_loss
from headway.setup.recipe import TaskRecipe
from headway.setup.task import TargetSpec
from headway.setup.task_builder import build_task

WIDTH = 4
Row = Sequence[float]


def entropy(outputs: Row, shares: Row) -> float:
    """Shares of the classes, of which no exponential of a large output is taken."""
    most = max(outputs)
    total = most + math.log(math.fsum(math.exp(one - most) for one in outputs))
    return math.fsum(share * (total - one) for share, one in zip(shares, outputs, strict=True))


def lead(outputs: Row, shares: Row, margin: float) -> float:
    return math.fsum(
        share * max(0.0, margin + max(*outputs[:one], *outputs[one + 1 :]) - outputs[one])
        for one, share in enumerate(shares)
    )


def mean(outputs: Row, labels: Row, of_one: Callable[[float, float], float]) -> float:
    return math.fsum(map(of_one, outputs, labels)) / len(outputs)


def binary(output: float, label: float) -> float:
    return max(output, 0.0) - output * label + math.log1p(math.exp(-abs(output)))


def bend(error: float, delta: float) -> float:
    return error**2 / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)


CASES: dict[str, tuple[str, LabelKind, dict[str, Any], Callable[[Row, Row], float]]] = {
    "cross entropy": ("cross_entropy", "class", {}, entropy),
    "smoothed": (
        *("cross_entropy", "class", {"label_smoothing": 0.2}),
        lambda outputs, shares: entropy(outputs, [0.8 * share + 0.2 / WIDTH for share in shares]),
    ),
    "binary": ("cross_entropy", "multi", {}, lambda outputs, labels: mean(outputs, labels, binary)),
    "hinge": ("hinge", "class", {"margin": 2.0}, lambda outputs, shares: lead(outputs, shares, 2)),
    "hinge of labels": (
        *("hinge", "multi", {}),
        lambda outputs, labels: mean(outputs, labels, lambda o, label: max(0, 1 - (o if label else -o))),
    ),
    "l1": ("l1", "value", {}, lambda outputs, labels: mean(outputs, labels, lambda o, label: abs(o - label))),
    "l2": ("l2", "value", {}, lambda outputs, labels: mean(outputs, labels, lambda o, label: (o - label) ** 2)),
    "huber": (
        *("huber", "value", {"delta": 1.5}),
        lambda outputs, labels: mean(outputs, labels, lambda o, label: bend(o - label, 1.5)),
    ),
    "rmse": ("rmse", "value", {}, lambda outputs, labels: math.dist(outputs, labels) / math.sqrt(WIDTH)),
}
# Whole numbers make ties, and errors that are 0.
numbers = st.lists(st.one_of(st.integers(-3, 3).map(float), st.floats(-40, 40)), min_size=WIDTH, max_size=WIDTH)


def draw_labels(data: st.DataObject, kind: LabelKind) -> tuple[torch.Tensor, Row]:
    """Labels of one sample as a batch has them, and as a row: shares of the classes, zeros and ones, or numbers."""
    if kind == "value":
        row = data.draw(numbers)
        return torch.tensor([row], dtype=torch.float64), row
    if kind == "multi":
        row = [float(data.draw(st.booleans())) for _ in range(WIDTH)]
        return torch.tensor([row], dtype=torch.float64), row
    label, other, share = data.draw(st.tuples(st.integers(0, WIDTH - 1), st.integers(0, WIDTH - 1), st.floats(0, 1)))
    row = [share * (one == label) + (1 - share) * (one == other) for one in range(WIDTH)]
    # The number of a class, or as mixup blends two.
    return (torch.tensor([label]) if label == other else torch.tensor([row], dtype=torch.float64)), row


@pytest.mark.parametrize("case", CASES)
@given(data=st.data(), one=numbers, other=numbers, share=st.floats(0, 1))
def test_each_loss_is_its_definition_and_convex_in_the_outputs(
    case: str, data: st.DataObject, one: Row, other: Row, share: float
) -> None:
    """f(s x + (1 - s) y) <= s f(x) + (1 - s) f(y); and f(y) >= f(x) + f'(x) (y - x), which a wrong gradient breaks."""
    name, kind, arguments, reference = CASES[case]
    loss, (labels, row) = build_named_loss(name, kind, arguments), draw_labels(data, kind)
    x, y = (torch.tensor([values], dtype=torch.float64) for values in (one, other))
    x.requires_grad_()
    at_x, at_y = loss(x, labels), loss(y, labels)
    assert at_x.shape == (1,)
    assert at_x.item() == pytest.approx(reference(one, row), rel=1e-12, abs=1e-12)
    between = loss(share * x + (1 - share) * y, labels)
    rounding = 1e-12 * (1 + abs(at_x.item()) + abs(at_y.item()))
    assert between.item() <= share * at_x.item() + (1 - share) * at_y.item() + rounding
    (gradient,) = torch.autograd.grad(at_x.sum(), x)
    assert (
        at_y.item() >= at_x.item() + ((y - x) * gradient).sum().item() - rounding - 1e-12 * (y - x).abs().sum().item()
    )


def test_each_sample_of_a_batch_has_its_own_loss_and_a_finite_gradient_at_zero() -> None:
    generator = torch.Generator().manual_seed(0)
    for name, kind, arguments, _ in CASES.values():
        loss, outputs = build_named_loss(name, kind, arguments), torch.randn(5, WIDTH, generator=generator)
        labels = (
            torch.arange(5) % WIDTH if kind == "class" else (torch.randn(5, WIDTH, generator=generator) > 0).float()
        )
        one_by_one = [loss(outputs[k : k + 1], labels[k : k + 1]) for k in range(5)]
        torch.testing.assert_close(loss(outputs, labels), torch.cat(one_by_one))
        if kind == "value":
            exact = outputs.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(loss(exact, outputs).sum(), exact)
            assert not gradient.any()
            # One number: the labels of a data set are [b], the outputs [b, 1].
            torch.testing.assert_close(loss(outputs[:, :1], labels[:, 0]), loss(outputs[:, :1], labels[:, :1]))


CLASSES = TargetSpec(kind="class", classes=("cat", "dog", "owl"), numbers=1)
TARGETS = {
    "class": CLASSES,
    "one class": TargetSpec(kind="class", classes=("cat",), numbers=1),
    "multi": TargetSpec(kind="multi", classes=("red", "big"), numbers=2),
    "value": TargetSpec(kind="value", classes=(), numbers=1),
}
REFUSED = {
    "numbers of classes": ("value", {"loss": "cross_entropy"}, "'cross_entropy' takes labels that are classes or sets"),
    "a fix": ("value", {"loss": "hinge"}, "and these are numbers. Choose huber or l1 or l2 or rmse, or remove"),
    "classes of numbers": (
        *("class", {"loss": "rmse"}),
        "task.loss: 'rmse' takes labels that are numbers, and these are classes. Choose cross_entropy or hinge, or",
    ),
    "labels of numbers": ("multi", {"loss": "l2"}, "these are sets of names. Choose cross_entropy or hinge"),
    "one class": ("one class", {"loss": "hinge"}, "'hinge' compares two classes, and the data has one."),
    "misspelt": (
        "value",
        {"loss": "hubr"},
        "there is no loss 'hubr'. Did you mean 'huber'? Or name an import path, su",
    ),
    "another name": ("value", {"loss": "MSE_loss"}, "there is no loss 'MSE_loss'. Did you mean 'l2'?"),
    "another name that does not suit": ("class", {"loss": "mse"}, "no loss 'mse'. Known here: cross_entropy, hinge."),
    "an argument": (
        *("value", {"loss": "huber", "loss_args": {"dela": 1}}),
        "task.loss_args.dela: 'huber' has no argument 'dela'. Did you mean 'delta'?",
    ),
    "an argument of none": ("value", {"loss": "l1", "loss_args": {"delta": 1}}, "'l1' has no argument 'delta'"),
    "of labels": ("multi", {"loss": "cross_entropy", "loss_args": {"label_smoothing": 0.1}}, "has no argument 'label_"),
    "zero": ("value", {"loss": "huber", "loss_args": {"delta": 0}}, "delta: 0 is not a number above 0. Set 1.0."),
    "infinite": ("class", {"loss": "hinge", "loss_args": {"margin": math.inf}}, "margin: inf is not a number above 0."),
    "a text": ("class", {"loss": "hinge", "loss_args": {"margin": "1"}}, "margin: '1' is not a number above 0."),
    "a share": (
        *("class", {"loss": "cross_entropy", "loss_args": {"label_smoothing": 1}}),
        "task.loss_args.label_smoothing: 1 is not in [0, 1). Set 0.1.",
    ),
    "smoothing of the task": (
        *("class", {"loss": "cross_entropy", "args": {"label_smoothing": 0.1}}),
        "label_smoothing belongs to the loss that task.loss replaces. Write it into task.loss_args.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_labels_and_arguments_that_do_not_suit_are_refused(case: str, tmp_path: Path) -> None:
    target, recipe, expected = REFUSED[case]
    with pytest.raises(RecipeError) as refusal:
        build_task(TaskRecipe.model_validate(recipe), TARGETS[target], tmp_path)
    assert expected in str(refusal.value)


OTHER_OUTPUTS = """
from headway.setup.task import Classification

class Spare(Classification):
    outputs = 5
"""


def test_a_task_with_other_outputs_computes_its_loss_itself(tmp_path: Path) -> None:
    (tmp_path / "spare.py").write_text(OTHER_OUTPUTS)
    with pytest.raises(RecipeError, match=r"'hinge' is for 3 outputs, and the task has 5\. Compute it in the loss\(\)"):
        build_task(TaskRecipe(factory="spare.py:Spare", loss="hinge"), CLASSES, tmp_path)


def test_the_loss_of_a_task_and_those_of_torch_are_the_named_ones() -> None:
    """What a task computes by itself has a name too; an own loss of the shape of the outputs is averaged over them."""
    assert set(SYNONYMS.values()) <= LOSSES.keys()
    outputs = torch.randn(6, 2, generator=torch.Generator().manual_seed(1))
    kind: LabelKind
    for own, name, kind, labels in (
        (None, "cross_entropy", "class", torch.arange(6) % 2),
        (None, "cross_entropy", "multi", torch.ones(6, 2)),
        (None, "l2", "value", torch.zeros(6, 2)),
        ("torch.nn:SmoothL1Loss", "huber", "value", torch.zeros(6, 2)),
    ):
        target = TargetSpec(kind=kind, classes=("a", "b"), numbers=2)
        plain, named = (build_task(TaskRecipe(loss=loss), target, Path()) for loss in (own, name))
        torch.testing.assert_close(plain.loss(outputs, labels), named.loss(outputs, labels))


def test_a_kind_of_labels_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match=r"there is no kind of labels 'vaule'\. Did you mean 'value'\?"):
        build_named_loss("huber", "vaule")  # type: ignore[arg-type]
