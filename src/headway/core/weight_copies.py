"""Copies of a network's weights that follow them, for averages (EMA) and Lookahead, and can be swapped in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, final

from headway.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter


class HasStateDict(Protocol):
    """A network, or any object that returns its own tensors, not copies."""

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the tensors by name; writing to them changes the network."""


class HasWeights(HasStateDict, Protocol):
    """A network whose weights an optimizer steps, or an object that stands for one."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yields the parameters by name."""

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> object:
        """Loads the result of `state_dict`, in place."""


@final
class WeightCopies:
    """Copies of the parameters and floating-point buffers, in fp32 if the originals are in half precision.

    Args:
        whole: network, already on its device and in its memory format.
        prefix: prefix of the tensor names in a checkpoint.
        what: name of the copies in errors, for example `averaged weights`.
    """

    def __init__(self, whole: HasStateDict, *, prefix: str, what: str) -> None:
        import torch

        self._prefix, self._what = prefix, what
        # A network's own tensors, not aliases of their memory: fused trials move them to other memory.
        tensors = whole.state_dict(keep_vars=True) if isinstance(whole, torch.nn.Module) else whole.state_dict()
        self._now: dict[str, Tensor] = {name: value for name, value in tensors.items() if value.is_floating_point()}
        # fp32: a small share of a difference would be lost to rounding in 16 bits.
        wide = {name: torch.promote_types(value.dtype, torch.float32) for name, value in self._now.items()}
        self._copies = {name: value.detach().to(wide[name], copy=True) for name, value in self._now.items()}

    def update(self, share: float) -> None:
        """Moves the copies towards the network's weights by a share of the difference, in one fused pass."""
        import torch

        copies = list(self._copies.values())
        now = [value.detach().to(one.dtype) for value, one in zip(self._now.values(), copies, strict=True)]
        torch._foreach_lerp_(copies, now, share)

    def copy_to_network(self) -> None:
        """Writes the copies into the network."""
        import torch

        with torch.no_grad():
            torch._foreach_copy_(list(self._now.values()), list(self._copies.values()))

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Gives the network the values of the copies for the duration of the block."""
        import torch

        # In place: the optimizer and CUDA graphs refer to these very tensors.
        now = list(self._now.values())
        kept = [value.detach().clone() for value in now]
        self.copy_to_network()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(now, kept)

    def state(self) -> dict[str, Tensor]:
        """Returns the copies as tensors of a checkpoint."""
        return {self._prefix + name: value for name, value in self._copies.items()}

    def exist_in(self, tensors: Mapping[str, Tensor]) -> bool:
        """Returns True if a checkpoint holds such copies."""
        return any(name.startswith(self._prefix) for name in tensors)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the copies from a checkpoint, in place. Raises CheckpointError if they are missing or do not fit."""
        # Compare everything before the first copy, so that a wrong checkpoint changes nothing.
        size = len(self._prefix)
        copies = {name[size:]: value for name, value in tensors.items() if name.startswith(self._prefix)}
        kinds = {name: (value.shape, value.dtype) for name, value in copies.items()}
        wanted = {name: (value.shape, value.dtype) for name, value in self._copies.items()}
        if kinds != wanted:
            wrong = sorted(name for name in kinds.keys() | wanted.keys() if kinds.get(name) != wanted.get(name))[0]
            what = f"the {self._what} of this checkpoint are another network's"
            raise CheckpointError(f"{what}: {self._prefix + wrong!r} is missing, unknown, or of another shape or type")
        for name, value in copies.items():
            self._copies[name].copy_(value)
