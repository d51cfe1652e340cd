"""Owners: each rank has the optimizer's state of some parameters, which it owns, and steps these alone.

Gradients go to their owners, which add them in pairs of ranks, as a tree does; after the step, the owners send the
weights to all. That is the work of an all-reduce in two halves, with the step between them, so a rank sends as many
bytes: 2 (N - 1)/N of the weights (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, stage 1). Owners have whole
tensors, so optimizers with norms or matrices of a layer step as they do alone. Where a step multiplies matrices, as
those of Muon and SOAP do, both the bytes and the products are divided as evenly as whole tensors allow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor, nn

from headway.comm.buckets import NamedParameter, is_gapless
from headway.comm.communicator import Communicator
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.owner_shares import assign_evenly, find_largest_share
from headway.parallel.owned_state import OwnedState
from headway.parallel.owner_bucket import OwnerBucket


@final
class Owners:
    """Which rank owns which parameters. All ranks build it alike.

    Args:
        parameters: (name, parameter) of all that the optimizer may step, under each of their names.
        rank, ranks: this rank, and the number of ranks.
        multiply_adds: those of the matrix products that a step makes for a parameter, by name; others have no products.
            They must be the same on all ranks.

    Attributes:
        by_name: the owner of each parameter.
        saved: what this rank saves of a state, and reads of it.

    Raises:
        UsageError: a parameter does not lie in memory without gaps.
    """

    def __init__(
        self,
        parameters: Sequence[NamedParameter],
        rank: int,
        ranks: int,
        multiply_adds: Mapping[str, float] | None = None,
    ) -> None:
        for name, parameter in parameters:
            if not is_gapless(parameter):
                what = "this parameter is a view with gaps in memory, which cannot be sent"
                raise UsageError(what, where=name, fix="Make it contiguous, or set parallel.strategy to data.")
        self.rank, self.ranks = rank, ranks
        # A parameter with several names is sent once.
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in parameters:
            first_names.setdefault(parameter, name)
        self._parameters = {name: parameter for parameter, name in first_names.items()}
        self._multiply_adds = multiply_adds or {}
        owners = choose_owners(self._parameters, ranks, self._multiply_adds)
        self.by_name = {name: owners[first_names[parameter]] for name, parameter in parameters}
        self.saved = OwnedState(self.by_name, rank)
        self._connected: tuple[Communicator, Group, int] | None = None

    def connect(self, communicator: Communicator, bucket_bytes: int) -> None:
        """Connects the owners through the ranks of a world. Every rank calls it.

        Args:
            bucket_bytes: the most that a rank receives at once.

        Raises:
            UsageError: the world has another number of ranks.
        """
        world = communicator.world
        world.check_rank(self.rank, self.ranks, "its parameters")
        group = world.create_group(range(world.size), name="owners")
        self._connected = communicator, group, max(1, bucket_bytes // world.size)

    def build_bucket(self, parameters: Sequence[NamedParameter]) -> OwnerBucket:
        """Builds a bucket whose sums the owners get."""
        _, group, round_bytes = self._get_connected()
        return OwnerBucket(parameters, self.by_name.__getitem__, group, round_bytes)

    def drop_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Removes the state of the other ranks' parameters: some optimizers make it before the first step."""
        for name, parameter in self._parameters.items():
            if self.is_elsewhere(name):
                optimizer.state.pop(parameter, None)

    def describe(self) -> str:
        """Returns a sentence for the user."""
        weights, products = find_largest_shares(self._parameters, self.ranks, self._multiply_adds)
        made = f" Its step makes {products:.1%} of the matrix products at most." if products else ""
        return (
            f"Each process has the optimizer's state of the weights that it owns, {weights:.1%} of all at most.{made}"
        )

    @torch.no_grad()
    def share_weights(self) -> None:
        """Sends the weights that this rank owns to all others, and takes those that they own. Every rank calls it."""
        communicator, group, round_bytes = self._get_connected()
        shares = list(self._divide_by_kind())

        def run() -> None:
            for streams in shares:
                _send_to_all(streams, group, max(1, round_bytes // streams[0].itemsize))

        numel = sum(stream.numel for streams in shares for stream in streams)
        like = torch.empty(numel, device="meta")
        communicator.run_in_order(run, like, kind="from owners", tag="weights of the owners").wait()

    def is_elsewhere(self, name: str) -> bool:
        """Returns True if another rank steps a parameter."""
        return self.by_name.get(name, self.rank) != self.rank

    def add_up(self, values: Tensor, tag: str) -> None:
        """Adds up a tensor over all ranks, in place. Each has the numbers of its own parameters, and zeros else."""
        communicator, _, _ = self._get_connected()
        communicator.all_reduce(values, tag=tag).wait()

    def clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        """Scales the gradients down such that all of them, on all ranks, have a norm of `max_norm` at most.

        Args:
            parameters: those of the whole network, in the same order on all ranks.
        """
        owned = [(index, one.grad) for index, one in enumerate(parameters) if one.grad is not None]
        dtype = reduce(torch.promote_types, {one.dtype for one in parameters}, torch.float32)
        # As torch does, and in its order: a norm of the norms.
        norms = torch.zeros(len(parameters), dtype=dtype, device=parameters[0].device)
        if owned:
            found = torch._foreach_norm([gradient for _, gradient in owned])
            torch._foreach_copy_([norms[index] for index, _ in owned], found)
        self.add_up(norms, "norms of the gradients")
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, torch.linalg.vector_norm(norms))

    def _get_connected(self) -> tuple[Communicator, Group, int]:
        if self._connected is None:
            raise UsageError("the owners of the weights are used before the ranks have met")
        return self._connected

    def _divide_by_kind(self) -> Iterator[list[_Stream]]:
        """Yields, for each type of weights, the weights of each owner."""
        kinds: dict[torch.dtype, list[list[Tensor]]] = {}
        for name, parameter in self._parameters.items():
            lists = kinds.setdefault(parameter.dtype, [[] for _ in range(self.ranks)])
            lists[self.by_name[name]].append(parameter.detach())
        for lists in kinds.values():
            like = next(one for tensors in lists for one in tensors)
            yield [_Stream(tensors, like) for tensors in lists]


def choose_owners(parameters: Mapping[str, Tensor], ranks: int, multiply_adds: Mapping[str, float]) -> dict[str, int]:
    """Returns the owner of each parameter, with bytes and multiply-adds as even as whole tensors allow.

    Args:
        multiply_adds: as for `Owners`.
    """
    names = sorted(parameters)
    # Bytes are what is sent, and what a step without products reads and writes.
    nbytes = [float(parameters[name].nbytes) for name in names]
    products = [multiply_adds.get(name, 0.0) for name in names]
    return dict(zip(names, assign_evenly((nbytes, products), ranks), strict=True))


def find_largest_shares(
    parameters: Mapping[str, Tensor], ranks: int, multiply_adds: Mapping[str, float]
) -> tuple[float, float]:
    """Returns the largest shares of a rank: of all weights, and of all multiply-adds (0 if there are none).

    Args:
        multiply_adds: as for `Owners`.
    """
    owners = choose_owners(parameters, ranks, multiply_adds)
    numels = [parameters[name].numel() for name in owners]
    products = [multiply_adds.get(name, 0.0) for name in owners]
    chosen = list(owners.values())
    return find_largest_share(numels, chosen), find_largest_share(products, chosen)


@final
class _Stream:
    """Tensors of one type, as if their elements lay in memory one after another."""

    def __init__(self, tensors: Sequence[Tensor], like: Tensor) -> None:
        self._flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
        self._starts = [0, *accumulate(map(len, self._flat))]
        self._like = like
        self.numel, self.itemsize = self._starts[-1], like.element_size()

    def cut(self, start: int, stop: int) -> list[Tensor]:
        """Returns views of elements `start` to `stop`."""
        return [
            flat[max(start - first, 0) : stop - first]
            for flat, (first, end) in zip(self._flat, pairwise(self._starts), strict=True)
            if first < stop and start < end
        ]

    def read(self, start: int, stop: int) -> Tensor:
        """Returns a copy of elements `start` to `stop`, fewer if there are fewer."""
        return torch.cat([self._like.new_empty(0), *self.cut(start, stop)])


def _send_to_all(streams: Sequence[_Stream], group: Group, round_numel: int) -> None:
    """Sends the stream of this rank to all, in rounds, and writes what comes into theirs."""
    for start in range(0, max(stream.numel for stream in streams), round_numel):
        stop = start + round_numel
        own = streams[group.rank].read(start, stop)
        sent = own.repeat(group.size - 1) if group.size > 1 else own[:0]
        out_sizes = [max(0, min(stop, stream.numel) - start) for stream in streams]
        in_sizes = [len(own)] * group.size
        in_sizes[group.rank] = out_sizes[group.rank] = 0
        received = own.new_empty(sum(out_sizes))
        group.all_to_all(received, sent, out_sizes, in_sizes).wait()
        for stream, values in zip(streams, received.split(out_sizes), strict=True):
            if len(values):
                places = stream.cut(start, stop)
                torch._foreach_copy_(places, list(values.split([len(place) for place in places])))
