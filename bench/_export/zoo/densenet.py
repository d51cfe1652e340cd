"""DenseNet-BC (Huang, Liu, van der Maaten and Weinberger 2016, arXiv 1608.06993, table 1)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from bench._export.zoo.blocks import build_head

# Layers of the four blocks, growth rate, channels of the stem.
DEPTHS = {
    121: ((6, 12, 24, 16), 32, 64),
    161: ((6, 12, 36, 24), 48, 96),
    169: ((6, 12, 32, 32), 32, 64),
    201: ((6, 12, 48, 32), 32, 64),
}
BOTTLENECK = 4
"""Channels behind the 1x1 convolution of a layer, in growth rates."""


def densenet(num_classes: int = 1000, in_channels: int = 3, *, depth: int = 121) -> nn.Sequential:
    """Builds DenseNet-121, -161, -169 or -201: 7.98, 28.68, 14.15 and 20.01 million parameters."""
    blocks, growth, channels = DEPTHS[depth]
    stem = nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False)
    layers: list[nn.Module] = [stem, *norm_relu(channels), nn.MaxPool2d(3, 2, 1)]
    for number, length in enumerate(blocks):
        if number:
            # A transition halves the channels and the sides.
            half = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [*norm_relu(channels), half, nn.AvgPool2d(2)]
            channels //= 2
        for _ in range(length):
            layers.append(DenseLayer(channels, growth))
            channels += growth
    return nn.Sequential(*layers, *norm_relu(channels), build_head(channels, num_classes))


def norm_relu(channels: int) -> tuple[nn.Module, nn.Module]:
    """Builds a batch norm and a ReLU."""
    return nn.BatchNorm2d(channels), nn.ReLU(inplace=True)


@final
class DenseLayer(nn.Module):
    """Adds `growth` channels to those of its input: [N, C, H, W] -> [N, C + growth, H, W]."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        width = BOTTLENECK * growth
        self.branch = nn.Sequential(
            *norm_relu(channels),
            nn.Conv2d(channels, width, 1, bias=False),
            *norm_relu(width),
            nn.Conv2d(width, growth, 3, padding=1, bias=False),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, self.branch(hidden)], 1)
