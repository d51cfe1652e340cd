"""Panel of the first batch: images as the network gets them, after augmentation and transforms."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from headway.observe.panel_images import encode_image
from headway.page import panel
from headway.page.panel import Panel
from headway.setup.train_setup import TrainSetup

IMAGES = 16
LONGEST_SIDE = 128


def build_first_batch_panel(setup: TrainSetup, images: torch.Tensor, labels: torch.Tensor) -> Panel | None:
    """Builds the panel; None if the user's transform gives images of another form. Waits for the device.

    Args:
        images: as the network gets them, float [b, C, H, W].
        labels: as the task gets them.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        return None
    pixels = setup.augment.restore_bytes(images[:IMAGES]).cpu().numpy()
    pictures = [
        (_encode_png(image), _describe_label(setup, label), "")
        for image, label in zip(pixels, labels[:IMAGES].detach().cpu().numpy(), strict=True)
    ]
    note = "Images of the first step as the network gets them, after crops, augmentation and transforms."
    return panel.images("first-batch", "First batch", pictures, section="Training", order=295, width="full", note=note)


def _encode_png(pixels: NDArray[np.uint8]) -> str:
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.BILINEAR)
    return encode_image(image)


def _describe_label(setup: TrainSetup, label: Any) -> str:
    classes = setup.target.classes
    if label.ndim == 0:
        return classes[int(label)] if setup.target.kind == "class" else f"{float(label):.4g}"
    if setup.target.kind == "value" or not classes:
        return ", ".join(f"{value:.4g}" for value in label.tolist())
    # Several labels, or labels that mixup has blended.
    shares = sorted(
        ((share, name) for name, share in zip(classes, label.tolist(), strict=False) if share), reverse=True
    )
    return ", ".join(name if share == 1 else f"{name} {share:.0%}" for share, name in shares[:3])
