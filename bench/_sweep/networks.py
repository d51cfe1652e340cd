"""The small network of two parts of `bench.sweep`."""

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
