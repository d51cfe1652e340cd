"""Small networks of several parts of `bench.sweep`."""

from __future__ import annotations

import torch
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


def plain(num_classes: int, in_channels: int, *, width: int = 16) -> nn.Module:
    """Builds three convolutions, two of them of stride 2, without batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, num_classes),
    )


def perceptron(num_classes: int, in_channels: int, *, width: int = 16) -> nn.Module:
    """Builds two hidden layers on images averaged to 8 x 8 pixels."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(8),
        nn.Flatten(),
        nn.Linear(64 * in_channels, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, num_classes),
    )


class _Block(nn.Module):
    """Two convolutions with batch norm, and the shortcut around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(images + self.body(images))


def residual(num_classes: int, in_channels: int, *, width: int = 16) -> nn.Module:
    """Builds a convolution of stride 2, batch norm, and two residual blocks with a pool between them."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        _Block(width),
        nn.MaxPool2d(2),
        _Block(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


def patch_net(num_classes: int, in_channels: int) -> nn.Module:
    """Builds a network with batch norm for 16 x 16 pixels that is cheap on a CPU: patches of 2 x 2, a convolution."""
    layers: list[nn.Module] = []
    # Channels in and out, kernel, stride, padding.
    for before, after, *shape in ((in_channels, 16, 2, 2, 0), (16, 32, 3, 2, 1)):
        layers += [nn.Conv2d(before, after, *shape, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, num_classes))
