"""Lookahead: slow weights follow the optimizer's weights, and training goes on from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import final

import torch
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.weight_copies import HasStateDict, WeightCopies


@final
class Lookahead:
    """Slow weights beside any optimizer (Zhang et al. 2019, "Lookahead Optimizer", arXiv 1907.08610, algorithm 1).

    Every `every_steps` steps: slow = slow + share * (weights - slow), then weights = slow. At step t of n the share is
    1 - (1 - alpha) * (t / n) ** power. With a power of 0 it is always alpha, as in the paper. With a greater power it
    falls to alpha along the run, so that nothing is held back at first (airbench94, Jordan 2024, arXiv 2404.00498: 5
    steps, alpha 0.226, power 3). Parameters and floating-point buffers follow, those of half precision in fp32;
    momentum is left as it is. Evaluate with the slow weights: `swap_weights`. Ranks compute the same slow weights, so
    nothing is exchanged.

    Args:
        model: on its device, in its memory format; or its MasterWeights, which need `write_back` after each update that
            returns True.
        alpha: share of the way from the slow weights to the newest, in (0, 1].
        every_steps: the paper's k.
        power: with a power above 0, `steps` is required.
        steps: steps of the whole run.

    Raises:
        UsageError: an option is out of range, or the run has fewer steps than `every_steps`, and would learn nothing.
    """

    def __init__(
        self,
        model: HasStateDict,
        *,
        alpha: float = 0.5,
        every_steps: int = 5,
        power: float = 0.0,
        steps: int | None = None,
    ) -> None:
        # Nothing is clamped: a value out of range is a mistake.
        if not 0 < alpha <= 1 or every_steps < 1 or power < 0:
            what = f"Lookahead has alpha={alpha:g}, every_steps={every_steps} and power={power:g}"
            raise UsageError(what, fix="Give alpha in (0, 1], every_steps of at least 1, and power of at least 0.")
        if power > 0 and steps is None:
            raise UsageError("Lookahead with a power follows the run's length, which is not known", fix="Give steps.")
        if steps is not None and steps < every_steps:
            what = f"Lookahead looks ahead every {every_steps} steps, and the run has {steps}"
            raise UsageError(what, fix=f"Set every_steps to at most {steps}.")
        self.every_steps = every_steps
        self._alpha, self._power = alpha, power
        self._steps = steps
        self._slow = WeightCopies(model, prefix="lookahead/", what="slow weights")

    def compute_share(self, step: int) -> float:
        """Returns the fraction of the way to the newest weights that the slow weights go at a step, from 1 on."""
        # It falls along the run only if the length of the run is known.
        progress = 1.0 if self._steps is None else min(1.0, step / self._steps)
        distance: float = (1 - self._alpha) * progress**self._power
        return 1 - distance

    @torch.no_grad()
    def update(self, step: int) -> bool:
        """Updates the slow weights and copies them to the network, at multiples of `every_steps`.

        Call it after each step, from 1 on. Returns True if it changed the network.
        """
        # In between, the optimizer's own weights continue.
        if step % self.every_steps:
            return False
        # The slow weights follow first; then the network continues from them.
        self._slow.update(self.compute_share(step))
        self._slow.copy_to_network()
        return True

    def swap_weights(self) -> AbstractContextManager[None]:
        """Gives the network the slow weights within the block; before the first update, its initial weights."""
        return self._slow.swap_in()

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that a checkpoint saves, by name."""
        return self._slow.state()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads the result of `state`, in place. Raises CheckpointError if tensors are missing or do not fit."""
        self._slow.load(tensors)
