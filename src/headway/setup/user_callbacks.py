"""Builds the callbacks of a run: those of the recipe by import path, and those that a Python program gives."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.errors import RecipeError, UserCodeError, suggest_nearest
from headway.core.user_code import GIVEN, import_user_object
from headway.data.workers.user_failure import find_user_place
from headway.setup.callback_recipe import CallbackRecipe

HOOKS = ("on_start", "on_step", "on_evaluate", "on_epoch", "on_end")
"""Methods of a callback, in the order of a run."""


@final
@dataclass(frozen=True, slots=True)
class NamedCallback:
    """A callback and the name by which messages and checkpoints call it: its import path, or `python:` and its class.

    Attributes:
        place: `file:line` of its class.
    """

    name: str
    callback: Any
    place: str


def build_callbacks(recipes: Sequence[CallbackRecipe], base: Path) -> list[NamedCallback]:
    """Imports and builds the callbacks of a recipe.

    Args:
        base: folder that the paths of files are relative to.

    Raises:
        RecipeError: a path names nothing, its arguments do not fit, or the object has no method of a callback.
        UserCodeError: a factory failed.
    """
    callbacks = []
    for index, recipe in enumerate(recipes):
        where = f"callbacks.{index}"
        factory = import_user_object(recipe.factory, base=base, what=where)
        callback = factory
        if callable(factory):
            _check_arguments(factory, recipe, where)
            try:
                callback = factory(**recipe.args)
            except Exception as error:
                what = f"{recipe.factory!r} failed: {type(error).__name__}: {error}"
                raise UserCodeError(what, where=f"{where}, {find_user_place(error)}") from error
        elif recipe.args:
            what = f"{recipe.factory!r} is an object already and takes no arguments"
            raise RecipeError(what, where=where, fix="Name its class, or remove args.")
        _check_hooks(callback, recipe.factory, where)
        callbacks.append(NamedCallback(recipe.factory, callback, _find_place(callback)))
    return callbacks


def name_callbacks(objects: Sequence[Any]) -> list[NamedCallback]:
    """Names the callbacks that a Python program gives. Raises RecipeError: one has no method of a callback."""
    callbacks = []
    for index, callback in enumerate(objects):
        # A class in place of its object is the likeliest mistake: its methods are there, and fail when called.
        kind = callback if isinstance(callback, type) else type(callback)
        where = f"callbacks[{index}]"
        if isinstance(callback, type):
            raise RecipeError(
                f"{kind.__name__} is a class, not an instance", where=where, fix=f"Give {kind.__name__}()."
            )
        name = f"{GIVEN}{kind.__module__}.{kind.__qualname__}"
        _check_hooks(callback, name, where)
        callbacks.append(NamedCallback(name, callback, _find_place(callback)))
    return callbacks


def _check_arguments(factory: Any, recipe: CallbackRecipe, where: str) -> None:
    try:
        # Before the call, so that a TypeError from inside the factory is not taken for a wrong argument.
        inspect.signature(factory).bind(**recipe.args)
    except TypeError as error:
        raise RecipeError(f"{recipe.factory!r} cannot be called: {error}", where=f"{where}.args") from None
    # Some functions written in C have no signature.
    except ValueError:
        return


def _check_hooks(callback: Any, name: str, where: str) -> None:
    """Raises RecipeError if a callback has no hook, a misspelt one, or one that does not take one argument."""
    public = [one for one in dir(callback) if one.startswith("on_") and callable(getattr(callback, one, None))]
    # Lightning's on_train_epoch_end would never be called.
    for method in public:
        if method not in HOOKS:
            fix = suggest_nearest(method, HOOKS, only_close=True) or f"A run calls {', '.join(HOOKS)}."
            raise RecipeError(f"no run calls the method {method!r} of {name!r}", where=where, fix=fix)
    if not public:
        fix = f"Give it one or more of {', '.join(HOOKS)}."
        raise RecipeError(f"{name!r} has no method of a callback", where=where, fix=fix)
    for method in public:
        try:
            inspect.signature(getattr(callback, method)).bind(None)
        except TypeError:
            what = f"the method {method!r} of {name!r} does not take one argument"
            raise RecipeError(what, where=where, fix=f"Write def {method}(self, run).") from None
        except ValueError:
            continue


def _find_place(callback: Any) -> str:
    kind = type(callback)
    try:
        return f"{inspect.getsourcefile(kind)}:{inspect.getsourcelines(kind)[1]}"
    # A class of an interactive session has no file.
    except (OSError, TypeError):
        return kind.__qualname__
