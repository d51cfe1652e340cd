"""A network with batch norm and one large fully connected layer."""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.nn import functional as F

WIDTHS = (32, 64, 64, 64)
SIDE = 16
"""Of the last maps, for images of 64 pixels."""


@final
class PlainNetwork(nn.Module):
    """Four convolutions with batch norm, two poolings, two linear layers. Input: float [N, in_channels, 64, 64]."""

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        widths = (in_channels, *WIDTHS)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in zip(widths, WIDTHS, strict=False)
        )
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, WIDTHS))
        self.wide = nn.Linear(WIDTHS[-1] * SIDE**2, 512)
        self.head = nn.Linear(512, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = images
        for number, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            hidden = F.relu(norm(convolution(hidden)))
            if number % 2 == 1:
                hidden = F.max_pool2d(hidden, 2)
        logits: torch.Tensor = self.head(F.relu(self.wide(hidden.flatten(1))))
        return logits
