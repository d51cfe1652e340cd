"""The first images of a run, for `init` and the checks of the network."""

from __future__ import annotations

from typing import NamedTuple

import torch

from headway.data.augment import Augment
from headway.setup.inputs import Inputs
from headway.setup.recipe import TrainRecipe


class FirstBatch(NamedTuple):
    """Normalised images and their labels."""

    images: torch.Tensor
    labels: torch.Tensor

    def take(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the first images and labels, as views."""
        return self.images[:samples], self.labels[:samples]


def load_first_batch(inputs: Inputs, recipe: TrainRecipe, augment: Augment) -> FirstBatch:
    """Loads the first batch of a recipe."""
    batch = inputs.read_first_batch(recipe)
    # A copy, because synthetic batches are slices of one tensor.
    return FirstBatch(augment.normalise(batch.images), batch.labels.clone())
