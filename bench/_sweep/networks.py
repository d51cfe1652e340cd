"""Small networks of several parts of `bench.sweep`."""

from __future__ import annotations

from torch import nn


def two_convolutions(num_classes: int, in_channels: int) -> nn.Module:
    """Builds a plain network for 8 x 8 pixels, without batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, num_classes),
    )


def patch_net(num_classes: int, in_channels: int) -> nn.Module:
    """Builds a network with batch norm for 16 x 16 pixels that is cheap on a CPU: patches of 2 x 2, a convolution."""
    layers: list[nn.Module] = []
    # Channels in and out, kernel, stride, padding.
    for before, after, *shape in ((in_channels, 16, 2, 2, 0), (16, 32, 3, 2, 1)):
        layers += [nn.Conv2d(before, after, *shape, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, num_classes))
