"""Inception v3 without its auxiliary head (Szegedy et al. 2015, arXiv 1512.00567, table 1 and figures 5 to 7).

The channels within the blocks, which the paper does not print, are those of the authors' code.
"""

from __future__ import annotations

from torch import nn

from bench._export.zoo.blocks import Branches, build_head, chain, conv_norm


def inception_v3(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds Inception v3: 23.83 million parameters, 5.7 billion multiply-adds at 299 pixels. At least 75 pixels."""
    blocks = [build_a(192, 32), build_a(256, 64), build_a(288, 64), reduce_a()]
    blocks += [build_b(width) for width in (128, 160, 160, 192)]
    blocks += [reduce_b(), build_c(1280), build_c(2048)]
    return nn.Sequential(build_stem(in_channels), *blocks, build_head(2048, num_classes))


def build_stem(in_channels: int) -> nn.Sequential:
    """Builds the stem: 299 pixels become 192 channels of 35."""
    begin = chain(in_channels, (32, 3, 2, 0), (32, 3, 1, 0), (64, 3))
    return nn.Sequential(begin, nn.MaxPool2d(3, 2), chain(64, (80, 1), (192, 3, 1, 0)), nn.MaxPool2d(3, 2))


def pool_conv(inputs: int, outputs: int) -> nn.Sequential:
    """Builds the branch of an average of 3 x 3 pixels and a 1x1 convolution."""
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), conv_norm(inputs, outputs))


def split(inputs: int, outputs: int) -> Branches:
    """Builds a 1x3 and a 3x1 convolution side by side."""
    return Branches(conv_norm(inputs, outputs, (1, 3)), conv_norm(inputs, outputs, (3, 1)))


def build_a(inputs: int, pool: int) -> Branches:
    """Builds a block of 35 x 35 pixels, figure 5."""
    double = chain(inputs, (64, 1), (96, 3), (96, 3))
    return Branches(conv_norm(inputs, 64), chain(inputs, (48, 1), (64, 5)), double, pool_conv(inputs, pool))


def reduce_a() -> Branches:
    """Builds the step from 288 channels of 35 pixels to 768 of 17."""
    return Branches(conv_norm(288, 384, 3, 2, 0), chain(288, (64, 1), (96, 3), (96, 3, 2, 0)), nn.MaxPool2d(3, 2))


def build_b(width: int) -> Branches:
    """Builds a block of 17 x 17 pixels with kernels of 7 x 1 and 1 x 7, figure 6."""
    single = chain(768, (width, 1), (width, (1, 7)), (192, (7, 1)))
    double = chain(768, (width, 1), (width, (7, 1)), (width, (1, 7)), (width, (7, 1)), (192, (1, 7)))
    return Branches(conv_norm(768, 192), single, double, pool_conv(768, 192))


def reduce_b() -> Branches:
    """Builds the step from 768 channels of 17 pixels to 1,280 of 8."""
    wide = chain(768, (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2, 0))
    return Branches(chain(768, (192, 1), (320, 3, 2, 0)), wide, nn.MaxPool2d(3, 2))


def build_c(inputs: int) -> Branches:
    """Builds a block of 8 x 8 pixels, figure 7."""
    single = nn.Sequential(conv_norm(inputs, 384), split(384, 384))
    double = nn.Sequential(chain(inputs, (448, 1), (384, 3)), split(384, 384))
    return Branches(conv_norm(inputs, 320), single, double, pool_conv(inputs, 192))
