"""Blocks that several of these networks are made of."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

Kernel = int | tuple[int, int]


def conv_norm(
    inputs: int,
    outputs: int,
    kernel: Kernel = 1,
    stride: int = 1,
    padding: Kernel | None = None,
    *,
    groups: int = 1,
    activation: type[nn.ReLU | nn.ReLU6] | None = nn.ReLU,
) -> nn.Sequential:
    """Builds a convolution without a bias, its batch norm and an activation.

    Args:
        padding: None: so many zeros that an odd kernel with stride 1 keeps the size of the image.
    """
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    layers: list[nn.Module] = [
        nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]
    return nn.Sequential(*layers, *([activation(inplace=True)] if activation else []))


def chain(inputs: int, *steps: tuple[int, Kernel] | tuple[int, Kernel, int, int]) -> nn.Sequential:
    """Builds one `conv_norm` after the other.

    Args:
        steps: channels and kernel of each, and its stride and padding where they are not 1 and None.
    """
    layers = []
    for step in steps:
        layers.append(conv_norm(inputs, *step))
        inputs = step[0]
    return nn.Sequential(*layers)


def build_head(channels: int, num_classes: int) -> nn.Sequential:
    """Builds the mean over the image and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes))


@final
class Branches(nn.Module):
    """Runs all branches on the same input and concatenates their channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([branch(hidden) for branch in self.branches], 1)
