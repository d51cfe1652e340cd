"""A network for images of 8 to 24 pixels, such as scanned digits."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn


def small_net(num_classes: int = 10, in_channels: int = 3, *, width: int = 32) -> SmallNet:
    """Builds a network of four convolutions with batch norm and global average pooling.

    It has 66,000 parameters at width 32.

    Input: normalised images, float [N, in_channels, H, W], H and W at least 4; output: logits [N, num_classes].
    """
    return SmallNet(num_classes, in_channels, width)


@final
class SmallNet(nn.Module):
    """Two convolutions, a max pool, two convolutions of twice the width, a linear head. Made by `small_net`."""

    def __init__(self, num_classes: int, in_channels: int, width: int) -> None:
        super().__init__()
        self.layer1 = ConvLayer(in_channels, width)
        self.layer2 = ConvLayer(width, width)
        self.layer3 = ConvLayer(width, 2 * width)
        self.layer4 = ConvLayer(2 * width, 2 * width)
        # Global average pooling makes the head independent of the image size.
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        # One max pool, so that images of 8 pixels still have 4 x 4 positions.
        hidden = F.max_pool2d(self.layer2(self.layer1(images)), 2)
        hidden = self.layer4(self.layer3(hidden))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return logits


@final
class ConvLayer(nn.Module):
    """A 3x3 convolution, batch norm, ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        # Without a bias, which batch norm would subtract.
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(hidden)), inplace=True)
