"""Synthetic data: batches that lie on the device already, so that a run shows what it would do if input were free."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from headway.data.batch import Batch
from headway.data.options import SyntheticRecipe
from headway.data.order import share


class Synthetic:
    """Endless batches of the same random images and labels, made once; the labels can be learnt by heart only.

    Args:
        recipe: sizes.
        batch: samples of each step.
        seed: of the pixels, the labels and the keys.
        start: first position.
        device: where the batch lies.
        rank, world: each step is shared among so many.
    """

    def __init__(
        self,
        recipe: SyntheticRecipe,
        *,
        batch: int,
        seed: int,
        start: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (batch, *recipe.size, recipe.channels)
        self._share = low, high = share(batch, rank, world)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)[low:high].to(device)
        self._labels = torch.randint(0, recipe.classes, (batch,), generator=generator)[low:high].to(device)
        self._samples, self._batch, self._seed, self._start = recipe.samples, batch, seed, start

    def __iter__(self) -> Iterator[Batch]:
        low, high = self._share
        first, zeros = np.arange(low, high), np.zeros(high - low, np.int64)
        position = self._start
        while True:
            positions = first + position
            epoch, slot = divmod(position, self._samples)
            if slot + high <= self._samples:  # two numpy calls fewer, 3 us
                epochs, samples = zeros + epoch, first + slot
            else:
                epochs, samples = positions // self._samples, positions % self._samples
            yield Batch(
                images=self._images,
                labels=self._labels,
                positions=positions,
                epochs=epochs,
                samples=samples,
                served=samples,
                seed=self._seed,
            )
            position += self._batch
