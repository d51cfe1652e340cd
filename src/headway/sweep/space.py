"""The search space of a sweep: the values of trial n, as a pure function of the seed and n."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.random_keys import draw_uniform, make_keys
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.core.text_format import pluralise
from headway.sweep.grid import Grid
from headway.sweep.space_recipe import SpaceRecipe

RANDOM_TRIALS = 10
"""Trials that `method: tpe` draws at random before it looks at scores."""
_FIX = "Write one with, for example, parameters: {optimizer.lr: {log: [0.001, 1.0]}}."


def read_space(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe[SpaceRecipe]:
    """Reads the file of a search space.

    Args:
        overrides: `method=sobol` or `objective=loss`.

    Raises:
        RecipeError: there is no such file, a parameter is no key of a recipe, or its values are impossible.
    """
    return read_recipe(path, overrides, SpaceRecipe, kind="space", fix=_FIX)


@final
class Space:
    """Chooses the values of each trial. Pure: the same on every machine, in every order, and after every restart.

    Attributes:
        recipe: the space as its file has it.
        keys: its parameters, sorted; those with conditions behind the ones that these name.
    """

    def __init__(self, recipe: SpaceRecipe) -> None:
        self.recipe = recipe
        self.keys = recipe.sort_keys()
        self._grid = Grid(recipe) if recipe.method == "grid" else None

    @property
    def size(self) -> int | None:
        """Number of trials of a grid; None: the method has no end."""
        return None if self._grid is None else self._grid.size

    def draw(self, seed: int, trial: int) -> dict[str, Any]:
        """Returns the values of a trial by dotted key, without parameters whose conditions do not hold.

        `random`: a parameter's uniform number comes from the key of (seed, trial) and a stream from the parameter's
        name, so that another parameter in the file changes none of its values. `sobol`: the trial-th point of Sobol's
        sequence in as many dimensions as there are parameters, scrambled by the seed. `grid`: the trial-th cell; the
        seed does not count. `tpe`: as `random`; see `suggest`. Numbers are rounded; see
        `ParameterRecipe.compute_value`.

        Args:
            seed: seed of the sweep.
            trial: number of the trial, from 0.

        Raises:
            UsageError: the trial lies beyond the end of the grid, or is negative.
        """
        if trial < 0 or (self.size is not None and trial >= self.size):
            end = "" if self.size is None else f" and this grid has {pluralise(self.size, 'cell')}"
            raise UsageError(f"there is no trial {trial}: they count from 0{end}", fix="Ask for fewer trials.")
        if self._grid is not None:
            return self._grid.get_cell(trial)
        values: dict[str, Any] = {}
        # In the order of `keys`, so that the conditions' parameters have their values first.
        for name, value in self.draw_all(seed, trial).items():
            if self.recipe.is_active(name, values):
                values[name] = value
        return values

    def draw_all(self, seed: int, trial: int) -> dict[str, Any]:
        """Returns a value of every parameter, whatever its conditions, in the order of `keys`. See `draw`."""
        if self.recipe.method == "sobol":
            point = _draw_sobol_point(len(self.keys), seed, trial)
        else:
            key = make_keys(seed, 0, trial)
            point = [float(draw_uniform(key, compute_stream(name))[0]) for name in self.keys]
        return {
            name: self.recipe.parameters[name].compute_value(uniform)
            for name, uniform in zip(self.keys, point, strict=True)
        }

    def suggest(
        self,
        seed: int,
        trial: int,
        past: Sequence[tuple[Mapping[str, Any], float | None]] = (),
        *,
        higher_is_better: bool = True,
    ) -> dict[str, Any]:
        """Returns the values of a trial in the light of earlier ones. Only `tpe` looks at them; others `draw`.

        A pure function too: the same past gives the same values. Its first ten are those of `random`.

        Args:
            seed: seed of the sweep.
            trial: number of the trial, from 0.
            past: (values, score) of each finished trial, in an order that does not change. A score of None or NaN, of a
                trial that failed, counts as the worst.
            higher_is_better: False for a score such as a loss.

        Raises:
            UsageError: as `draw`; or the method is `tpe`, and the package optuna is not installed.
        """
        if self.recipe.method != "tpe":
            return self.draw(seed, trial)
        # Imported here, as it is slow and an extra; before the first trial, so that a missing package costs no hour.
        from headway.sweep.tpe import import_optuna, suggest_values

        import_optuna()
        if len(past) < RANDOM_TRIALS:
            return self.draw(seed, trial)
        return suggest_values(self.recipe, seed, trial, past, higher_is_better)


def compute_stream(name: str) -> int:
    """Returns the number of a parameter's stream of random numbers: 64 bits of a hash of its name."""
    # Not Python's hash(), which differs between processes. Collisions: 1e-15 for 200 parameters.
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")


def _draw_sobol_point(dimensions: int, seed: int, trial: int) -> list[float]:
    """Returns a point of a scrambled Sobol sequence, each coordinate in [0, 1)."""
    from torch import float64
    from torch.quasirandom import SobolEngine

    # Neighbouring seeds give unrelated scrambles: the generator gets a mixed word, which it takes up to 2^63 - 1.
    engine = SobolEngine(dimensions, scramble=True, seed=int(make_keys(seed, 0, 0)[0] >> 1))
    # The engine computes its first point in the default dtype, which is a global setting; the others as asked.
    if trial == 0:
        point = engine.shift.to(float64) / 2**SobolEngine.MAXBIT
    else:
        point = engine.fast_forward(trial).draw(1, dtype=float64)[0]
    values: list[float] = point.tolist()
    return values
