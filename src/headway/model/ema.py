"""Exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from headway.core.weight_copies import HasStateDict, WeightCopies


@final
class Ema:
    """Exponential moving average of parameters and floating-point buffers, those of half precision in fp32.

    An update of t steps ago has a weight proportional to 0.5 ** (t / half_life_steps). The weights of all updates sum
    to 1 from the first one on, as in Adam's bias correction (Kingma and Ba 2014, arXiv 1412.6980, section 3), so the
    random initial weights are no part of it. Ranks compute the same average, so nothing is exchanged.

    Args:
        model: on its device, in its memory format; or its MasterWeights, whose tensors are then averaged.
        half_life_steps: steps after which an update counts half as much.
        every_steps: steps between two updates.
    """

    def __init__(self, model: HasStateDict, *, half_life_steps: float, every_steps: int = 1) -> None:
        self.every_steps = every_steps
        self._half_life_steps = half_life_steps
        # Copies in fp32, as small updates vanish in 16 bits.
        self._mean = WeightCopies(model, prefix="ema/", what="averaged weights")
        self._was_updated = False

    @torch.no_grad()
    def update(self, step: int, since: int | None = None) -> None:
        """Updates the average at multiples of `every_steps`. Call it after each step, from 1 on.

        Args:
            since: steps since the last call, if not each step is followed by one: it then updates the average.
        """
        if since is None:
            if step % self.every_steps:
                return
            since = self.every_steps
        # The weight of the newest of n updates is (1 - d) / (1 - d^n): 1 for the first, near 1 - d after many.
        self._mean.update(self._forget(since) / self._forget(step))
        self._was_updated = True

    def _forget(self, steps: int) -> float:
        """Returns the share of the average that is forgotten in so many steps."""
        return float(1 - 0.5 ** (steps / self._half_life_steps))

    def swap_weights(self) -> AbstractContextManager[None]:
        """Gives the network the averages within the block. Before the first update it keeps its own weights."""
        return self._mean.swap_in() if self._was_updated else nullcontext()

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint saves, by name; none before the first update."""
        return self._mean.state() if self._was_updated else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the result of `state`, in place. Raises CheckpointError if tensors do not fit."""
        # A checkpoint from before the first update has no average.
        if has_average := self._mean.exist_in(tensors):
            self._mean.load(tensors)
        self._was_updated = has_average
