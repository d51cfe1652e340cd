"""The exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, final

import torch
from torch import Tensor

from headway.core.errors import CheckpointError

PREFIX = "ema/"


class Whole(Protocol):
    """A network, or whatever else hands out its tensors, and not copies of them."""

    def state_dict(self) -> dict[str, Tensor]: ...


@final
class Ema:
    """Averages parameters and floating-point buffers, those of half precision in fp32; one pass an update.

    An update of t steps ago counts 0.5 ** (t / half_life_steps); the weights of all updates sum to one from the first
    one on, as in Adam's correction (Kingma and Ba 2014, arXiv 1412.6980, section 3), so the network's first, random
    weights are no part of it. Ranks that train alike average alike: nothing is exchanged.

    Args:
        model: on its device, in its memory format; or its Masters, whose tensors are averaged then.
        half_life_steps: steps after which an update counts half.
        every_steps: steps between two updates.
    """

    def __init__(self, model: Whole, *, half_life_steps: float, every_steps: int = 1) -> None:
        self.every_steps = every_steps
        self._decay = 0.5 ** (every_steps / half_life_steps)
        self._now = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
        wide = {name: torch.promote_types(value.dtype, torch.float32) for name, value in self._now.items()}
        self._mean = {name: value.to(wide[name], copy=True) for name, value in self._now.items()}
        self._begun = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After a step; the first one is 1. It does something at multiples of `every_steps`."""
        if step % self.every_steps:
            return
        # The weight of the newest of n: (1 - d) / (1 - d^n); 1 for the first, and 1 - d after long.
        share = (1 - self._decay) / (1 - self._decay ** (step // self.every_steps))
        mean = list(self._mean.values())
        now = [value.to(one.dtype) for value, one in zip(self._now.values(), mean, strict=True)]
        torch._foreach_lerp_(mean, now, share)
        self._begun = True

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Within it the network has the averages for its weights; before the first update, its own."""
        if not self._begun:
            yield
            return
        now = list(self._now.values())
        kept = [value.clone() for value in now]
        torch._foreach_copy_(now, list(self._mean.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(now, kept)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: nothing before the first update."""
        return {PREFIX + name: value for name, value in self._mean.items()} if self._begun else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from such a state, in place. Raises CheckpointError: it is another network's."""
        found = {name.removeprefix(PREFIX): value for name, value in tensors.items() if name.startswith(PREFIX)}
        if self._begun or found:
            same = found.keys() == self._mean.keys()
            if found and not (same and all(found[name].shape == one.shape for name, one in self._mean.items())):
                raise CheckpointError("the averaged weights of this checkpoint are another network's")
        for name, value in found.items():
            self._mean[name].copy_(value)
        self._begun = bool(found)
