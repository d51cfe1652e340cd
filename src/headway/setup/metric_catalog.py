"""The metrics that a recipe adds to a task: built-in ones by name, and the user's own by import path."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, final

import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.errors import RecipeError, UserCodeError, suggest_nearest
from headway.core.user_code import check_arguments, import_user_object, name_user_errors
from headway.data.columns import LabelKind
from headway.setup.losses import compute_l1
from headway.setup.own_loss import PerSample, expect_per_sample
from headway.setup.recipe import MetricRecipe
from headway.setup.set_metrics import ClassScores, LabelScores, RankingScores, SetMetric, ValueScores
from headway.setup.task import LABEL_PHRASES, TargetSpec

COUNTED: dict[LabelKind, tuple[str, ...]] = {
    "class": ("precision", "recall", "f1", "balanced_accuracy"),
    "multi": ("precision", "recall", "f1", "micro_f1"),
    "value": (),
}
"""Metrics that follow from counts of predicted classes, by the kind of labels."""
RANKED: dict[LabelKind, tuple[str, ...]] = {"class": ("auc",), "multi": ("auc", "mean_average_precision"), "value": ()}
"""Metrics that follow from the order of the outputs; all outputs of the set are kept for them."""
OF_VALUES = ("mae", "rmse", "r2")
TOP = re.compile(r"top([1-9]\d*)")
"""Name of the accuracy of the k best classes, such as `top5`."""
SHARES = {"accuracy", "label_accuracy", "exact", *chain(*COUNTED.values(), *RANKED.values())}
"""Metrics of Headway's own that lie between 0 and 1, but for those of `TOP`."""


@final
@dataclass
class AddedMetrics:
    """Metrics beside those of a task.

    Attributes:
        per_sample: functions of outputs and labels by name; the means of their values are reported.
        of_set: metrics of the whole set.
        lower_is_better: names of those that are better when lower.
    """

    per_sample: dict[str, PerSample] = field(default_factory=dict)
    of_set: list[SetMetric] = field(default_factory=list)
    lower_is_better: set[str] = field(default_factory=set)

    def list_names(self) -> list[str]:
        """Lists the names of all metrics."""
        return [*self.per_sample, *(name for metric in self.of_set for name in metric.names)]


def build_metrics(recipes: Sequence[MetricRecipe], target: TargetSpec, outputs: int, base: Path) -> AddedMetrics:
    """Builds the metrics of a recipe.

    Args:
        target: the labels.
        outputs: outputs of the network for a sample.
        base: folder that a file's path is relative to.

    Raises:
        RecipeError: there is no such metric, it does not suit the labels, or two have one name.
        UserCodeError: the user's code failed; the cause carries its traceback.
    """
    added = AddedMetrics()
    built_in = [recipe.name for recipe in recipes if recipe.factory is None]
    for name in built_in:
        _expect_suitable(name, target, outputs)
        if (top := TOP.fullmatch(name)) is not None:
            added.per_sample[name] = partial(_compute_top, count=int(top[1]))
        # Every sample has as many numbers, so the mean of the samples' means is that of the set. It needs no memory of
        # the set, unlike rmse and r2.
        elif name == "mae":
            added.per_sample[name] = compute_l1
            added.lower_is_better.add(name)
    # Metrics of one kind share what they keep of each sample.
    counted = [name for name in built_in if name in COUNTED[target.kind]]
    ranked = [name for name in built_in if name in RANKED[target.kind]]
    of_values = [name for name in built_in if name in ("rmse", "r2")]
    is_multi = target.kind == "multi"
    if counted:
        added.of_set.append(LabelScores(counted) if is_multi else ClassScores(counted, outputs))
    if ranked:
        added.of_set.append(RankingScores(ranked, is_multi=is_multi))
    if of_values:
        added.of_set.append(ValueScores(of_values))
    for recipe in recipes:
        if recipe.factory is not None:
            _add_own(added, recipe, recipe.factory, target, base)
    for metric in added.of_set:
        added.lower_is_better |= metric.lower_is_better
    # The recipe's names are counted as well: two equal functions of a sample are one entry of their dictionary.
    names = added.list_names()
    if twice := sorted({name for name in [*names, *built_in] if names.count(name) > 1 or built_in.count(name) > 1}):
        raise RecipeError(f"two metrics are called {twice[0]!r}", where="task.metrics", fix="Give one another name.")
    return added


def _expect_suitable(name: str, target: TargetSpec, outputs: int) -> None:
    """Raises RecipeError if a built-in metric does not exist, or means nothing for such labels."""
    names = [*COUNTED[target.kind], *RANKED[target.kind], *(OF_VALUES if target.kind == "value" else ())]
    top = TOP.fullmatch(name) if target.kind == "class" else None
    if top is None and name not in names:
        known = ["top5", *names] if target.kind == "class" else names
        what = f"there is no metric {name!r} for labels that are {LABEL_PHRASES[target.kind]}"
        raise RecipeError(what, where="task.metrics", fix=f"{suggest_nearest(name, known)} Or name an import path.")
    # A user's task may have other outputs, of which nothing is known.
    wanted = target.numbers if target.kind == "value" else len(target.classes)
    if outputs != wanted:
        what = f"{name!r} is for {wanted} outputs, and the task has {outputs}"
        raise RecipeError(what, where="task.metrics", fix="Compute it in the metrics() of the task.")
    if top is not None and int(top[1]) >= outputs:
        what = f"{name!r} is always right for {outputs} classes"
        raise RecipeError(what, where="task.metrics", fix=f"Take top{outputs - 1} or less, or remove it.")


def _compute_top(outputs: Tensor, labels: Tensor, *, count: int) -> Tensor:
    return (outputs.topk(count, dim=1).indices == labels[:, None]).any(dim=1).float()


def _add_own(added: AddedMetrics, recipe: MetricRecipe, path: str, target: TargetSpec, base: Path) -> None:
    where = "task.metrics"
    found = import_user_object(path, base=base, what=where)
    if not callable(found):
        raise RecipeError(f"{path!r} is a {type(found).__name__}, no function or SetMetric", where=where)
    if isinstance(found, type) and issubclass(found, SetMetric):
        check_arguments(found, path, target, arguments=recipe.args, where=f"{where}.args")
        with name_user_errors(path, where):
            metric = found(target, **recipe.args)  # type: ignore[call-arg]
        _expect_names(metric, path, recipe.name)
        added.of_set.append(metric)
        names = list(metric.names)
    # A class can be called like a function, and would fail only in the first evaluation.
    elif isinstance(found, type):
        what = f"{path!r} is a class that is not derived from SetMetric"
        fix = "Derive it from headway.setup.set_metrics.SetMetric, or name a function."
        raise RecipeError(what, where=where, fix=fix)
    else:
        # The two None stand for outputs and labels, whose values do not matter to the check.
        check_arguments(found, path, None, None, arguments=recipe.args, where=f"{where}.args")
        names = [recipe.name or path.rpartition(":")[2].rpartition(".")[2]]

        def compute_values(outputs: Tensor, labels: Tensor) -> Tensor:
            with name_user_errors(path, where):
                values = found(outputs, labels, **recipe.args)
            return expect_per_sample(values, outputs, path, where)

        # The second one would replace the first silently, before `build_metrics` compares the names.
        if names[0] in added.per_sample:
            raise RecipeError(f"two metrics are called {names[0]!r}", where=where, fix="Give one another name.")
        added.per_sample[names[0]] = compute_values
    if recipe.higher_is_better is False:
        added.lower_is_better |= set(names)


def _expect_names(metric: SetMetric, path: str, name: str) -> None:
    names = getattr(metric, "names", None)
    if not isinstance(names, list | tuple) or not names or not all(isinstance(one, str) for one in names):
        fix = 'Set it in the class, for example names = ("kappa",).'
        raise RecipeError(f"{path!r} has no names of metrics, but {names!r}", where="task.metrics", fix=fix)
    if name:
        fix = f"Remove name: {name}, or change its names."
        raise RecipeError(f"{path!r} names its metrics itself", where="task.metrics", fix=fix)


def compute_set_metrics(metrics: Sequence[SetMetric], collected: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Computes the metrics of a set from the numbers that were collected of its samples, an array for each metric.

    Raises:
        RecipeError: a metric gives other names than it says, or no numbers.
        UserCodeError: the user's code failed; the cause carries its traceback.
    """
    out: dict[str, float] = {}
    for metric, kept in zip(metrics, collected, strict=True):
        kind = type(metric).__name__
        try:
            # Both lines may fail by the user's code: it may return no mapping, or values that are no numbers.
            values = dict(metric.compute(kept))
            out |= {name: float(value) for name, value in values.items()}
        except Exception as error:
            raise UserCodeError(f"{kind}.compute failed: {type(error).__name__}: {error}", where="task") from error
        if set(values) != set(metric.names):
            what = f"{kind}.compute gives {', '.join(values)}, and its names are {', '.join(metric.names)}"
            raise RecipeError(what, where="task", fix="Return a number for each of its names.")
    return out


def collect_set_metrics(metrics: Sequence[SetMetric], outputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Returns the numbers that each metric keeps of a batch, [b] or [b, k].

    Raises:
        RecipeError: a metric keeps another shape. UserCodeError: the user's code failed.
    """
    found = []
    for metric in metrics:
        kind = type(metric).__name__
        with name_user_errors(f"{kind}.collect", "task"):
            kept = metric.collect(outputs, labels)
        if not isinstance(kept, torch.Tensor) or kept.ndim not in (1, 2) or len(kept) != len(outputs):
            given = f"the shape {tuple(kept.shape)}" if isinstance(kept, torch.Tensor) else f"a {type(kept).__name__}"
            what = f"{kind}.collect gives {given} for {len(outputs)} samples"
            raise RecipeError(what, where="task", fix=f"Return [{len(outputs)}] or [{len(outputs)}, k].")
        found.append(kept)
    return found
