"""BatchTransform: a function of the user's own on batches of uint8 images, called by the loader's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from headway.core.errors import RecipeError, UserCodeError
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
            UserCodeError: it fails. RecipeError: it returns images of another type or shape.
        """
        images = batch.images.permute(0, 3, 1, 2)
        where = f"position {int(batch.positions[0])}"
        try:
            result = self.function(images, batch.labels, batch.keys())
        except Exception as error:
            what = f"the transform {self.name!r} failed: {type(error).__name__}: {error}"
            raise UserCodeError(what, where=where) from error
        changed, labels = check_transformed(result, images, batch.labels, self.name, where, keeps_shape=True)
        return replace(batch, images=changed.permute(0, 2, 3, 1), labels=labels)


def check_transformed(
    result: Any, images: torch.Tensor, labels: torch.Tensor, name: str, where: str, *, keeps_shape: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the images and labels that a transform of batches returned.

    Args:
        images: those it was given, [b, C, H, W]. labels: likewise, [b, ...].
        name: import path of the transform. where: the step or position, for the message.
        keeps_shape: the images must keep their shape; else only the number of samples counts.

    Raises:
        RecipeError: the result is not a pair of tensors with as many samples, on the same device, of the right type.
    """
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    changed: Any = result[0] if is_pair else result
    changed_labels: Any = result[1] if is_pair else None
    # Only shapes, types and devices are compared: this runs in every step, and must not wait for a device.
    is_good = (
        isinstance(changed, torch.Tensor)
        and isinstance(changed_labels, torch.Tensor)
        and changed.ndim == 4
        and changed.shape[0] == images.shape[0] == changed_labels.shape[0]
        and (changed.dtype == images.dtype if keeps_shape else changed.is_floating_point())
        and (not keeps_shape or changed.shape == images.shape)
        and changed.device == images.device
        and changed_labels.device == labels.device
    )
    if not is_good:
        got = f"({_describe(changed)}, {_describe(changed_labels)})" if is_pair else _describe(result)
        fix = f"Return (images, labels), here ({_describe(images)}, {_describe(labels)})"
        if not keeps_shape:
            fix += "; another height and width are fine"
        raise RecipeError(f"the transform {name!r} returned {got}", where=where, fix=fix)
    assert isinstance(changed, torch.Tensor)
    assert isinstance(changed_labels, torch.Tensor)
    return changed, changed_labels


def _describe(value: Any) -> str:
    """Describes a value as `float32 [30, 1, 8, 8]`, or by its type."""
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else f"a {type(value).__name__}"
    device = "" if value.device.type == "cpu" else f" on {value.device}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
