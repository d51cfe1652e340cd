"""All combinations of a space, numbered: trial n is the n-th cell, found without listing those before it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, final

from headway.sweep.space_recipe import SpaceRecipe


@final
class Grid:
    """The cells of a space with `method: grid`. Parameters whose conditions do not hold multiply nothing.

    Args:
        recipe: each of its ranges has `points`.
    """

    def __init__(self, recipe: SpaceRecipe) -> None:
        self._recipe = recipe
        self._values = {key: parameter.list_grid() for key, parameter in recipe.parameters.items()}
        self._keys = recipe.sort_keys()
        deciding = {name for parameter in recipe.parameters.values() for name in parameter.when}
        # Only parameters that conditions name decide which others a cell has, so only these are enumerated. For each of
        # their combinations, the cells are a plain product.
        self._blocks = list(self._enumerate([key for key in self._keys if key in deciding]))
        self._others = [key for key in self._keys if key not in deciding]
        self._ends = list(accumulate(self._count_cells(block) for block in self._blocks))

    @property
    def size(self) -> int:
        """Number of cells. No `len`, which ends at 2^63."""
        return self._ends[-1]

    def get_cell(self, index: int) -> dict[str, Any]:
        """Returns the values of a cell. The last parameter varies fastest."""
        number = bisect_right(self._ends, index)
        block = self._blocks[number]
        index -= self._ends[number - 1] if number else 0
        inner: dict[str, Any] = {}
        for key in reversed(self._list_free(block)):
            index, place = divmod(index, len(self._values[key]))
            inner[key] = self._values[key][place]
        values = block | inner
        return {key: values[key] for key in self._keys if key in values}

    def _enumerate(self, keys: list[str]) -> Iterator[dict[str, Any]]:
        def extend(values: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
            if place == len(keys):
                yield values
            elif not self._recipe.is_active(key := keys[place], values):
                yield from extend(values, place + 1)
            else:
                for value in self._values[key]:
                    yield from extend(values | {key: value}, place + 1)

        yield from extend({}, 0)

    def _list_free(self, block: dict[str, Any]) -> list[str]:
        return [key for key in self._others if self._recipe.is_active(key, block)]

    def _count_cells(self, block: dict[str, Any]) -> int:
        return math.prod(len(self._values[key]) for key in self._list_free(block))
