"""Optimizer states that differ between the ranks, in checkpoints: the states of all ranks, one after another.

Rank r of N saves its state of shape [...] as piece r of a tensor of shape [N, ...]. Any number of ranks can read them:
as many as saved them take their own; others take the mean of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

from torch import Tensor

from headway.checkpoint.pieces import Piece
from headway.checkpoint.stored_tensors import StoredTensors

STATES = "optimizer/"
PREFIX = "ranks/"


def wrap_states(tensors: Mapping[str, Tensor | Piece], rank: int, ranks: int) -> dict[str, Tensor | Piece]:
    """Marks the optimizer's states among the tensors of a checkpoint as those of this rank."""
    wrapped: dict[str, Tensor | Piece] = {}
    for name, tensor in tensors.items():
        if name.startswith(STATES) and isinstance(tensor, Tensor):
            wrapped[PREFIX + name] = Piece(tensor[None], (ranks, *tensor.shape), start=rank)
        else:
            wrapped[name] = tensor
    return wrapped


def select_states(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> Mapping[str, Tensor]:
    """Returns the tensors of a checkpoint with the optimizer's states for one rank; of its others nothing is read."""
    return _OwnStates(tensors, rank, ranks) if any(name.startswith(PREFIX) for name in tensors) else tensors


@final
class _OwnStates(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], rank: int, ranks: int) -> None:
        self._tensors, self._rank, self._ranks = tensors, rank, ranks
        self._names = {name.removeprefix(PREFIX): name for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        stored = self._names[name]
        if not stored.startswith(PREFIX):
            return self._tensors[stored]
        if isinstance(self._tensors, StoredTensors) and self._tensors.get_shape(stored)[0] == self._ranks:
            return self._tensors.read_range(stored, 0, self._rank, self._rank + 1)[0]
        states = self._tensors[stored]
        if len(states) == self._ranks:
            return states[self._rank]
        # The mean of momenta is the momentum of the mean gradient; counts of steps are equal on all ranks.
        return states.mean(0) if states.is_floating_point() else states[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names
