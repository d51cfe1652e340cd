"""Parameters of which each rank trains a part: what checkpoints save of them, and read back by any other division."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

import torch

from headway.checkpoint.pieces import Piece
from headway.checkpoint.stored_tensors import StoredTensors
from headway.comm.reducer import StepReduction
from headway.core.rows import Range
from headway.core.world import World
from headway.optim.split_parameters import SplitParameters


@final
@dataclass(frozen=True)
class OwnPart:
    """The part of a parameter that this rank trains.

    Attributes:
        shape: shape of the whole parameter.
        rows: entries of this rank, along the first dimension.
        saved_rows: those of them that this rank saves, where others have the same; None: all of them.
    """

    shape: tuple[int, ...]
    rows: Range
    saved_rows: Range | None = None

    @property
    def own_shape(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return (self.rows.length, *self.shape[1:])


@final
class OwnParts:
    """The parts of this rank, by the parameter's name.

    A tensor of a checkpoint belongs to a parameter if its name is `PREFIX/NAME` or `PREFIX/NAME/STATE`, and is divided
    as the parameter is if it has the same shape.
    """

    def __init__(self, parts: Mapping[str, OwnPart]) -> None:
        self.by_name = dict(parts)

    def wrap(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Piece]:
        """Marks the tensors that are parts, so that each rank saves its own."""
        return {name: self._wrap(name, tensor) for name, tensor in tensors.items()}

    def share(self, tensors: Mapping[str, torch.Tensor | Piece]) -> dict[str, torch.Tensor | Piece]:
        """Cuts the pieces that other ranks have too to the share that this rank saves."""
        return {name: self._share(name, one) if isinstance(one, Piece) else one for name, one in tensors.items()}

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns whole tensors as this rank holds them. Of a checkpoint on a disk nothing else is read."""
        return _CutTensors(self, tensors)

    def cut_state(self, network: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Cuts what an optimizer holds for whole parameters: some make their buffers before the first step."""
        for name, part in self.by_name.items():
            state = optimizer.state.get(network.get_parameter(name), {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and tuple(value.shape) == part.shape:
                    state[key] = value[slice(*part.rows)].clone()

    def find(self, name: str) -> OwnPart | None:
        """Finds the part of the parameter that a tensor of a checkpoint belongs to."""
        path = name.partition("/")[2]
        return self.by_name.get(path) or self.by_name.get(path.rpartition("/")[0])

    def _share(self, name: str, piece: Piece) -> Piece:
        part = self.find(name)
        if part is None or part.saved_rows is None:
            return piece
        saved = part.saved_rows
        tensor = piece.tensor[saved.start - piece.start : saved.stop - piece.start]
        return Piece(tensor, piece.shape, start=saved.start)

    def _wrap(self, name: str, tensor: torch.Tensor) -> torch.Tensor | Piece:
        part = self.find(name)
        # Numbers that belong to the whole parameter, such as a count of steps, are equal on all ranks.
        if part is None or tuple(tensor.shape) != part.own_shape:
            return tensor
        return Piece(tensor, part.shape, start=part.rows.start)


class DividedNetwork(Protocol):
    """A network of which this rank holds parts of some parameters; other ranks hold the rest.

    Attributes:
        parts: those parts.
        split: the same for what needs norms of whole parameters; None where each rank has whole ones only.
        is_whole_in_evaluation: True if each rank evaluates alone, inside of `join`; False if ranks exchange there too,
            so that all of them have to run the network equally often.
    """

    parts: OwnParts
    split: SplitParameters | None
    is_whole_in_evaluation: bool

    @property
    def unsummed(self) -> frozenset[str]:
        """Names of the parameters whose gradients the reducer does not sum."""

    def describe(self) -> str:
        """Returns a sentence for the user."""

    def connect(self, world: World) -> World:
        """Connects the network to the ranks of a world. Every rank calls it. Returns the ranks that sum gradients."""

    def complete_step(self, reduction: StepReduction) -> StepReduction:
        """Completes what the reducer has summed, before the optimizer's step. Every rank calls it."""

    def join(self) -> AbstractContextManager[None]:
        """Prepares the network for evaluation for the duration of the block. Every rank calls it."""

    def list_whole(self) -> dict[str, torch.Tensor]:
        """Lists the whole parameters by name on rank 0, inside of `join`. Every rank calls it."""


@final
class _CutTensors(Mapping[str, torch.Tensor]):
    def __init__(self, parts: OwnParts, tensors: Mapping[str, torch.Tensor]) -> None:
        self._parts, self._tensors = parts, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        part = self._parts.find(name)
        if part is None:
            return self._tensors[name]
        if isinstance(self._tensors, StoredTensors):
            if self._tensors.get_shape(name) != part.shape:
                return self._tensors[name]
            return self._tensors.read_range(name, 0, *part.rows)
        tensor = self._tensors[name]
        return tensor[slice(*part.rows)] if tuple(tensor.shape) == part.shape else tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors
