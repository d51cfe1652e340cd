"""The loss of a recipe: a built-in one by name, or the user's own by import path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from headway.core.errors import RecipeError, UsageError, suggest_nearest
from headway.core.user_code import check_arguments
from headway.data.columns import LabelKind
from headway.setup import losses
from headway.setup.own_loss import LOSS, PerSample, build_own_loss
from headway.setup.task import LABEL_PHRASES, TargetSpec

LOSSES: Mapping[str, Mapping[LabelKind, PerSample]] = {
    "cross_entropy": {"class": losses.compute_cross_entropy, "multi": losses.compute_binary_cross_entropy},
    "hinge": {"class": losses.compute_hinge, "multi": losses.compute_binary_hinge},
    "huber": {"value": losses.compute_huber},
    "l1": {"value": losses.compute_l1},
    "l2": {"value": losses.compute_l2},
    "rmse": {"value": losses.compute_rmse},
}
"""The built-in losses by name and by the kind of labels that they take."""
SYNONYMS = {
    "absolute_error": "l1",
    "bce": "cross_entropy",
    "mae": "l1",
    "mse": "l2",
    "nll": "cross_entropy",
    "smooth_l1": "huber",
    "squared_error": "l2",
    "svm": "hinge",
}
"""Names that other libraries give these losses."""
OWN_FIX = "Or name an import path, such as my_losses.py:focal."


def build_loss(path: str, arguments: Mapping[str, Any], target: TargetSpec, outputs: int, base: Path) -> PerSample:
    """Builds the loss of each sample from its name or import path.

    Args:
        target: the labels.
        outputs: outputs of the network for a sample.
        base: folder that a file's path is relative to.

    Raises:
        RecipeError: there is no such loss, it does not suit the labels, or its arguments do not fit.
    """
    if ":" in path:
        return build_own_loss(path, arguments, base)
    loss = build_named_loss(path, target.kind, arguments)
    # A user's task may have other outputs, of which nothing is known.
    wanted = target.numbers if target.kind == "value" else len(target.classes)
    if outputs != wanted:
        what = f"{path!r} is for {wanted} outputs, and the task has {outputs}"
        raise RecipeError(what, where=LOSS, fix="Compute it in the loss() of the task.")
    if path == "hinge" and target.kind == "class" and outputs < 2:
        raise RecipeError("'hinge' compares two classes, and the data has one", where=LOSS, fix="Pack more classes.")
    return loss


def build_named_loss(name: str, kind: LabelKind, arguments: Mapping[str, Any] | None = None) -> PerSample:
    """Builds a built-in loss: a function of outputs [b, k] and labels that returns one number for each sample, [b].

    Args:
        name: one of `LOSSES`.
        kind: labels that are a `class`, several labels (`multi`) or numbers (`value`).
        arguments: `delta` of huber, `margin` of hinge, `label_smoothing` of cross_entropy for classes.

    Raises:
        RecipeError: there is no such loss, it does not suit the labels, or an argument does not fit.
        UsageError: there is no such kind of labels.
    """
    if kind not in LABEL_PHRASES:
        raise UsageError(f"there is no kind of labels {kind!r}", fix=suggest_nearest(kind, LABEL_PHRASES))
    suitable = [one for one, functions in LOSSES.items() if kind in functions]
    if name not in LOSSES:
        twin = SYNONYMS.get(name.lower().removesuffix("_loss"))
        fix = f"Did you mean {twin!r}?" if twin in suitable else suggest_nearest(name, suitable)
        raise RecipeError(f"there is no loss {name!r}", where=LOSS, fix=f"{fix} {OWN_FIX}")
    if kind not in LOSSES[name]:
        takes = " or ".join(LABEL_PHRASES[one] for one in LOSSES[name])
        what = f"{name!r} takes labels that are {takes}, and these are {LABEL_PHRASES[kind]}"
        raise RecipeError(what, where=LOSS, fix=f"Choose {' or '.join(suitable)}, or remove task.loss.")
    function, arguments = LOSSES[name][kind], dict(arguments or {})
    check_arguments(function, name, None, None, arguments=arguments, where=f"{LOSS}_args")
    for key, value in arguments.items():
        _check_value(key, value)
    return partial(function, **arguments)


def _check_value(key: str, value: Any) -> None:
    """Raises RecipeError unless the value of an argument makes the loss convex and finite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_share = key == "label_smoothing"
    if not is_number or not (0 <= value < 1 if is_share else 0 < value < float("inf")):
        what = f"{value!r} is not in [0, 1)" if is_share else f"{value!r} is not a number above 0"
        raise RecipeError(what, where=f"{LOSS}_args.{key}", fix=f"Set {0.1 if is_share else 1.0}.")
