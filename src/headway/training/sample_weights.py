"""SampleWeights: the weight of each sample in the gradient of a step."""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from headway.data.batch import Batch
from headway.data.upload import to_device
from headway.optim import draw_gradient_noise
from headway.setup.train_setup import TrainSetup


@final
class SampleWeights:
    """Weighs samples by 1 / divisor, masked ones by 0.

    Attributes:
        divisor: samples of the gradient: those of all ranks, or of this one in a step that it makes alone.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self._device, self._noise = setup.device, setup.recipe.optimizer.gradient_noise
        self.divisor = 0
        self._weights = torch.empty(0)

    def set_divisor(self, divisor: int) -> None:
        """Sets the divisor of the next step."""
        # It changes only when the batch grows, or when a rank begins to train alone.
        if self.divisor != divisor:
            self.divisor = divisor
            self._weights = torch.full((divisor,), 1 / divisor, device=self._device)

    def weigh(self, batch: Batch, samples: int) -> tuple[Tensor, Tensor, bool]:
        """Returns the weight of each sample in the gradient, without and with gradient noise, and if some are masked.

        Args:
            samples: number of samples on this rank.
        """
        # Most batches have no damaged sample, and are not searched for masked ones.
        masked = bool(batch.bad) and bool((batch.served < 0).any())
        weights = self._weights if samples == self.divisor else self._weights[:samples]
        if masked:
            weights = weights * to_device((batch.served >= 0).astype(np.float32), weights.device)
        if self._noise is None:
            return weights, weights, masked
        factors = draw_gradient_noise(batch.keys(), self._noise * self.divisor**0.5)
        return weights, weights * to_device(factors, weights.device), masked
