"""VGG16 for 224 pixels (Simonyan and Zisserman 2014, arXiv 1409.1556, table 1, column D)."""

from __future__ import annotations

from torch import nn

from headway.model import vgg

STEPS = 31
"""Layers of its convolutions: 13 of them, each with a ReLU, and five pools."""


def build_features(in_channels: int = 3) -> list[nn.Module]:
    """Builds the convolutions, ReLUs and pools of VGG16: 14.7 million parameters, 1/32 of the image's side."""
    return list(vgg(1, in_channels, depth=16, batch_norm=False))[:STEPS]


def build_linear(dropout: float = 0.5) -> list[nn.Module]:
    """Builds the two hidden linear layers, from 512 channels of 7 x 7 pixels."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        layers += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout(dropout)]
    return layers


def vgg16(num_classes: int = 1000, in_channels: int = 3) -> nn.Sequential:
    """Builds VGG16: 138.36 million parameters, 15.5 billion multiply-adds at 224 pixels."""
    pool = nn.AdaptiveAvgPool2d(7)
    return nn.Sequential(*build_features(in_channels), pool, *build_linear(), nn.Linear(4096, num_classes))
