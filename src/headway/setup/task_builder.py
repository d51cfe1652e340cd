"""Builds the task of a recipe: a built-in or a user's one, with the loss and the metrics that the recipe adds."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

from headway.core.errors import HeadwayError, RecipeError, UserCodeError, suggest_nearest
from headway.core.user_code import import_user_object
from headway.data.columns import LabelKind
from headway.setup.composed_task import ComposedTask
from headway.setup.loss_catalog import build_loss
from headway.setup.metric_catalog import build_metrics
from headway.setup.recipe import TaskRecipe
from headway.setup.task import Classification, MultiLabel, Regression, TargetSpec, Task

BUILT_IN: Mapping[LabelKind, type[Task]] = {"class": Classification, "multi": MultiLabel, "value": Regression}
"""The task that `auto` stands for, by the kind of labels."""


def build_task(recipe: TaskRecipe, target: TargetSpec, base: Path) -> Task:
    """Builds the task of a recipe, with the loss and the metrics that the recipe adds to it.

    Raises:
        RecipeError: there is no such task, loss or metric, its arguments do not fit, or the labels are of another kind.
        UserCodeError: the user's factory failed; the cause carries its traceback.
    """
    task = _build_inner_task(recipe, target, base)
    if recipe.loss is None and not recipe.metrics and recipe.primary is None:
        return task
    if recipe.loss is not None and isinstance(task, Classification) and "label_smoothing" in recipe.args:
        what = "label_smoothing belongs to the loss that task.loss replaces"
        fix = "Write it into task.loss_args." if recipe.loss == "cross_entropy" else "Remove it, or task.loss."
        raise RecipeError(what, where="task.args.label_smoothing", fix=fix)
    metrics = build_metrics(recipe.metrics, target, task.outputs, base)
    return ComposedTask(
        task,
        target,
        loss=None if recipe.loss is None else build_loss(recipe.loss, recipe.loss_args, target, task.outputs, base),
        metrics=metrics,
        primary=recipe.primary,
    )


def _build_inner_task(recipe: TaskRecipe, target: TargetSpec, base: Path) -> Task:
    if recipe.factory == "auto":
        factory: Any = BUILT_IN[target.kind]
    else:
        factory = import_user_object(recipe.factory, base=base, what="task.factory")
    # A wrong argument of a built-in task is a mistake in the recipe; in a user's task it is one in the code.
    is_built_in = isinstance(factory, type) and factory.__module__ == Task.__module__
    try:
        task = factory(target, **recipe.args)
    except HeadwayError:
        raise
    # Most often an argument that the task does not have.
    except TypeError as error:
        if is_built_in:
            # The misspelt argument, if there is one, with the nearest name as the fix.
            unknown_arguments = [key for key in recipe.args if key not in (parameters := signature(factory).parameters)]
            fix = (
                suggest_nearest(unknown_arguments[0], [name for name in parameters if name != "target"])
                if unknown_arguments
                else ""
            )
            raise RecipeError(str(error).partition(") ")[2] or str(error), where="task.args", fix=fix) from None
        raise UserCodeError(f"{recipe.factory!r} failed: {error}", where="task") from error
    except Exception as error:
        raise UserCodeError(f"{recipe.factory!r} failed: {type(error).__name__}: {error}", where="task") from error
    if not isinstance(task, Task):
        fix = "Derive its class from headway.setup.task.Task."
        raise RecipeError(f"{recipe.factory!r} gave a {type(task).__name__}, no Task", where="task.factory", fix=fix)
    return task
