"""A place: the ranks that together train one share of the batch, as rows and columns of a grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError
from headway.core.world import Group, World
from headway.parallel.rows import Range, divide


@final
@dataclass(frozen=True)
class Place:
    """Grid of ranks that split each image. Use `Place.create`.

    Attributes:
        grid: rows and columns of ranks.
        ranks: all of them, row by row; statistics and samples are exchanged among all.
        lines: for each dimension of the grid the ranks that differ from this one only there, in order.
    """

    grid: tuple[int, int]
    ranks: Group
    lines: tuple[Group, Group]

    @staticmethod
    def create(world: World, grid: tuple[int, int], members: Sequence[int] | None = None) -> Place:
        """Creates the place of this rank. Every rank of the world calls it in the same order, each for its own place.

        Args:
            grid: rows and columns.
            members: ranks of the world, row by row; None: all of them.

        Raises:
            UsageError: the grid has another number of ranks.
        """
        members = tuple(range(world.size)) if members is None else tuple(members)
        rows, columns = grid
        if rows < 1 or columns < 1 or rows * columns != len(members):
            what = f"a grid of {rows} x {columns} needs {rows * columns} ranks, and there are {len(members)}"
            raise UsageError(what, fix="Make rows x columns the number of ranks of a place.")
        row, column = divmod(members.index(world.rank), columns)
        ranks = world.create_group(members, name="place")
        down = world.create_group(members[column::columns], name="place rows")
        across = world.create_group(members[row * columns : (row + 1) * columns], name="place columns")
        return Place(grid, ranks, (down, across))

    def divide(self, length: int, dimension: int) -> tuple[Range, ...]:
        """Divides rows (dimension 0) or columns (1) of a map over the ranks of a line."""
        return divide(length, self.grid[dimension])

    def get_own(self, length: int, dimension: int) -> Range:
        """Returns the rows or columns of this rank."""
        return self.divide(length, dimension)[self.lines[dimension].rank]

    def divide_samples(self, samples: int) -> tuple[Range, ...]:
        """Divides the samples of the place over its ranks."""
        return divide(samples, self.ranks.size)
