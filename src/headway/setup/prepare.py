"""Prepares training batches for the network: augmentation, the user's transform, micro-batches."""

from __future__ import annotations

import torch

from headway.core.errors import UserCodeError
from headway.core.random_keys import UInt64, make_keys
from headway.data.batch import Batch
from headway.data.batch_transform import check_transformed
from headway.setup.train_setup import TrainSetup


def prepare_batch(setup: TrainSetup, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and labels of a batch: augmented, normalised, and passed through the user's transform.

    Args:
        batch: decoded samples on the device.
        step: number of the step for the error message; the first one is 1.

    Raises:
        UserCodeError: the transform failed. RecipeError: its result has the wrong form.
    """
    # Keys are computed for every sample on the host, and only random augmentations and transforms use them.
    keys = batch.keys() if setup.augment.needs_keys or setup.transform else None
    images, labels = augment_batch(setup, batch, keys)
    if setup.transform is None:
        return images, labels
    name, where = str(setup.recipe.transform), f"step {step}"
    try:
        result = setup.transform(images, labels, keys)
    except Exception as error:
        what = f"the transform {name!r} failed: {type(error).__name__}: {error}"
        raise UserCodeError(what, where=where) from error
    return check_transformed(result, images, labels, name, where)


def augment_batch(setup: TrainSetup, batch: Batch, keys: UInt64 | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and labels of a batch, augmented and normalised.

    Args:
        keys: the samples' keys, uint64 [b]. None if the augmentation is not `random`.
    """
    return setup.augment(
        batch.images,
        batch.labels,
        keys,
        epochs=batch.epochs,
        first_epoch_keys=make_keys(batch.seed, 0, batch.samples) if setup.augment.needs_epochs else None,
        masked=batch.served < 0 if batch.bad else None,
    )


def split_micro_batches(setup: TrainSetup, *tensors: torch.Tensor, largest: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Splits the tensors of one step, each [b, ...], into micro-batches of nearly equal size, as views.

    Args:
        largest: samples of the rank that has most, if not those given. All ranks then have as many micro-batches, which
            networks with an exchange need.
    """
    # len() of a tensor takes 2 us more than its shape, and a slice of it 1.5 us: this runs in every step.
    micro_batch = setup.recipe.micro_batch
    samples = max(tensors[0].shape[0], largest)
    if not isinstance(micro_batch, int) or micro_batch >= samples:
        return [tensors]
    # Nearly equal, because batch norm fails on a last part of one sample.
    return list(zip(*(tensor.tensor_split(-(-samples // micro_batch)) for tensor in tensors), strict=True))
