"""Maps [samples, channels, rows, columns] of which each rank of a place holds some rows and columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from torch import Tensor

from headway.core.errors import UsageError
from headway.core.rows import Range
from headway.parallel.fetch import exchange
from headway.parallel.place import Place

ROWS, COLUMNS = 2, 3
FIX = "Train with parallel: data, or change the network there."


@final
@dataclass(frozen=True)
class Part:
    """Which part of which map a rank holds.

    Attributes:
        place: the ranks that hold the other parts.
        lengths: rows and columns of the whole map.
        samples: samples of each rank of the place, which get whole maps of theirs where the maps end.
    """

    place: Place
    lengths: tuple[int, int]
    samples: tuple[Range, ...]

    def get_own(self, dimension: int) -> Range:
        """Returns the rows (dimension 0) or columns (1) of this rank."""
        return self.place.get_own(self.lengths[dimension], dimension)

    @property
    def is_empty(self) -> bool:
        """True if this rank holds nothing of the map."""
        return not (self.get_own(0).length and self.get_own(1).length)

    def resize(self, rows: int, columns: int) -> Part:
        """Returns the same part of maps of another size."""
        return replace(self, lengths=(rows, columns))

    def list_blocks(self) -> list[tuple[slice, ...]]:
        """Lists the part of each rank of the place, as an index of whole maps."""
        rows, columns = (self.place.divide(length, dimension) for dimension, length in enumerate(self.lengths))
        return [(slice(None), slice(None), slice(*down), slice(*across)) for down in rows for across in columns]


@final
@dataclass(frozen=True)
class SplitMap:
    """This rank's values of maps.

    Attributes:
        own: [samples, channels, own rows, own columns].
        part: which part of the maps they are.
    """

    own: Tensor
    part: Part

    def __post_init__(self) -> None:
        mine = (self.part.get_own(0).length, self.part.get_own(1).length)
        if tuple(self.own.shape[ROWS:]) != mine:
            what = f"{list(self.own.shape)} is no part of maps of {self.part.lengths}: this rank has {mine}"
            raise UsageError(what)


@final
@dataclass(frozen=True)
class SampleValues:
    """Values of this rank's samples, after the maps of the place have ended.

    Attributes:
        own: [own samples, ...].
        part: of the maps that they came from.
    """

    own: Tensor
    part: Part


def gather_samples(x: SampleValues) -> Tensor:
    """Gathers values of all samples of the place: [samples, ...]. A sample's gradient is the sum over the ranks."""
    part, group = x.part, x.part.place.ranks
    shape = (part.samples[-1].stop, *x.own.shape[1:])
    got = [(slice(*one),) for one in part.samples]
    return exchange(x.own, [(slice(None),)] * group.size, shape, got, group)


def cut(maps: Tensor, place: Place) -> SplitMap:
    """Returns this rank's part of whole maps, which all ranks of the place have."""
    part = Part(place, (maps.shape[ROWS], maps.shape[COLUMNS]), place.divide_samples(len(maps)))
    return SplitMap(maps[part.list_blocks()[place.ranks.rank]].contiguous(), part)


def to_samples(x: SplitMap) -> Tensor:
    """Turns parts of the maps of the place's samples into whole maps of this rank's samples."""
    part, own = x.part, x.own
    group = part.place.ranks
    sent = [(slice(*one),) for one in part.samples]
    shape = (part.samples[group.rank].length, own.shape[1], *part.lengths)
    return exchange(own, sent, shape, part.list_blocks(), group)


def to_parts(maps: Tensor, samples: Sequence[Range], place: Place) -> SplitMap:
    """Turns whole maps of this rank's samples into parts of the maps of the place's samples.

    The inverse of `to_samples`: each rank decodes its share of the samples, and hands out parts of them.

    Args:
        maps: maps of this rank's samples.
        samples: samples of each rank of the place; `Place.divide_samples` divides a number of them.
    """
    part = Part(place, (maps.shape[ROWS], maps.shape[COLUMNS]), tuple(samples))
    got = [(slice(*one),) for one in samples]
    shape = (samples[-1].stop, maps.shape[1], part.get_own(0).length, part.get_own(1).length)
    return SplitMap(exchange(maps, part.list_blocks(), shape, got, place.ranks), part)


def refuse(what: str, fix: str = FIX) -> UsageError:
    """Returns the error for what cannot be split."""
    return UsageError(f"{what} has no rule for images that are split over ranks", fix=fix)


def expect_map(x: object, what: str) -> SplitMap:
    """Returns a function's first argument. Raises UsageError if another argument was the split map."""
    if not isinstance(x, SplitMap):
        raise refuse(f"{what} with a split map as weights")
    return x
