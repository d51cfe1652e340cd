"""The user's own learning-rate schedule by import path: a factor as a function of the epoch, checked before the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.core.errors import RecipeError
from headway.core.user_code import check_arguments, import_user_object, name_user_errors

FACTORY, ARGS = "schedule.factory", "schedule.args"
TRIAL_POINTS = 600
"""Moments of a run at which the factor is tried; `headway schedule` draws as many."""


def build_own_curve(
    path: str, arguments: Mapping[str, Any], *, total: int, epoch: int, start: int
) -> Callable[[int], float]:
    """Builds the user's factor as a function of the position (samples served).

    Args:
        path: import path of the user's factory.
        arguments: its keyword arguments.
        total: samples that the run serves.
        epoch: samples of one epoch.
        start: position at which the warm-up ends.

    Raises:
        RecipeError: there is no such factory, or its function gives no finite factor of at least 0, or two for one
            epoch.
        UserCodeError: it failed; the cause carries its traceback.
    """
    factory = import_user_object(path, base=Path(), what=FACTORY)
    if not callable(factory):
        raise RecipeError(f"{path!r} is a {type(factory).__name__}, no function", where=FACTORY)
    epochs = total / epoch
    check_arguments(factory, path, epochs, arguments=arguments, where=ARGS)
    with name_user_errors(path, FACTORY):
        function = factory(epochs, **arguments)
    if not callable(function):
        what = f"{path!r} returned a {type(function).__name__}, no function of the epoch"
        raise RecipeError(what, where=FACTORY, fix="Return a function: return lambda epoch: 1 - epoch / epochs.")

    def compute_factor(position: int) -> float:
        with name_user_errors(path, FACTORY):
            value = function(position / epoch)
            factor = float(value)
        if not (math.isfinite(factor) and factor >= 0):
            what = f"{path!r} gives the factor {factor:g} at epoch {position / epoch:.4g}"
            raise RecipeError(what, where=FACTORY, fix="Return a finite number of at least 0; lr is multiplied by it.")
        return factor

    positions = _list_trial_positions(start, total)
    first = [compute_factor(position) for position in positions]
    # Backwards: a function that counts its calls or keeps its last value gives other factors.
    second = [compute_factor(position) for position in reversed(positions)]
    for position, one, other in zip(positions, first, reversed(second), strict=True):
        if one != other:
            what = f"{path!r} gives {one:g} and then {other:g} at epoch {position / epoch:.4g}"
            fix = "Let the factor depend on the epoch alone, so that a resumed run gets the same ones."
            raise RecipeError(what, where=FACTORY, fix=fix)
    return compute_factor


def find_peak(curve: Callable[[int], float], *, start: int, total: int) -> int:
    """Returns the position with the largest factor among evenly spaced ones."""
    return max(_list_trial_positions(start, total), key=curve)


def _list_trial_positions(start: int, total: int) -> list[int]:
    count = min(TRIAL_POINTS, max(total - start, 1))
    return [start + (total - start) * index // count for index in range(count + 1)]
