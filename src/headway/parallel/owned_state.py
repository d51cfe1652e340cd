"""State that its owner alone has: what checkpoints save of it, and read back by any other division."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import final

import torch

from headway.checkpoint.pieces import Piece

WEIGHTS, STATE = "model/", "optimizer/"


@final
class OwnedState:
    """The tensors of a checkpoint that one rank alone has: an optimizer's state, and the masters of 16-bit weights.

    Args:
        owners: the owner of each parameter, by its name.
        rank: this rank.
    """

    def __init__(self, owners: Mapping[str, int], rank: int) -> None:
        self._owners, self._rank = owners, rank
        self._narrow: dict[str, torch.dtype] = {}

    def set_narrow(self, weights: Mapping[str, torch.dtype]) -> None:
        """Sets the types of the 16-bit weights, whose owners have wider ones."""
        self._narrow = dict(weights)

    def wrap(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | Piece]:
        """Marks what this rank alone has, and leaves out what others have; all ranks save the rest together."""
        found: dict[str, torch.Tensor | Piece] = {}
        for name, tensor in tensors.items():
            owner = self._find_owner(name)
            if owner is None:
                found[name] = tensor
            elif owner == self._rank:
                found[name] = Piece(tensor, tuple(tensor.shape))
        return found

    def widen(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns a network's state with its 16-bit weights as fp32, in host memory."""
        return {
            name: value.to("cpu", torch.float32) if name in self._narrow else value for name, value in state.items()
        }

    def cut(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Returns the tensors of a checkpoint as this rank holds them; the state of others is not read."""
        return _OwnTensors(self, tensors)

    def is_elsewhere(self, name: str) -> bool:
        """Returns True if another rank has a tensor of the optimizer's state."""
        owner = self._find_owner(name)
        return name.startswith(STATE) and owner is not None and owner != self._rank

    def get_narrow(self, name: str) -> torch.dtype | None:
        """Returns the type in which this rank holds a weight whose wider copy another rank has; None for others."""
        return None if self._find_owner(name) in (None, self._rank) else self._narrow.get(name.removeprefix(WEIGHTS))

    def _find_owner(self, name: str) -> int | None:
        if name.startswith(WEIGHTS) and (weight := name.removeprefix(WEIGHTS)) in self._narrow:
            # One that is never stepped has a master on all ranks.
            return self._owners.get(weight)
        if name.startswith(STATE):
            return self._owners.get(name.removeprefix(STATE).rpartition("/")[0])
        return None


@final
class _OwnTensors(Mapping[str, torch.Tensor]):
    def __init__(self, state: OwnedState, tensors: Mapping[str, torch.Tensor]) -> None:
        self._state, self._tensors = state, tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        if self._state.is_elsewhere(name):
            raise KeyError(name)
        tensor, narrow = self._tensors[name], self._state.get_narrow(name)
        return tensor if narrow is None else tensor.to(narrow)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._tensors if not self._state.is_elsewhere(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors and not self._state.is_elsewhere(str(name))
