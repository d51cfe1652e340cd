"""Synthetic data: batches that lie on the device already. They show a run's speed if its input were free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np
import torch

from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.data.data_recipe import SyntheticRecipe
from headway.data.order import get_rank_slots


@final
class SyntheticLoader:
    """Endless batches of the same random images and labels. A network can only memorise the labels.

    Args:
        recipe: sizes of the pretended data set.
        batch: samples of each step, or a plan of batches that grow.
        seed: seed of the pixels, the labels and the keys.
        start: first position.
        device: device of the batches.
        rank: this rank takes its slots of every step; see `get_rank_slots`.
        world: number of ranks.
    """

    def __init__(
        self,
        recipe: SyntheticRecipe,
        *,
        batch: int | BatchPlan,
        seed: int,
        start: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        # A separate generator, so that the global random state does not change.
        generator = torch.Generator().manual_seed(seed)
        plan = batch if isinstance(batch, BatchPlan) else BatchPlan(batch)
        shape = (plan.largest_batch, *recipe.size, recipe.channels)
        self._images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self._labels = torch.randint(0, recipe.classes, (plan.largest_batch,), generator=generator)
        self._samples = recipe.samples
        self._plan = plan
        self._seed = seed
        self._start = start
        self._device = device
        self._rank = rank
        self._world = world

    def __iter__(self) -> Iterator[Batch]:
        return self._serve(self._start)

    def read_step(self, position: int) -> Batch:
        """Returns the batch of the step that begins at a position."""
        return next(self._serve(position))

    def _serve(self, position: int) -> Iterator[Batch]:
        size = 0
        while True:
            # Copied again only if the batch grows: the steps of one size share their tensors.
            if (new_size := self._plan.get_batch_size(position)) != size:
                size = new_size
                first_slot, end_slot = get_rank_slots(size, self._rank, self._world)
                images = self._images[first_slot:end_slot].to(self._device)
                labels = self._labels[first_slot:end_slot].to(self._device)
                slots = np.arange(first_slot, end_slot)
                zeros = np.zeros(end_slot - first_slot, np.int64)
            # Positions, epochs and samples advance as in a run in index order.
            positions = slots + position
            epoch, epoch_offset = divmod(position, self._samples)
            # Most steps lie inside one epoch; without divisions of arrays they save two numpy calls, 3 us.
            if epoch_offset + end_slot <= self._samples:
                epochs, samples = zeros + epoch, slots + epoch_offset
            else:
                epochs, samples = positions // self._samples, positions % self._samples
            yield Batch(
                images=images,
                labels=labels,
                positions=positions,
                epochs=epochs,
                samples=samples,
                served=samples,
                seed=self._seed,
            )
            position += size
