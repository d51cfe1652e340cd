"""The trials of a sweep: their recipes, the steps of their rungs, and the probe that looks at the recipe first."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, final

from headway.core.errors import RecipeError, suggest_nearest
from headway.core.recipe import LoadedRecipe
from headway.core.user_code import import_user_object, read_parameters
from headway.setup.build import build_setup
from headway.setup.checks import check_network, is_share
from headway.setup.first_batch import load_first_batch
from headway.setup.rates import plan_steps, resolve_batch, resolve_rates
from headway.setup.recipe import TrainRecipe
from headway.setup.task import reaches_goal
from headway.sweep.cohort import Assignment
from headway.sweep.sweep_folder import SweepRecipe
from headway.sweep.trial_recipe import build_trial_recipe
from headway.training.run_steps import separate_checkpoints

PINNED_KEYS = ("device", "precision", "data", "augment")
"""Parts of a recipe whose `auto` is decided once for all trials, so that they differ in the parameters alone."""


def count_steps(loaded: LoadedRecipe[TrainRecipe], samples: int) -> int:
    """Returns the steps of a full training."""
    _, steps = plan_steps(resolve_rates(resolve_batch(loaded, 1)).recipe, samples)
    return steps


def find_step(level: Fraction, steps: int) -> int:
    """Returns the step at which a trial has done a fraction of its training."""
    return max(1, math.ceil(level * steps))


def build_assignment(
    settings: SweepRecipe,
    loaded: LoadedRecipe[TrainRecipe],
    trial: int,
    values: Mapping[str, Any],
    levels: tuple[Fraction, ...],
    folder: Path,
) -> Assignment:
    """Returns the full training of a trial.

    Args:
        levels: the levels at which the trial may be compared with others.

    Raises:
        RecipeError: the recipe refuses the values.
    """
    own = separate_checkpoints(build_trial_recipe(loaded, trial, values), str(trial), "each trial has its own")
    steps = count_steps(own, settings.samples)
    # The recipe of the trial has them, so that a training of it alone evaluates at the same steps.
    at = sorted({find_step(level, steps) for level in levels} - {steps})
    if at:
        own = own.resolve("evaluate.at_steps", at, "rungs of the sweep")
    return Assignment(trial=trial, folder=folder, loaded=own, until=steps)


@final
@dataclass(frozen=True, kw_only=True)
class Probe:
    """Facts about recipe, data and machine that a first look has found.

    Attributes:
        loaded: the recipe, with what is decided once for all trials.
        samples: size of the training set.
        objective: the metric by which trials are compared.
        higher_is_better: its direction.
        is_share: it lies between 0 and 1.
    """

    loaded: LoadedRecipe[TrainRecipe]
    samples: int
    objective: str
    higher_is_better: bool
    is_share: bool


def probe_recipe(
    loaded: LoadedRecipe[TrainRecipe],
    objective: str | None,
    varied: Collection[str],
    origins: Mapping[str, str] | None = None,
) -> Probe:
    """Builds the base recipe once, and decides what is the same for all trials.

    Args:
        objective: metric by which trials are compared; None: the primary one of the task.
        varied: the keys that differ between trials.
        origins: file and line of the keys of the space, for messages; see `LoadedRecipe`.

    Raises:
        RecipeError: no evaluation has the objective, the recipe has no evaluation set, or the network's factory lacks
            an argument.
    """
    _check_arguments(loaded, varied)
    setup = build_setup(loaded)
    with closing(setup.inputs):
        if setup.eval is None:
            what = "trials are compared on an evaluation set, and the recipe names none"
            raise RecipeError(what, where="data.eval", fix="Name one; headway pack --split 0.1 makes one.")
        first = load_first_batch(setup.inputs, setup.loaded.recipe, setup.augment)
        names = check_network(setup.model, *first.take(2), setup.task, setup.precision)
        names += [name for metric in setup.task.set_metrics for name in metric.names if name not in names]
        objective = objective or setup.task.primary
        if objective not in names:
            what = f"objective: no evaluation of this recipe has the metric {objective!r}"
            raise RecipeError(
                what,
                where="" if origins is None else origins.get("objective", "").removeprefix("default"),
                fix=suggest_nearest(objective, names),
            )
        before, pinned = dict(loaded.list_leaves()), dict[str, tuple[Any, str]]()
        for key, value in setup.loaded.list_leaves():
            is_pinned = any(key == part or key.startswith(f"{part}.") for part in PINNED_KEYS)
            is_varied = any(key == name or name.startswith(f"{key}.") for name in varied)
            if is_pinned and not is_varied and value != before.get(key):
                pinned[key] = (value, setup.loaded.origins[key].removeprefix("auto: "))
        return Probe(
            loaded=loaded.resolve_all(pinned) if pinned else loaded,
            samples=setup.epoch,
            objective=objective,
            # 2 reaches a goal of 1 if higher is better.
            higher_is_better=reaches_goal(setup.task, objective, 2.0, 1.0),
            is_share=is_share(objective, setup.recipe),
        )


def _check_arguments(loaded: LoadedRecipe[TrainRecipe], varied: Collection[str]) -> None:
    """Raises RecipeError if the network's factory lacks an argument that differs between trials."""
    path = loaded.recipe.model.factory
    names = [key.split(".")[2] for key in varied if key.startswith("model.args.")]
    # A name of ours, or other factories in other trials.
    if not names or "model.factory" in varied or ":" not in path:
        return
    parameters = read_parameters(import_user_object(path, base=loaded.base, what="model.factory"))
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    for name in names:
        if parameters and name not in parameters:
            what = f"{path!r} has no argument {name!r}"
            raise RecipeError(what, where=f"parameters.model.args.{name}", fix=suggest_nearest(name, parameters))
