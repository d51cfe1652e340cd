"""Lookahead: slow weights follow the optimizer's, and training goes on from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.core.weight_copies import WeightCopies
from headway.optim.master_weights import MasterWeights


@final
class Lookahead:
    """Every `every_steps` steps of any optimizer: slow = slow + share * (weights - slow), then weights = slow (Zhang et
    al. 2019, "Lookahead Optimizer: k steps forward, 1 step back", arXiv 1907.08610, algorithm 1).

    At step t of n the share is 1 - (1 - alpha) * (t / n) ** power: always alpha with a power of 0, as in the paper;
    with a greater one it falls to alpha along the run, so that nothing is held back at first (airbench94, Jordan 2024,
    arXiv 2404.00498: 5 steps, alpha 0.226, power 3). Parameters and floating-point buffers follow, those of half
    precision in fp32; momentum stays as it is. What counts in the end is the slow weights: `swapped`. Ranks that train
    alike look ahead alike: nothing is exchanged.

    Args:
        model: on its device, in its memory format; or its Masters, which then want `write_back` after each update
            that did something.
        alpha: share of the way, in (0, 1].
        every_steps: the paper's k.
        power: above 0, `steps` is needed.
        steps: of the whole run.

    Raises:
        UsageError: an option out of range, or a run of fewer steps than `every_steps`, which would learn nothing.
    """

    def __init__(
        self,
        model: nn.Module | MasterWeights,
        *,
        alpha: float = 0.5,
        every_steps: int = 5,
        power: float = 0.0,
        steps: int | None = None,
    ) -> None:
        if not 0 < alpha <= 1 or every_steps < 1 or power < 0:
            what = f"Lookahead has alpha={alpha:g}, every_steps={every_steps} and power={power:g}"
            raise UsageError(what, fix="Give alpha in (0, 1], every_steps of at least 1, and power of at least 0.")
        if power > 0 and steps is None:
            raise UsageError("Lookahead with a power follows the run's length, which is not known", fix="Give steps.")
        if steps is not None and steps < every_steps:
            what = f"Lookahead looks ahead every {every_steps} steps, and the run has {steps}"
            raise UsageError(what, fix=f"Set every_steps to at most {steps}.")
        self.every_steps = every_steps
        self._alpha, self._power, self._steps = alpha, power, steps
        self._slow = WeightCopies(model, prefix="lookahead/", what="slow weights")

    def compute_share(self, step: int) -> float:
        """How far the slow weights go at a step; the first one is 1."""
        done = 1.0 if self._steps is None else min(1.0, step / self._steps)
        held_back: float = (1 - self._alpha) * done**self._power
        return 1 - held_back

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """After a step; the first one is 1. Whether it did something: it does at multiples of `every_steps`."""
        if step % self.every_steps:
            return False
        self._slow.update(self.compute_share(step))
        self._slow.copy_to_network()
        return True

    def swap_weights(self) -> AbstractContextManager[None]:
        """Within it the network has the slow weights: before the first update those it began with."""
        return self._slow.swap_in()

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        return self._slow.state()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from such a state, in place. Raises CheckpointError: it is another network's, or there is none."""
        self._slow.load(tensors)
