"""Mixup and cutmix: mixes the pixels and the labels of each sample with those of a partner."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from headway.data.augment_draws import Boxes
from headway.data.crops import Float64
from headway.data.ops.erase import erase
from headway.data.upload import to_device


def apply_mixup(images: torch.Tensor, partner_images: torch.Tensor, image_weight: Float64) -> torch.Tensor:
    """Returns image_weight x image + (1 - image_weight) x partner image, float32 [b, ...].

    Args:
        images: [b, ...], bytes or floats.
        partner_images: the partners' images, of the same shape.
        image_weight: [b], 0 to 1; 1 keeps an image unchanged.

    Source: Zhang et al. 2017, "mixup: beyond empirical risk minimization" (arXiv 1710.09412).
    """
    partner_weight = to_device((1 - image_weight).astype(np.float32), images.device)
    return torch.lerp(images.float(), partner_images.float(), partner_weight.view(-1, *[1] * (images.ndim - 1)))


def apply_cutmix(images: torch.Tensor, partner_images: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Returns a copy of the images, each with a box from its partner; boxes int32 [b, 4] (left, top, width, height).

    Source: Yun et al. 2019, "CutMix" (arXiv 1905.04899).
    """
    # `erase` takes a fill for each pixel too, so pasting is erasing with the partner.
    return erase(images, boxes, partner_images)


def mix_labels(
    labels: torch.Tensor, partner: NDArray[np.int64], label_weight: Float64, num_classes: int
) -> torch.Tensor:
    """Returns class probabilities, float32 [b, num_classes]: each label has its weight, its partner's label the rest.

    Args:
        labels: int64 [b].
        partner: int64 [b], index in the batch of each sample's partner.
        label_weight: [b], weight of the sample's own label.
        num_classes: number of classes.
    """
    # Added, not written: both labels may be the same class.
    weights = to_device(np.stack([label_weight, 1 - label_weight], axis=1).astype(np.float32), labels.device)
    label_pairs = torch.stack([labels, labels[to_device(partner, labels.device)]], dim=1)
    return weights.new_zeros(len(labels), num_classes).scatter_add_(1, label_pairs, weights)
