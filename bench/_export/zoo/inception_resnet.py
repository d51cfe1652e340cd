"""Inception-ResNet v2 (Szegedy, Ioffe, Vanhoucke and Alemi 2016, arXiv 1602.07261, figures 15 to 19).

Stem, widths and scales of the branches are those of the authors' code, which differs from the figures.
"""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from bench._export.zoo.blocks import Branches, build_head, chain, conv_norm
from bench._export.zoo.inception_v3 import build_stem, pool_conv


def inception_resnet_v2(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds Inception-ResNet v2: 55.84 million parameters, 13.2 billion multiply-adds at 299 pixels."""
    double = chain(192, (64, 1), (96, 3), (96, 3))
    begin = Branches(conv_norm(192, 96), chain(192, (48, 1), (64, 5)), double, pool_conv(192, 64))
    stages: list[nn.Module] = [build_stem(in_channels), begin, *(build_35() for _ in range(10)), reduce_a()]
    stages += [*(build_17() for _ in range(20)), reduce_b(), *(build_8() for _ in range(9))]
    # The last block has no ReLU and adds all of its branch.
    stages += [build_8(scale=1.0, activates=False), conv_norm(2080, 1536)]
    return nn.Sequential(*stages, build_head(1536, num_classes))


@final
class ScaledResidual(nn.Module):
    """Branches, a linear 1x1 convolution of theirs, and a shortcut: as many channels as the input has."""

    def __init__(self, branches: Branches, width: int, channels: int, scale: float, activates: bool = True) -> None:
        super().__init__()
        self.branches, self.scale, self.activates = branches, scale, activates
        self.project = nn.Conv2d(width, channels, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        added = hidden + self.scale * self.project(self.branches(hidden))
        return F.relu(added, inplace=True) if self.activates else added


def build_35() -> ScaledResidual:
    """Builds a block of 320 channels of 35 x 35 pixels, figure 16."""
    branches = Branches(conv_norm(320, 32), chain(320, (32, 1), (32, 3)), chain(320, (32, 1), (48, 3), (64, 3)))
    return ScaledResidual(branches, 128, 320, 0.17)


def reduce_a() -> Branches:
    """Builds the step to 1,088 channels of 17 pixels."""
    return Branches(conv_norm(320, 384, 3, 2, 0), chain(320, (256, 1), (256, 3), (384, 3, 2, 0)), nn.MaxPool2d(3, 2))


def build_17() -> ScaledResidual:
    """Builds a block of 1,088 channels of 17 x 17 pixels, figure 17."""
    branches = Branches(conv_norm(1088, 192), chain(1088, (128, 1), (160, (1, 7)), (192, (7, 1))))
    return ScaledResidual(branches, 384, 1088, 0.1)


def reduce_b() -> Branches:
    """Builds the step to 2,080 channels of 8 pixels, figure 18."""
    branches = [chain(1088, (256, 1), (width, 3, 2, 0)) for width in (384, 288)]
    return Branches(*branches, chain(1088, (256, 1), (288, 3), (320, 3, 2, 0)), nn.MaxPool2d(3, 2))


def build_8(scale: float = 0.2, activates: bool = True) -> ScaledResidual:
    """Builds a block of 2,080 channels of 8 x 8 pixels, figure 19."""
    branches = Branches(conv_norm(2080, 192), chain(2080, (192, 1), (224, (1, 3)), (256, (3, 1))))
    return ScaledResidual(branches, 448, 2080, scale, activates)
