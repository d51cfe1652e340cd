"""Inception v4 (Szegedy, Ioffe, Vanhoucke and Alemi 2016, arXiv 1602.07261, figures 3 to 9)."""

from __future__ import annotations

from torch import nn

from bench._export.zoo.blocks import Branches, build_head, chain, conv_norm
from bench._export.zoo.inception_v3 import pool_conv, split


def inception_v4(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds Inception v4: 42.68 million parameters, 12.3 billion multiply-adds at 299 pixels. At least 75 pixels."""
    blocks = [*(build_a() for _ in range(4)), reduce_a(), *(build_b() for _ in range(7)), reduce_b()]
    blocks += [build_c() for _ in range(3)]
    return nn.Sequential(build_stem(in_channels), *blocks, build_head(1536, num_classes))


def build_stem(in_channels: int) -> nn.Sequential:
    """Builds the stem, figure 3: 299 pixels become 384 channels of 35."""
    wide = chain(160, (64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1, 0))
    return nn.Sequential(
        chain(in_channels, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3)),
        Branches(nn.MaxPool2d(3, 2), conv_norm(64, 96, 3, 2, 0)),
        Branches(chain(160, (64, 1), (96, 3, 1, 0)), wide),
        Branches(conv_norm(192, 192, 3, 2, 0), nn.MaxPool2d(3, 2)),
    )


def build_a() -> Branches:
    """Builds a block of 384 channels of 35 x 35 pixels, figure 4."""
    double = chain(384, (64, 1), (96, 3), (96, 3))
    return Branches(conv_norm(384, 96), chain(384, (64, 1), (96, 3)), double, pool_conv(384, 96))


def reduce_a() -> Branches:
    """Builds the step to 1,024 channels of 17 pixels, figure 7."""
    return Branches(conv_norm(384, 384, 3, 2, 0), chain(384, (192, 1), (224, 3), (256, 3, 2, 0)), nn.MaxPool2d(3, 2))


def build_b() -> Branches:
    """Builds a block of 1,024 channels of 17 x 17 pixels, figure 5."""
    single = chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1)))
    double = chain(1024, (192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7)))
    return Branches(conv_norm(1024, 384), single, double, pool_conv(1024, 128))


def reduce_b() -> Branches:
    """Builds the step to 1,536 channels of 8 pixels, figure 8."""
    wide = chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2, 0))
    return Branches(chain(1024, (192, 1), (192, 3, 2, 0)), wide, nn.MaxPool2d(3, 2))


def build_c() -> Branches:
    """Builds a block of 1,536 channels of 8 x 8 pixels, figure 6."""
    single = nn.Sequential(conv_norm(1536, 384), split(384, 256))
    double = nn.Sequential(chain(1536, (384, 1), (448, (3, 1)), (512, (1, 3))), split(512, 256))
    return Branches(conv_norm(1536, 256), single, double, pool_conv(1536, 256))
