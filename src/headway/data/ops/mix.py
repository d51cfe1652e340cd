"""Mixup and cutmix: each sample takes a share of a partner's pixels and the same share of its label."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.augment_draws import Boxes
from headway.data.crops import Float64
from headway.data.ops.erase import erase
from headway.data.upload import to_device


def apply_mixup(images: torch.Tensor, others: torch.Tensor, kept: Float64) -> torch.Tensor:
    """Blends images with others: kept x image + (1 - kept) x other, as float32.

    Args:
        images: [b, ...], bytes or floats.
        others: the partners' images, of the same shape.
        kept: [b], share of the own image; 1 keeps it unchanged.

    Source: Zhang et al. 2017, "mixup: beyond empirical risk minimization" (arXiv 1710.09412).
    """
    # lerp from the image to the other one, so the share that is taken is 1 - kept.
    taken = to_device((1 - kept).astype(np.float32), images.device)
    return torch.lerp(images.float(), others.float(), taken.view(-1, *[1] * (images.ndim - 1)))


def apply_cutmix(images: torch.Tensor, others: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Pastes a box of the other image into each image; boxes int32 [b, 4] (left, top, width, height).

    Source: Yun et al. 2019, "CutMix" (arXiv 1905.04899).
    """
    return erase(images, boxes, others)


def mix_labels(labels: torch.Tensor, partner: NDArray[np.int64], kept: Float64, num_classes: int) -> torch.Tensor:
    """Mixes labels to shares of the classes, float32 [b, num_classes]: `kept` of the own, the rest of the partner's.

    Args:
        labels: int64 [b].
        partner: int64 [b], places in the batch.
        kept: [b], share of the own label.
        num_classes: number of classes.
    """
    # Added, not written: both labels may be the same class.
    shares = to_device(np.stack([kept, 1 - kept], axis=1).astype(np.float32), labels.device)
    both = torch.stack([labels, labels[to_device(partner, labels.device)]], dim=1)
    return shares.new_zeros(len(labels), num_classes).scatter_add_(1, both, shares)
