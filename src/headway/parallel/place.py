"""A place: the ranks that together train one share of the batch.

Those that split images form a grid of rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.rows import Range, divide
from headway.core.world import World


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
        ranks = world.create_group(members, name="place", exchange="samples of a place")
        down = world.create_group(members[column::columns], name="place rows", exchange="halos")
        beside = members[row * columns : (row + 1) * columns]
        across = world.create_group(beside, name="place columns", exchange="halos")
        return Place(grid, ranks, (down, across))

    @staticmethod
    def join(world: World, grid: tuple[int, int], *, across_hosts: bool = False) -> Place:
        """Joins the place of this rank: neighbours in the ring, which lie on one host where they fit.

        Args:
            across_hosts: let the ranks of a place lie on several hosts.

        Raises:
            UsageError: those of a place do, and must not.
        """
        size, order = grid[0] * grid[1], world.ring_order
        places = [order[first : first + size] for first in range(0, len(order), size)]
        if not across_hosts:
            expect_one_host(world, places, "an image", "each convolution and each batch norm")
        return Place.create(world, grid, next(place for place in places if world.rank in place))

    def divide(self, length: int, dimension: int) -> tuple[Range, ...]:
        """Divides rows (dimension 0) or columns (1) of a map over the ranks of a line."""
        return divide(length, self.grid[dimension])

    def get_own(self, length: int, dimension: int) -> Range:
        """Returns the rows or columns of this rank."""
        return self.divide(length, dimension)[self.lines[dimension].rank]

    def divide_samples(self, samples: int) -> tuple[Range, ...]:
        """Divides the samples of the place over its ranks."""
        return divide(samples, self.ranks.size)

    def divide_batch(self, batch: int, num_ranks: int) -> list[Range]:
        """Divides the samples of this place in a step over its ranks, as the step divides `batch` samples over all."""
        sizes = [share.length for share in (divide(batch, num_ranks)[rank] for rank in self.ranks.ranks)]
        return [Range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)])]


def describe_counts(size: int) -> str:
    """Returns the fix for a number of processes that is no multiple of `size`, for new runs and for resumed ones."""
    return (
        f"Start a multiple of {size}, such as --procs {size}, or add 'parallel={{strategy: data}}': both work with"
        " --resume too"
    )


def expect_one_host(world: World, places: Sequence[Sequence[int]], shared: str, waiting: str) -> None:
    """Raises UsageError if the ranks of a place lie on several hosts.

    Args:
        places: ranks of each place; all have the same number.
        shared: what the ranks of a place share, for the message.
        waiting: what would wait for the network.
    """
    # All ranks come to the same conclusion, also those whose own place lies on one host.
    if any(len(set(map(world.find_host, place))) > 1 for place in places):
        size = len(places[0])
        what = f"the {size} processes that share {shared} lie on several hosts: {waiting} would wait for the network"
        fix = f"Start a multiple of {size} on each host, or set parallel.across_hosts to true."
        raise UsageError(what, where="parallel.across_hosts", fix=fix)
