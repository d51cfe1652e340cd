"""The generator of DCGAN (Radford, Metz and Chintala 2015, arXiv 1511.06434)."""

from __future__ import annotations

from torch import nn

NOISE = 100
"""Channels of the generator's input, an image of one pixel."""


def dcgan(num_classes: int = 3, in_channels: int = NOISE, *, width: int = 64) -> nn.Sequential:
    """Builds the generator: noise [N, 100, 1, 1] -> images [N, 3, 64, 64] within -1 and 1.

    The usual examples, MXNet's and PyTorch's, have a width of 64, half of the paper's: 3.58 million parameters.

    Args:
        num_classes: channels of the images.
    """
    widths = [8 * width, 4 * width, 2 * width, width]
    layers: list[nn.Module] = [nn.ConvTranspose2d(in_channels, widths[0], 4, bias=False)]
    for inputs, outputs in zip(widths, [*widths[1:], num_classes], strict=True):
        # Each transposed convolution doubles the sides.
        grow = nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False)
        layers += [nn.BatchNorm2d(inputs), nn.ReLU(inplace=True), grow]
    return nn.Sequential(*layers, nn.Tanh())
