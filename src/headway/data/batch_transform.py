"""BatchTransform: a function of the user's own on batches of uint8 images, called by the loader's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from headway.core.errors import UserCodeError
from headway.data.batch import Batch


@final
@dataclass(frozen=True)
class BatchTransform:
    """Calls transform(images, labels, keys) with uint8 [b, C, H, W] images, labels and keys (uint64 [b], numpy).

    Attributes:
        name: import path of the function, for messages.
    """

    function: Callable[..., Any]
    name: str

    def transform_batch(self, batch: Batch) -> Batch:
        """Returns the batch with the images and labels that the function returns.

        Raises:
            UserCodeError: it fails, or returns images of another type or shape.
        """
        images = batch.images.permute(0, 3, 1, 2)
        try:
            changed, labels = self.function(images, batch.labels, batch.keys())
            if not isinstance(changed, torch.Tensor) or (changed.dtype, changed.shape) != (images.dtype, images.shape):
                got = f"{tuple(changed.shape)} {changed.dtype}" if isinstance(changed, torch.Tensor) else type(changed)
                raise TypeError(f"it returned {got}: with transform_on: uint8, return uint8 {tuple(images.shape)}")
        except Exception as error:
            what = f"the transform {self.name!r} failed: {type(error).__name__}: {error}"
            raise UserCodeError(what, where=f"position {int(batch.positions[0])}") from error
        return replace(batch, images=changed.permute(0, 2, 3, 1), labels=labels)
