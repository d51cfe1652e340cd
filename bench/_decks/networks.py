"""The network of a figure of the decks that no recipe of Headway trains."""

from __future__ import annotations

from torch import nn

WIDTH, LAYERS = 100, 3


def sigmoid_net(num_classes: int, in_channels: int, *, norm: bool, pixels: int = 64) -> nn.Module:
    """Builds three layers of 100 sigmoids, each with or without batch norm before it.

    Ioffe and Szegedy 2015 (arXiv 1502.03167), section 4.1 and figure 1. Weights are small random Gaussians there; here
    their deviation is 0.1.

    Args:
        pixels: of an image; the network takes images of 8 x 8 by default.
    """
    modules: list[nn.Module] = [nn.Flatten()]
    inputs = pixels * in_channels
    for _ in range(LAYERS):
        layer = nn.Linear(inputs, WIDTH)
        nn.init.normal_(layer.weight, std=0.1)
        modules += [layer, nn.BatchNorm1d(WIDTH), nn.Sigmoid()] if norm else [layer, nn.Sigmoid()]
        inputs = WIDTH
    return nn.Sequential(*modules, nn.Linear(inputs, num_classes))
