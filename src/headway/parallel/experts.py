"""Experts of a network's mixtures spread over processes: each of a place of N holds 1/N of those of each layer.

A process sends each row to the one that holds its expert, and gets the output back: counts first, then the rows, by one
all-to-all each. An expert sees its rows in the order of the ranks that sent them, and of their tokens. If the ranks of
a place share a batch in their order, that is the order in one process, and so are the bits of outputs and gradients.

Ranks with the same experts, one in each place, sum the gradients of these; all other gradients are summed over all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from headway.comm.reducer import StepReduction
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.rows import Range, divide
from headway.core.world import World
from headway.model.mixture import list_mixtures
from headway.optim.split_parameters import SplitParameters
from headway.parallel.fetch import exchange_pieces, sum_in_order
from headway.parallel.parts import OwnPart, OwnParts
from headway.parallel.place import expect_one_host


def list_expert_weights(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the weights of all experts by their names in the network; the experts are dimension 0."""
    return {
        f"{name}.experts.{key}": parameter
        for name, layer in list_mixtures(network)
        for key, parameter in layer.experts.named_parameters()
    }


def expect_experts(network: nn.Module, ranks: int) -> None:
    """Raises UsageError if a network has no mixture, or one with a number of experts that `ranks` does not divide."""
    mixtures = list(list_mixtures(network))
    if not mixtures:
        what = "the network has no mixture of experts, so there is nothing to share"
        fix = "Use headway.model.MixtureOfExperts in it, or set parallel.strategy to data."
        raise UsageError(what, where="parallel.strategy", fix=fix)
    for name, layer in mixtures:
        if layer.num_experts % ranks:
            what = f"{name} has {layer.num_experts} experts, which {ranks} processes cannot share evenly"
            raise UsageError(what, where="parallel.ranks", fix=f"Set it to a divisor of {layer.num_experts}.")


@final
class SharedExperts:
    """The experts of a network's mixtures that this rank holds, of those that the ranks of a place share.

    Attributes:
        ranks: ranks of a place.
        parts: the parts of the stacked weights.
        split: the same for what needs norms of whole parameters.
        unsummed: names of the stacked weights.
    """

    is_whole_in_evaluation = False

    def __init__(self, network: nn.Module, rank: int, size: int, ranks: int, *, across_hosts: bool = False) -> None:
        """Removes the other ranks' experts from a network. Its parameters stay the same objects.

        Args:
            network: with all experts.
            rank, size: this rank, and the number of all ranks.
            ranks: ranks of a place.
            across_hosts: let the ranks of a place lie on several hosts.

        Raises:
            UsageError: see `expect_experts`.
        """
        expect_experts(network, ranks)
        self._network, self._rank, self._size, self.ranks = network, rank, size, ranks
        self._across_hosts = across_hosts
        weights = list_expert_weights(network)
        self._weights = tuple(weights.values())
        parts = {}
        for name, parameter in weights.items():
            own = divide(len(parameter), ranks)[rank % ranks]
            # Each place saves a share of them.
            share = divide(own.length, size // ranks)[rank // ranks]
            saved = Range(own.start + share.start, own.start + share.stop)
            parts[name] = OwnPart(tuple(parameter.shape), own, saved)
            parameter.data = parameter.data[slice(*own)].clone()
        self.parts = OwnParts(parts)
        self.unsummed = frozenset(parts)
        self.split: SplitParameters | None = SplitParameters(frozenset(self._weights), self.sum_over_place)
        self._place: Group | None = None
        self._replicas: Group | None = None

    def describe(self) -> str:
        """Returns a sentence for the user."""
        return f"{self.ranks} processes share the experts of each mixture."

    def connect(self, world: World) -> World:
        """Connects the mixtures to the other ranks. Every rank calls it. Replicas of an expert begin as the first.

        Returns:
            the ranks that sum all other gradients: those of the world.

        Raises:
            UsageError: this rank has another number than when it took its experts; or the ranks of a place lie on
                several hosts, and must not.
        """
        world.check_rank(self._rank, self._size, "its experts")
        # Places are runs of ranks: a launcher numbers them host by host, and rows then stay on a host.
        places = [range(first, first + self.ranks) for first in range(0, self._size, self.ranks)]
        if not self._across_hosts:
            expect_one_host(world, places, "the experts", "each mixture")
        self._place = world.create_group(
            places[world.rank // self.ranks], name="place of experts", exchange="tokens of experts"
        )
        self._replicas = world.create_group(
            range(world.rank % self.ranks, world.size, self.ranks), name="replicas of experts"
        )
        connect_mixtures(self._network, world, self._place)
        for parameter in self._weights:
            self._replicas.broadcast(parameter.data).wait()
        return world

    def complete_step(self, reduction: StepReduction) -> StepReduction:
        """Sums the gradients of the experts over their replicas. In a single place they are whole already."""
        assert self._replicas is not None
        if self._replicas.size == 1:
            return reduction
        for one in (one for one in self._weights if one.requires_grad):
            # A rank whose loss did not reach a layer has no gradient, and the others have.
            grad = torch.zeros_like(one) if one.grad is None else one.grad.contiguous()
            self._replicas.all_reduce(grad).wait()
            one.grad = grad
        return reduction

    def sum_over_place(self, values: Tensor) -> Tensor:
        """Adds a tensor of all ranks of a place, in their order: the same bits on each. Every rank calls it."""
        assert self._place is not None
        return sum_in_order(values, self._place)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Changes nothing for the duration of the block: no rank has memory for all experts, they go on exchanging."""
        yield

    def list_whole(self) -> dict[str, Tensor]:
        """Returns the weights of all experts by name, in host memory, on rank 0. Every rank calls it."""
        assert self._place is not None
        whole = {}
        for name, parameter in zip(self.parts.by_name, self._weights, strict=True):
            pieces = parameter.new_empty(self._place.size * parameter.numel())
            self._place.all_gather(pieces, parameter.detach().reshape(-1)).wait()
            if self._rank == 0:
                whole[name] = pieces.view(self.parts.by_name[name].shape).cpu()
        return whole


def connect_mixtures(network: nn.Module, world: World, place: Group | None = None) -> None:
    """Lets the mixtures of a network exchange rows over a place, and sum their load over all ranks of a world.

    Every rank calls it.

    Args:
        place: the ranks that hold the experts together; None: each rank holds all of them.
    """
    mixtures = list(list_mixtures(network))
    if not mixtures:
        return
    place = place or world.create_group([world.rank], name="alone with all experts")
    # A group of its own: it sums in forward passes, between the messages of the reducer.
    everyone = world.create_group(name="load of experts", exchange="statistics")
    for _, layer in mixtures:
        layer.exchange = RankExchange(place, everyone)


@final
class RankExchange:
    """The exchange of a mixture of experts over the ranks of a place; see `headway.model.mixture.Exchange`.

    Args:
        place: the ranks that hold the experts; each the same number, in the order of the ranks.
        everyone: all ranks, for sums.
    """

    def __init__(self, place: Group, everyone: Group) -> None:
        self._place, self._everyone = place, everyone

    def __deepcopy__(self, memo: dict[int, Any]) -> RankExchange:
        # Connections cannot be copied.
        return self

    def run(self, experts: Callable[[Tensor, Tensor], Tensor], rows: Tensor, counts: Tensor) -> Tensor:
        """Sends rows to the ranks of their experts, and returns the outputs, in the order of the rows."""
        place = self._place
        if place.size == 1:
            return experts(rows, counts)
        ranks, own = place.size, len(counts) // place.size
        received = torch.empty_like(counts)
        place.all_to_all(received, counts).wait()
        # Reading the counts waits for the device: the sizes of the pieces must be known on the host.
        sent, got = (both.view(ranks, own).sum(1).tolist() for both in (counts, received))
        arrived = _exchange_rows(rows, sent, got, place)
        # They arrive by rank, each rank's by expert: a stable order by expert keeps the ranks in order.
        numbers = torch.arange(own, device=rows.device).repeat(ranks).repeat_interleave(received)
        order = numbers.argsort(stable=True)
        outputs = experts(arrived.index_select(0, order), received.view(ranks, own).sum(0))
        back = outputs.index_select(0, order.argsort())
        return _exchange_rows(back, got, sent, place)

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sums over all ranks. Each rank's gradient is that of its own part."""
        if self._everyone.size == 1:
            return values
        total: Tensor = _SumOverRanks.apply(values, self._everyone)  # type: ignore[no-untyped-call]
        return total


def count_exchange_bytes(counts: Tensor, width: int, element_bytes: int, *, backward: bool = True) -> list[int]:
    """Returns the bytes that each rank of a place sends to others for one layer in one step.

    A row goes to its expert and back, in the backward pass its gradients too; then the counts, 8 bytes for each expert
    of the other ranks. Rows whose expert is on their own rank do not move.

    Args:
        counts: rows that each rank has for each expert, [ranks, experts].
        width: values of a row.
        element_bytes: bytes of a value.
    """
    ranks, experts = counts.shape
    rows = counts.view(ranks, ranks, experts // ranks).sum(2)
    rows = rows - torch.diag(rows.diag())
    # A rank sends what it asks of others, and the outputs of what they ask of it; and the gradients of both.
    moved = (rows.sum(1) + rows.sum(0)) * width * element_bytes * (2 if backward else 1)
    return [int(sent) + 8 * (experts - experts // ranks) for sent in moved]


def _exchange_rows(rows: Tensor, sent: list[int], got: list[int], group: Group) -> Tensor:
    out: Tensor = _ExchangeRows.apply(rows, sent, got, group)  # type: ignore[no-untyped-call]
    return out


class _ExchangeRows(torch.autograd.Function):
    """Sends consecutive rows to the ranks of a group, in their order, and returns those that came, in their order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], got: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _send_rows(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _send_rows(grad, ctx.got, ctx.sent, ctx.group), None, None, None


def _send_rows(rows: Tensor, sent: list[int], got: list[int], group: Group) -> Tensor:
    width = rows.shape[1]
    return torch.cat(exchange_pieces(rows.split(sent), [(count, width) for count in got], rows, group))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Group) -> Tensor:
        total = values.detach().clone()
        group.all_reduce(total).wait()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # All ranks compute the same loss of the sums, and their gradients are summed later: each adds its own part.
        return grad, None
