"""headway.train and headway.resume: train a recipe from a Python program or a notebook."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Never

import torch

from headway.api.given_model import MODEL_KEY, leave_out_network_keys, name_model
from headway.api.run import Run
from headway.core.errors import RecipeError, UsageError, suggest_nearest
from headway.core.interface import use_python_names
from headway.core.messages import show_messages
from headway.core.recipe import LoadedRecipe, build_recipe
from headway.core.recipe_yaml import format_overrides
from headway.core.user_code import give_objects
from headway.setup.recipe import TrainRecipe
from headway.training import runs
from headway.training.progress import hide_progress


@use_python_names()
def train(
    recipe: str | os.PathLike[str] | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    model: torch.nn.Module | None = None,
    callbacks: Sequence[Any] = (),
    run: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    **unknown: Never,
) -> Run:
    """Trains a recipe into a new run folder, as `headway train` does.

    Ctrl-C ends it at the next step: its state is saved, and the returned run is not `finished`.

    Args:
        recipe: path of a YAML recipe, or a mapping of the same form.
        overrides: values by dotted key, such as `{"optimizer.lr": 0.1}`.
        model: your network, on the CPU, in place of `model.factory`. It is trained in place. What the recipe says about
            the network of its factory, such as `model.weights`, is left out, unless `overrides` has it.
        callbacks: objects with some of `on_start`, `on_step`, `on_evaluate`, `on_epoch` and `on_end`, which are called
            after those of the recipe.
        run: run folder to create; None: runs/NAME.
        progress: show messages and progress on standard error; None: in a terminal and in a notebook.

    Raises:
        HeadwayError: recipe, data or network cannot be used, or the run failed; the message says how to fix it.
    """
    _refuse_keywords(unknown, "train", recipe, ("overrides", "model", "callbacks", "run", "progress"))
    with _give_model(model), _show_progress(progress):
        loaded = _load_recipe(recipe, overrides or {}, model)
        result = runs.train_recipe(loaded, None if run is None else Path(run), callbacks)
    return Run(result.run.folder, model=model)


@use_python_names()
def resume(
    run: str | os.PathLike[str] | Run,
    overrides: Mapping[str, Any] | None = None,
    *,
    model: torch.nn.Module | None = None,
    callbacks: Sequence[Any] = (),
    progress: bool | None = None,
    **unknown: Never,
) -> Run:
    """Continues a run from its newest good checkpoint, as `headway train --resume` does; returns the run.

    Args:
        run: a run, or its folder.
        overrides: values of keys that may change, by dotted key, such as `{"epochs": 40}`, which extends a run.
        callbacks: see `train`; their states come back from the checkpoint.
        model: the network, if the run was given one; its weights are replaced.
        progress: see `train`.

    Raises:
        UsageError: there is no such run. CheckpointError: every checkpoint is damaged.
    """
    folder = run.folder if isinstance(run, Run) else Path(run)
    _refuse_keywords(unknown, "resume", str(folder), ("overrides", "model", "callbacks", "progress"))
    # Building the setup calls the factory, so the network must be given until the run has ended.
    with _give_model(model), _show_progress(progress):
        runs.resume(folder, callbacks, format_overrides(overrides or {}))
    return Run(folder, model=model)


def _load_recipe(
    recipe: str | os.PathLike[str] | Mapping[str, Any], overrides: Mapping[str, Any], model: torch.nn.Module | None
) -> LoadedRecipe[TrainRecipe]:
    # A copy: the name of the network is no override of the caller's.
    changes = dict(overrides)
    if model is not None:
        _expect(model, torch.nn.Module, "a network is a torch.nn.Module", "Or name its factory in the recipe.")
        # The recipe names the network by a path that no import finds, because recipe.yaml must hold plain values. So a
        # run without its network says that it was given by a program.
        changes[MODEL_KEY] = name_model(model)
    # As texts of the command line, so that both are read by the same rules.
    texts = format_overrides(changes)
    if isinstance(recipe, Mapping):
        loaded = build_recipe(recipe, texts, TrainRecipe)
    else:
        example = 'Give for example "photos.yaml", or {"data": {...}, "model": {...}, ...}.'
        _expect(recipe, (str, os.PathLike), "a recipe is a path or a mapping", example)
        loaded = runs.load_recipe(Path(recipe), texts)
    return loaded if model is None else leave_out_network_keys(loaded, recipe, model)


def _refuse_keywords(unknown: Mapping[str, Any], function: str, first: Any, names: Sequence[str]) -> None:
    """Raises UsageError if there are keyword arguments that a function does not have: mostly keys of the recipe."""
    if not unknown:
        return
    key, values = next(iter(unknown)), ", ".join(f'"{key}": {value!r}' for key, value in unknown.items())
    path = repr(os.fspath(first)) if isinstance(first, str | os.PathLike) else "recipe"
    fix = suggest_nearest(key, names, only_close=True)
    fix = fix or f"Values of the recipe go into a mapping: headway.{function}({path}, {{{values}}})."
    raise UsageError(f"headway.{function} has no argument {key!r}", fix=fix)


def _expect(value: object, kinds: type | tuple[type, ...], what: str, fix: str) -> None:
    if not isinstance(value, kinds):
        raise RecipeError(f"{what}, not {type(value).__name__}", fix=fix)


@contextmanager
def _give_model(model: torch.nn.Module | None) -> Iterator[None]:
    """Lets the recipe's factory return the network of the program, inside the block."""
    with give_objects({} if model is None else {name_model(model): lambda: model}):
        yield


@contextmanager
def _show_progress(progress: bool | None) -> Iterator[None]:
    """Shows messages and progress inside the block, unless the program handles Headway's messages itself."""
    log = logging.getLogger("headway")
    # A notebook's standard error is no terminal, and shows progress all the same.
    shown = progress if progress is not None else sys.stderr.isatty() or "ipykernel" in sys.modules
    before = log.handlers, log.level, log.propagate
    # `show_messages` replaces the handlers, so those of the program would be silent during the run.
    if shown and not log.handlers:
        show_messages()
    try:
        with hide_progress(not shown):
            yield
    finally:
        log.handlers, log.level, log.propagate = before
