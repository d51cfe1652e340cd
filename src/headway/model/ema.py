"""The exponential moving average of a network's weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import final

import torch
from torch import Tensor

from headway.core.weight_copies import HasStateDict, WeightCopies


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

    def __init__(self, model: HasStateDict, *, half_life_steps: float, every_steps: int = 1) -> None:
        self.every_steps = every_steps
        self._decay = 0.5 ** (every_steps / half_life_steps)
        self._mean = WeightCopies(model, prefix="ema/", what="averaged weights")
        self._begun = False

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After a step; the first one is 1. It does something at multiples of `every_steps`."""
        if step % self.every_steps:
            return
        # The weight of the newest of n: (1 - d) / (1 - d^n); 1 for the first, and 1 - d after long.
        self._mean.update((1 - self._decay) / (1 - self._decay ** (step // self.every_steps)))
        self._begun = True

    def swap_weights(self) -> AbstractContextManager[None]:
        """Within it the network has the averages for its weights; before the first update, its own."""
        return self._mean.swap_in() if self._begun else nullcontext()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it: nothing before the first update."""
        return self._mean.state() if self._begun else {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from such a state, in place. Raises CheckpointError: it is another network's."""
        if found := self._mean.exist_in(tensors):
            self._mean.load(tensors)
        self._begun = found
