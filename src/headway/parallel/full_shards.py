"""Rows of all weights, gradients and optimizer state on each of N processes, by PyTorch's FSDP2 (`fully_shard`).

At rest a rank has 1/N of the rows of each parameter. A block's weights are gathered before it runs, forward and
backward, and dropped after it. Gradients go to the ranks with their rows, which on CPUs add them in the order of ranks.
So a rank sends 3 (N - 1)/N of the weights in a step (Rajbhandari et al. 2020, "ZeRO", arXiv 1910.02054, stage 3).

FSDP2 sends through a group of Headway's world. It needs no default process group: of a mesh it asks rank and size only.
The optimizer, averages and checkpoints have this rank's rows as plain tensors, which share memory with FSDP2's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from headway.comm.communicator import Communicator
from headway.comm.reducer import StepReduction
from headway.core.errors import UsageError
from headway.core.group import Group
from headway.core.row_shards import get_rows
from headway.core.world import World
from headway.optim.split_parameters import SplitParameters
from headway.parallel.fetch import exchange_pieces, sum_in_order
from headway.parallel.parts import OwnPart, OwnParts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


@final
class FullShards:
    """The rows that this rank holds of all parameters of a network.

    Attributes:
        parts: these rows.
        split: the same for what needs norms of whole parameters.
        unsummed: names of all parameters.
    """

    is_whole_in_evaluation = False

    def __init__(self, network: nn.Module, blocks: Sequence[str], rank: int, ranks: int) -> None:
        """Removes the other ranks' rows from a network, whose parameters become new objects.

        Args:
            network: the same on all ranks.
            blocks: names of the modules whose weights are gathered together, each outside of the others; the rest is
                gathered for the whole forward and backward pass.

        Raises:
            UsageError: a parameter has no rows, or two names.
        """
        _check_parameters(network)
        self._network, self._rank, self._ranks = network, rank, ranks
        self._group: Group | None = None
        shapes = {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
        self._root = self._shard(blocks)
        self._whole = dict(network.named_parameters())
        self._own = {name: _take_rows(parameter) for name, parameter in self._whole.items()}
        parts = {name: OwnPart(shape, get_rows(shape[0], rank, ranks)) for name, shape in shapes.items()}
        self.parts = OwnParts(parts)
        self.unsummed = frozenset(parts)
        self.split: SplitParameters | None = SplitParameters(frozenset(self._own.values()), self.sum_over_ranks)

    def _shard(self, blocks: Sequence[str]) -> FSDPModule:
        # Imported here: it takes time, and only this strategy needs it.
        from torch.distributed.fsdp import FSDPModule, fully_shard

        # By their calls they are the classes that FSDP2 names, which it does not export.
        gather: Any = _AllGather(self)
        scatter: Any = _ReduceScatter(self)
        device = next(self._network.parameters()).device
        mesh = _build_mesh(device.type, self._rank, self._ranks)
        for module in (*map(self._network.get_submodule, blocks), self._network):
            # The root too: weights that stayed whole after an evaluation would be old after the next step.
            sharded = fully_shard(module, mesh=mesh, reshard_after_forward=True)
            sharded.set_custom_all_gather(gather)
            sharded.set_custom_reduce_scatter(scatter)
            # The losses are divided by the batch over all ranks already.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        assert isinstance(self._network, FSDPModule)
        self._network.set_requires_gradient_sync(False)
        return self._network

    @property
    def group(self) -> Group:
        """The ranks that share the rows."""
        if self._group is None:
            raise UsageError("the weights of a sharded network are used before the ranks have met")
        return self._group

    def connect(self, world: World) -> World:
        """Connects the ranks that share the rows. Every rank calls it. Returns the ranks that sum gradients.

        Raises:
            UsageError: the world has another number of ranks.
        """
        world.check_rank(self._rank, self._ranks, "its rows")
        self._group = world.create_group(range(world.size), name="full shards", exchange="sharded weights")
        return world

    def take_parameters(self, optimizer: torch.optim.Optimizer, whole: Mapping[str, nn.Parameter]) -> None:
        """Gives an optimizer this rank's rows in the places of whole parameters, whose state is cut alike.

        Args:
            whole: the network's parameters by name, from before they were divided.
        """
        own = {id(parameter): (name, self._own[name]) for name, parameter in whole.items()}
        for group in optimizer.param_groups:
            group["params"] = [own[id(parameter)][1] for parameter in group["params"]]
        for parameter in list(optimizer.state):
            name, rows = own[id(parameter)]
            part = self.parts.by_name[name]
            optimizer.state[rows] = {
                key: value[slice(*part.rows)].clone()
                if isinstance(value, Tensor) and tuple(value.shape) == part.shape
                else value
                for key, value in optimizer.state.pop(parameter).items()
            }

    def prepare_for_backward(self) -> None:
        """Lets gradients go to their ranks in the next backward pass, the last one of a step."""
        self._root.set_requires_gradient_sync(True)

    @torch.no_grad()
    def take_gradients(self, communicator: Communicator) -> None:
        """Gives the rows of this rank their gradients, after the backward pass of a step.

        Which weights have one goes into the digest of `communicator`: FSDP2 adds up what ranks send of a block, even if
        it is of other weights on each.
        """
        missing = []
        for name, parameter in self._whole.items():
            grad: Any = parameter.grad
            self._own[name].grad, parameter.grad = None if grad is None else grad.to_local(), None
            if grad is None and parameter.requires_grad:
                missing.append(name)
        tag = "gradients of all weights" + (f" but {', '.join(missing)}" if missing else "")
        communicator.note(tag, torch.empty(0, device="meta"), kind="to rows")

    def complete_step(self, reduction: StepReduction) -> StepReduction:
        """Lets gradients stay on this rank until the last backward pass of the next step."""
        self._root.set_requires_gradient_sync(False)
        return reduction

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Adds a tensor of all ranks, in their order: the sums have the same bits on each. Every rank calls it."""
        return sum_in_order(values, self.group)

    @contextmanager
    def join(self) -> Iterator[None]:
        """Changes nothing for the duration of the block: no rank has memory for all weights, they go on exchanging."""
        yield

    def list_whole(self) -> dict[str, Tensor]:
        """Returns the whole parameters by name, in host memory, on rank 0. Every rank calls it."""
        whole = {}
        for name, own in self._own.items():
            shape, empty = self.parts.by_name[name].shape, (0, *own.shape[1:])
            rows = [get_rows(shape[0], rank, self._ranks) for rank in range(self._ranks)]
            is_lead = self._rank == 0
            shapes = [(one.length, *shape[1:]) if is_lead else empty for one in rows]
            mine = own.detach()
            pieces = exchange_pieces([mine, *[mine[:0]] * (self._ranks - 1)], shapes, mine, self.group)
            if is_lead:
                whole[name] = torch.cat(pieces).cpu()
        return whole

    def describe(self) -> str:
        """Returns a sentence for the user."""
        held = sum(own.untyped_storage().nbytes() for own in self._own.values())
        total = sum(parameter.numel() * parameter.element_size() for parameter in self._whole.values())
        return f"Each process has rows of all weights, {held / total:.1%} of them at most."

    # What the optimizer steps, as `MasterWeights` has it.

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this rank's rows of each parameter by name."""
        yield from self._own.items()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns this rank's rows and the buffers of the network, not copied."""
        state = self._network.state_dict()
        return {name: self._own[name].detach() if name in self._own else value for name, value in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the result of `state_dict`, in place."""
        for name, value in self.state_dict().items():
            value.copy_(state_dict[name])


def _take_rows(parameter: Any) -> nn.Parameter:
    with torch.no_grad():
        return nn.Parameter(parameter.to_local(), requires_grad=parameter.requires_grad)


def _check_parameters(network: nn.Module) -> None:
    names: dict[nn.Parameter, str] = {}
    for name, parameter in network.named_parameters(remove_duplicate=False):
        if first := names.get(parameter):
            what = f"this parameter is also {first}, and FSDP2 would make two of it"
            raise UsageError(what, where=name, fix="Set parallel.what to optimizer, or parallel.strategy to data.")
        names[parameter] = name
        if not parameter.dim():
            what = "this parameter is a single number, which has no rows to divide"
            raise UsageError(what, where=name, fix="Give it the shape [1], or set parallel.what to optimizer.")


def _build_mesh(device: str, rank: int, ranks: int) -> DeviceMesh:
    """Builds a mesh of ranks without connections: FSDP2 sends through what `set_custom_all_gather` is given."""
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    # torch's type stubs ask for a store, which only groups with connections need.
    build: Any = ProcessGroup

    class Mesh(DeviceMesh):
        def get_group(self, mesh_dim: int | str | None = None) -> ProcessGroup:
            group: ProcessGroup = build(rank, ranks)
            return group

    return Mesh(device, list(range(ranks)), _init_backend=False, _rank=rank)


class _Exchange(ABC):
    """Sends for FSDP2 through the group of the ranks that share the rows."""

    def __init__(self, shards: FullShards) -> None:
        self._shards = shards

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @abstractmethod
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> None:
        """Fills the output from the inputs of all ranks."""


@final
class _AllGather(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> None:
        self._shards.group.all_gather(output_tensor, input_tensor).wait()


@final
class _ReduceScatter(_Exchange):
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **options: Any) -> None:
        self._shards.group.reduce_scatter(output_tensor, input_tensor)
