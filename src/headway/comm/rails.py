"""Rails: several groups of the same ranks, on one or on several network interfaces, that share each large message.

A message is cut in proportion to the measured rates of the rails, and all parts are under way at once. Every element is
summed in the same order as on one rail, so the number of rails and their rates change no bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import final

import torch

from headway.core.errors import UsageError
from headway.core.group import CollectiveWork, Group, Op
from headway.core.world import World

# Smaller messages use one rail where the rates are not known: a second one costs about 0.2 ms of software on either
# side.
MIN_STRIPED_BYTES = 1 << 20
RAIL_COST_S = 0.4e-3

# Gloo's ring sums one chunk per rank, each in at least two segments of at most 1 MiB (gloo/allreduce.cc).
MAX_SEGMENT_BYTES = 1 << 20


@final
class StripedWork:
    """An operation under way on several rails."""

    def __init__(self, works: Sequence[CollectiveWork], finish: Sequence[Callable[[], object]] = ()) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Waits for all parts; errors as in `CollectiveWork.wait`."""
        for work in self._works:
            work.wait()
        # Parts that were received into memory of their own go to their places.
        for copy in self._finish:
            copy()


@final
class StripedGroup:
    """The operations of a Group, striped over several groups. Use `StripedGroup.create`.

    Args:
        groups: groups of the same ranks in the same order.
        rates: their relative rates; default: all equal.
        min_bytes: a message below this size takes one rail, the fastest.

    Attributes:
        rank, size, ranks: as in Group.
    """

    def __init__(
        self, groups: Sequence[Group], rates: Sequence[float] = (), min_bytes: float = MIN_STRIPED_BYTES
    ) -> None:
        self._groups, self._rates, self._min_bytes = groups, rates or [1.0] * len(groups), min_bytes
        self._fastest = groups[max(range(len(groups)), key=self._rates.__getitem__)]
        self.rank, self.size, self.ranks = groups[0].rank, groups[0].size, groups[0].ranks

    @staticmethod
    def create(
        world: World,
        ranks: Sequence[int] | None = None,
        *,
        name: str,
        connections: int = 1,
        rates_bytes_s: Sequence[float] = (),
    ) -> StripedGroup:
        """Creates groups on every interface of the world. Each of the ranks calls it, as `World.create_group`.

        Args:
            connections: groups on each interface.
            rates_bytes_s: measured rate of each interface; empty: unknown, and taken as equal.
        """
        if connections < 1:
            raise UsageError(f"{connections} rails", fix="Set 1 or more.")
        # A group of one rank has no connections, and NCCL chooses interfaces by itself.
        is_flat = world.backend == "nccl" or (ranks is not None and len(ranks) == 1)
        interfaces = (None,) if is_flat else world.interfaces
        groups = [
            world.create_group(ranks, name=name, interface=interface)
            for _ in range(connections)
            for interface in interfaces
        ]
        # Rates from a generation with other interfaces: one host may be all that is left of several.
        if len(rates_bytes_s) != len(interfaces) or len(interfaces) == 1:
            return StripedGroup(groups)
        return StripedGroup(groups, tuple(rates_bytes_s) * connections, compute_min_striped_bytes(rates_bytes_s))

    def take(self, count: int) -> StripedGroup:
        """Returns a striped group of the first `count` groups, which both share."""
        return StripedGroup(self._groups[:count], self._rates[:count], self._min_bytes)

    def all_reduce(self, values: torch.Tensor, op: Op = "sum") -> StripedWork:
        """Reduces a flat tensor over all ranks, in place."""
        if not self._is_striped(values):
            return StripedWork([self._fastest.all_reduce(values, op)])
        # Two ranks: a + b is b + a, so any cut will do. NCCL has an order of its own.
        if self.size == 2 or values.is_cuda or op != "sum":
            return self._start(lambda group, start, stop: group.all_reduce(values[start:stop], op), values.numel())
        chunk = count_chunk_elements(values.numel(), self.size, values.element_size())
        return self._start(
            lambda group, start, stop: group.all_reduce_pieces(cut_chunks(values, self.size, chunk, start, stop)), chunk
        )

    def all_to_all(self, out: torch.Tensor, into: torch.Tensor) -> StripedWork:
        """Sends piece r of `into` to rank r and receives piece r of `out` from it; the pieces are equal."""
        if not self._is_striped(into):
            return StripedWork([self._fastest.all_to_all(out, into)])
        out_rows, into_rows = out.view(self.size, -1), into.view(self.size, -1)
        finish: list[Callable[[], object]] = []

        def start_part(group: Group, start: int, stop: int) -> CollectiveWork:
            sent = into_rows[:, start:stop].contiguous()
            received = torch.empty_like(sent)
            finish.append(lambda: out_rows[:, start:stop].copy_(received))
            return group.all_to_all(received.view(-1), sent.view(-1))

        return self._start(start_part, into_rows.shape[1], finish)

    def all_gather(self, out: torch.Tensor, piece: torch.Tensor) -> StripedWork:
        """Fills `out` with the pieces of all ranks in their order; all have the same length."""
        if not self._is_striped(out):
            return StripedWork([self._fastest.all_gather(out, piece)])
        rows = out.view(self.size, -1)
        finish: list[Callable[[], object]] = []

        def start_part(group: Group, start: int, stop: int) -> CollectiveWork:
            received = out.new_empty(self.size, stop - start)
            finish.append(lambda: rows[:, start:stop].copy_(received))
            return group.all_gather(received.view(-1), piece[start:stop])

        return self._start(start_part, piece.numel(), finish)

    def send(self, values: torch.Tensor, to: int) -> StripedWork:
        """Sends a flat tensor to rank `to` of the group."""
        if not self._is_striped(values):
            return StripedWork([self._fastest.send(values, to)])
        return self._start(lambda group, start, stop: group.send(values[start:stop], to), values.numel())

    def recv(self, values: torch.Tensor, source: int) -> StripedWork:
        """Receives a flat tensor from rank `source` of the group."""
        if not self._is_striped(values):
            return StripedWork([self._fastest.recv(values, source)])
        return self._start(lambda group, start, stop: group.recv(values[start:stop], source), values.numel())

    def close(self) -> None:
        """Releases the connections. No operation may be pending."""
        for group in self._groups:
            group.close()

    def _is_striped(self, values: torch.Tensor) -> bool:
        return len(self._groups) > 1 and values.numel() * values.element_size() >= self._min_bytes

    def _start(
        self,
        start_part: Callable[[Group, int, int], CollectiveWork],
        length: int,
        finish: Sequence[Callable[[], object]] = (),
    ) -> StripedWork:
        """Starts the part of each rail, from `start` to `stop` of `length`; a rail without elements has none."""
        parts = zip(self._groups, divide_by_rates(length, self._rates), strict=True)
        return StripedWork([start_part(group, start, stop) for group, (start, stop) in parts if start < stop], finish)


def compute_min_striped_bytes(rates_bytes_s: Sequence[float]) -> float:
    """Returns the size from which a message is faster on all rails than on the fastest one."""
    saved_s_per_byte = 1 / max(rates_bytes_s) - 1 / sum(rates_bytes_s)
    return RAIL_COST_S / saved_s_per_byte if saved_s_per_byte > 0 else float("inf")


def divide_by_rates(length: int, rates: Sequence[float]) -> list[tuple[int, int]]:
    """Divides `length` elements in proportion to `rates`; returns start and end of each part."""
    totals = list(accumulate(rates))
    return list(pairwise([0, *(round(length * (total / totals[-1])) for total in totals)]))


def count_chunk_elements(length: int, size: int, element_size: int) -> int:
    """Returns the length of the chunks of Gloo's ring all-reduce. The order of the sums depends on the chunk's number.

    Args:
        length: elements of the tensor; the last chunks may be shorter.
        size: number of ranks.
        element_size: bytes of an element.
    """
    max_segment_bytes = MAX_SEGMENT_BYTES // element_size * element_size
    # As many segments for each rank, and at least two: one is under way while another one is summed.
    segments = max(-(-length * element_size // max_segment_bytes), 2 * size)
    segments_per_rank = -(-segments // size)
    segment_bytes = -(-length * element_size // (segments_per_rank * size))
    return segments_per_rank * -(-segment_bytes // element_size)


def cut_chunks(values: torch.Tensor, size: int, chunk: int, start: int, stop: int) -> list[torch.Tensor]:
    """Cuts elements `start` to `stop` out of every chunk, with zeros between, so that each stays in its chunk.

    The pieces one after another are a tensor whose own chunk r holds elements of chunk r of `values`.
    """
    # The width of the parts is one that Gloo itself makes chunks of.
    width = stop - start
    while (rounded := count_chunk_elements(width * size, size, values.element_size())) != width:
        width = rounded
    pieces = [values[first + start : first + stop] for first in range(0, chunk * size, chunk)]
    # The same zeros serve all gaps: their sum, which comes back into them, is zero.
    zeros = values.new_zeros(max(width - len(piece) for piece in pieces))
    return [part for piece in pieces for part in (piece, zeros[: width - len(piece)]) if len(part)]
