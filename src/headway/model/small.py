"""A network for images of 8 to 24 pixels, such as scanned digits."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn


def small_net(num_classes: int = 10, in_channels: int = 3, *, width: int = 32) -> SmallNet:
    """Four convolutions, batch norm, global average pooling; 66,000 parameters at width 32.

    Input: normalised images, float [N, in_channels, H, W], H and W at least 4; output: logits [N, num_classes].
    """
    return SmallNet(num_classes, in_channels, width)


@final
class SmallNet(nn.Module):
    """Two convolutions, the image halved, two of twice the width, a linear head. Made by `small_net`."""

    def __init__(self, num_classes: int, in_channels: int, width: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_layer(in_channels, width),
            *_layer(width, width),
            nn.MaxPool2d(2),
            *_layer(width, 2 * width),
            *_layer(2 * width, 2 * width),
        )
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(F.adaptive_avg_pool2d(self.features(images), 1).flatten(1))
        return logits


def _layer(before: int, after: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)
