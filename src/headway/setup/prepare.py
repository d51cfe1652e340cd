"""A training batch as the network gets it."""

from __future__ import annotations

import torch

from headway.core.errors import UserCodeError
from headway.core.keys import UInt64
from headway.core.keys import keys as keys_of
from headway.data.batch import Batch
from headway.setup.build import TrainSetup


def prepare_batch(setup: TrainSetup, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Its images and labels: augmented, normalised, and through the user's transform.

    Args:
        step: the first one is 1; for the error.

    Raises:
        UserCodeError: the transform failed.
    """
    keys = batch.keys() if setup.augment.random or setup.transform else None
    images, labels = augment_batch(setup, batch, keys)
    if setup.transform is None:
        return images, labels
    try:
        images, labels = setup.transform(images, labels, keys)
    except Exception as error:
        what = f"the transform {setup.recipe.transform!r} failed: {type(error).__name__}: {error}"
        raise UserCodeError(what, where=f"step {step}") from error
    return images, labels


def augment_batch(setup: TrainSetup, batch: Batch, keys: UInt64 | None) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch's images and labels, augmented and normalised.

    Args:
        keys: uint64 [b], the samples' keys; None is enough where the augmentation is not `random`.
    """
    return setup.augment(
        batch.images,
        batch.labels,
        keys,
        epochs=batch.epochs,
        first=keys_of(batch.seed, 0, batch.samples) if setup.augment.alternating else None,
        masked=batch.served < 0 if batch.bad else None,
    )


def split_micro_batches(setup: TrainSetup, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Tensors of one step in micro-batches: parts as equal as can be, as batch norm wants no tail of one sample."""
    micro, samples = setup.recipe.micro_batch, tensors[0].shape[0]  # len() of a tensor takes 2 us more
    if not isinstance(micro, int) or micro >= samples:
        return [tensors]  # a slice of a tensor takes 1.5 us
    return list(zip(*(tensor.tensor_split(-(-samples // micro)) for tensor in tensors), strict=True))
