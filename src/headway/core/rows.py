"""Who owns which rows of a map, and which rows each rank needs to compute its rows of the next one. Pure arithmetic.

Rank r of S owns rows [H r / S, H (r + 1) / S) of every map of H rows, of inputs and outputs alike. All of it holds for
columns too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from headway.core.errors import UsageError

Pair = int | Sequence[int]
"""Rows and columns of a window, a stride and the like; one number stands for both."""


def make_pair(value: Pair) -> tuple[int, int]:
    """Returns (rows, columns)."""
    return (value, value) if isinstance(value, int) else (value[0], value[-1])


class Range(NamedTuple):
    """Rows [start, stop) of a map; empty if both are equal."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.stop - self.start

    def intersect(self, other: Range) -> Range:
        """Returns the rows in both; empty if there are none."""
        start, stop = max(self.start, other.start), min(self.stop, other.stop)
        return Range(start, max(start, stop))


class Need(NamedTuple):
    """Rows of the input that some rows of the output need, and rows of padding before and after them."""

    rows: Range
    before: int
    after: int


def divide(length: int, parts: int) -> tuple[Range, ...]:
    """Divides rows over ranks: their numbers differ by at most one."""
    return tuple(Range(length * part // parts, length * (part + 1) // parts) for part in range(parts))


@final
@dataclass(frozen=True)
class Window:
    """Window of a convolution or pooling along one dimension."""

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def reach(self) -> int:
        """Distance between the first and the last row that it covers."""
        return self.dilation * (self.kernel - 1)

    def count_outputs(self, length: int) -> int:
        """Counts the rows of the output, as PyTorch does. Raises UsageError if there would be none."""
        room = length + 2 * self.padding - self.reach - 1
        count = (-(-room // self.stride) if self.ceil_mode else room // self.stride) + 1
        # The last window of ceil_mode has to begin inside the map or its padding before it.
        if self.ceil_mode and (count - 1) * self.stride >= length + self.padding:
            count -= 1
        if room < 0 or count < 1:
            what = f"a window of {self.reach + 1} rows does not fit into {length} with padding {self.padding}"
            raise UsageError(what)
        return count

    def find_need(self, outputs: Range, length: int) -> Need:
        """Finds what the outputs need of a map of `length` rows.

        Output row o covers the input rows o * stride - padding, and every `dilation`-th one after it.
        """
        if not outputs.length:
            return Need(Range(0, 0), 0, 0)
        first = outputs.start * self.stride - self.padding
        end = (outputs.stop - 1) * self.stride - self.padding + self.reach + 1
        rows = Range(min(max(first, 0), length), max(min(end, length), 0))
        if rows.stop <= rows.start:
            # All of it lies in the padding.
            rows = Range(rows.start, rows.start)
        return Need(rows, rows.start - first, end - rows.stop)


@final
@dataclass(frozen=True)
class TransposedWindow:
    """Window of a transposed convolution along one dimension: output row o gets input rows i with
    o = i * stride - padding + dilation * tap."""

    kernel: int
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    dilation: int = 1

    def count_outputs(self, length: int) -> int:
        """Counts the rows of the output, as PyTorch does."""
        return (
            (length - 1) * self.stride - 2 * self.padding + self.dilation * (self.kernel - 1) + self.output_padding + 1
        )

    def find_rows(self, outputs: Range, length: int) -> Range:
        """Finds the input rows that the outputs get something of."""
        if not outputs.length:
            return Range(0, 0)
        first = -(-(outputs.start + self.padding - self.dilation * (self.kernel - 1)) // self.stride)
        last = (outputs.stop - 1 + self.padding) // self.stride
        start, stop = min(max(first, 0), length), max(min(last + 1, length), 0)
        return Range(start, max(start, stop))


def list_pieces(owned: Sequence[Range], needed: Sequence[Range], rank: int) -> tuple[list[Range], list[Range]]:
    """Lists what a rank sends to each rank, and what it gets from each. What it owns itself is in both."""
    sent = [owned[rank].intersect(need) for need in needed]
    got = [own.intersect(needed[rank]) for own in owned]
    return sent, got


def count_moved(owned: Sequence[Range], needed: Sequence[Range]) -> int:
    """Counts the rows that move from one rank to another, over all ranks."""
    return sum(
        own.intersect(need).length
        for giver, own in enumerate(owned)
        for taker, need in enumerate(needed)
        if giver != taker
    )
