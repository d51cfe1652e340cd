"""Networks with towers: modules that run side by side, each on a rank of its own.

AlexNet of 2012 trained so on two GPUs: a place of two ranks computes the same samples, rank k the layers of tower k,
and channels are exchanged where a layer sees those of both. Everything outside of towers is computed alike on all ranks
of a place. A rank holds the weights, gradients and optimizer state of its own tower and of the rest; gradients are
summed over the places only. Two ranks give the bits of one process; with more towers, sums of gradients may round in
another order.

For B samples of a place, N towers and c bytes that a tower gives of a sample, a rank sends (N - 1) B c bytes where
towers meet before the rest of the network, and twice as many, forward and backward, where they meet before towers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from headway.comm.reducer import StepReduction
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.rows import Range, divide
from headway.core.world import World
from headway.model.batch_norm import list_running_statistics
from headway.optim.split_parameters import SplitParameters
from headway.parallel.fetch import exchange_pieces
from headway.parallel.parts import OwnPart, OwnParts
from headway.parallel.place import describe_counts, expect_one_host
from headway.parallel.strips import name_layers
from headway.parallel.tower_exchange import make_meta
from headway.parallel.tower_modules import (
    MATCH,
    HeldTensor,
    expect_alike,
    find_towers,
    list_buffers,
    list_parameters,
)
from headway.parallel.tower_values import TowerPass


@final
class Towers:
    """The towers of a network on the ranks of a place. Use `divide_towers`.

    Attributes:
        own: tower of this rank.
        count: number of towers, and of ranks of a place.
        place, places: number of this rank's place, and how many there are.
        parts: which parameters this rank has, for checkpoints.
        unsummed: names of the parameters of other towers, which are empty here.
    """

    split: SplitParameters | None = None
    is_whole_in_evaluation = True

    def __init__(
        self, network: nn.Module, towers: Sequence[Sequence[str]], rank: int, ranks: int, *, across_hosts: bool
    ) -> None:
        self._across_hosts = across_hosts
        self._rank, self._ranks, self.count = rank, ranks, len(towers)
        self.place, self.own = divmod(rank, self.count)
        self.places = ranks // self.count
        self._parameters = [list_parameters(network, tower) for tower in towers]
        self._buffers = [list_buffers(network, tower) for tower in towers]
        modules = [[network.get_submodule(name) for name in tower] for tower in towers]
        self._statistics = [[one for module in tower for one in list_running_statistics(module)] for tower in modules]
        # Tensors without numbers, by name, for what other ranks hold.
        self._metas: dict[str, Tensor] = {}
        parts = {}
        for tower, held in enumerate(self._parameters):
            for one in held:
                shape, is_own = tuple(one.tensor.shape), tower == self.own
                # Each place saves a share of its towers.
                saved = divide(shape[0], self.places)[self.place] if is_own else Range(0, 0)
                parts[one.name] = OwnPart(shape, Range(0, shape[0] if is_own else 0), saved)
                if not is_own:
                    self._metas[one.name] = make_meta(one.tensor)
                    one.tensor.data = one.tensor.data[:0].clone()
        self.parts = OwnParts(parts)
        self.unsummed = frozenset(one.name for tower in self._list_absent() for one in self._parameters[tower])
        self._is_usable = False
        self._group: Group | None = None
        self._host_group: Group | None = None
        network.register_forward_pre_hook(self._expect_usable)

    @property
    def group(self) -> Group:
        """The ranks of the place, in the order of their towers."""
        assert self._group is not None
        return self._group

    @property
    def host_group(self) -> Group:
        """The same ranks, for tensors in host memory."""
        assert self._host_group is not None
        return self._host_group

    def describe(self) -> str:
        """Returns a sentence for the user."""
        return f"Each process has one of {self.count} towers, and all that is in none."

    def connect(self, world: World) -> World:
        """Connects this rank to its place. Every rank calls it. Returns the ranks over which it sums gradients.

        Raises:
            UsageError: the world has another number of ranks, or another order; or the ranks of a place lie on several
                hosts, and must not.
        """
        world.check_rank(self._rank, self._ranks, "its tower")
        firsts = range(0, self._ranks, self.count)
        places = [range(first, first + self.count) for first in firsts]
        if not self._across_hosts:
            expect_one_host(world, places, "the towers of a network", "each exchange of channels")
        members = places[self.place]
        self._group = world.create_group(members, name="towers", exchange="channels of towers")
        self._host_group = world.create_group(
            members, name="towers' batches", backend="gloo", exchange="samples of a place"
        )
        # The rest of the network gets the same sums on all ranks of a place only if they add in the same order: hosts
        # count as those of each place's first rank.
        return world.create_part([one + self.own for one in firsts], name="places", on_hosts_of=firsts)

    def run(self, network: nn.Module, images: Tensor) -> Tensor:
        """Runs the network on images that all ranks of the place have. Returns its outputs, alike on all of them.

        Raises:
            UsageError: the network does what cannot be divided; the message names the function and the layer.
        """
        forward_pass = TowerPass(self.own, self.group, images.device)
        with self._swap_in_values(forward_pass), name_layers(network):
            return forward_pass.finish(network(images))

    def complete_step(self, reduction: StepReduction) -> StepReduction:
        """Completes a reduction over places: gives all ranks the numbers of all, and the statistics of all towers.

        Parameters of other towers get an empty gradient if their own rank has one, so that what an optimizer counts is
        the same on all ranks.
        """
        for tower in self._list_absent():
            for absent, own in zip(self._parameters[tower], self._parameters[self.own], strict=True):
                is_used = own.tensor.grad is not None or not own.tensor.requires_grad
                if is_used and absent.tensor.requires_grad:
                    absent.tensor.grad = torch.empty_like(absent.tensor)
        own_statistics = self._statistics[self.own]
        if own_statistics:
            flat = torch.cat([one.view(-1) for one in own_statistics])
            for tower, piece in enumerate(
                exchange_pieces([flat] * self.count, [flat.shape] * self.count, flat, self.group)
            ):
                parts = piece.split([one.numel() for one in own_statistics])
                for one, part in zip(self._statistics[tower], parts, strict=True):
                    one.copy_(part.view(one.shape))
        return reduction.sum_over(self.group)

    def select_own(self, statistics: Sequence[Tensor]) -> list[Tensor]:
        """Selects the running statistics that this rank computes: of its tower, and outside of towers."""
        others = {id(one) for tower in self._list_absent() for one in self._statistics[tower]}
        return [one for one in statistics if id(one) not in others]

    @contextmanager
    def join(self) -> Iterator[None]:
        """Gives this rank the weights of all towers for the duration of the block, in which no rank waits for others.

        Every rank calls it.
        """
        empty = {}
        try:
            for number, own in enumerate(self._parameters[self.own]):
                tensor = own.tensor.detach()
                pieces = self._exchange(tensor)
                for tower in self._list_absent():
                    parameter = self._parameters[tower][number].tensor
                    empty[parameter] = parameter.data
                    parameter.data = torch.empty_like(tensor).copy_(pieces[tower])
            self._is_usable = True
            yield
        finally:
            self._is_usable = False
            for parameter, data in empty.items():
                parameter.data = data

    def list_whole(self) -> dict[str, Tensor]:
        """Returns nothing: inside of `join` the network itself has all weights."""
        return {}

    def _exchange(self, own: Tensor) -> list[Tensor]:
        """Returns a tensor of each rank of the place; all have one shape."""
        return exchange_pieces([own] * self.count, [tuple(own.shape)] * self.count, own, self.group)

    def _list_absent(self) -> list[int]:
        return [tower for tower in range(self.count) if tower != self.own]

    @contextmanager
    def _swap_in_values(self, forward_pass: TowerPass) -> Iterator[None]:
        """Lets the network's modules see values of towers as their parameters and buffers inside the block."""
        kept = []
        try:
            self._is_usable = True
            for tower, held in enumerate(zip(self._parameters, self._buffers, strict=True)):
                for one in (*held[0], *held[1]):
                    tensor = one.tensor
                    kept.append((one, tensor))
                    one.entries[one.key] = forward_pass.wrap(self._find_value(one, tower), tower)
            yield
        finally:
            self._is_usable = False
            for one, tensor in kept:
                one.entries[one.key] = tensor

    def _find_value(self, held: HeldTensor, tower: int) -> Tensor:
        tensor = held.tensor
        if tower == self.own:
            return tensor
        if held.name not in self._metas:
            self._metas[held.name] = make_meta(tensor)
        # Layers can be frozen in the course of a run.
        return self._metas[held.name].requires_grad_(tensor.requires_grad)

    def _expect_usable(self, *_: Any) -> None:
        if not self._is_usable:
            what = "the towers of this network are on several processes of the run, and they do not run it now"
            raise UsageError(what, fix="Use the network in evaluations, or load its saved weights.")


def divide_towers(network: nn.Module, match: str, rank: int, ranks: int, *, across_hosts: bool = False) -> Towers:
    """Divides the towers of a network over ranks, in place: a rank keeps the parameters of its own tower and the rest.

    Args:
        network: the same network on all ranks.
        match: a regular expression whose group is the number of the tower, for the names of modules.
        across_hosts: let the ranks of a place lie on several hosts.

    Raises:
        UsageError: see `find_divisible_towers`.
    """
    return Towers(network, find_divisible_towers(network, match, ranks), rank, ranks, across_hosts=across_hosts)


def find_divisible_towers(network: nn.Module, match: str, ranks: int) -> list[list[str]]:
    """Finds the names of each tower's modules.

    Raises:
        UsageError: `match` finds no towers, they are not alike, share weights, or do not divide the ranks.
    """
    towers = find_towers(network, match)
    if ranks % len(towers):
        what = f"{len(towers)} processes train a network of {len(towers)} towers together, and there are {ranks}"
        raise UsageError(what, where=MATCH, fix=describe_counts(len(towers)))
    expect_alike(network, towers)
    return towers
