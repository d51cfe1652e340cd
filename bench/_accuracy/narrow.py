"""The network of `bench.large_batch`: residual, with batch norm and biases, small enough for a hundred runs."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn


def narrow(num_classes: int = 10, *, width: int = 8) -> NarrowNet:
    """560,000 multiply-adds an image of 32 x 32 at width 8; 19,000 parameters.

    A ResNet of 8 layers whose first one takes patches of 4 x 4 at a stride of 2, so that nothing is done at 32 x 32.
    Width 16 (two million) was begun with: a run of 12 epochs took 85 to 125 s on two slow cores, where 75 are allowed.
    """
    return NarrowNet(num_classes, width)


@final
class NarrowNet(nn.Module):
    """Stem, two residual blocks that halve the image and double the width, mean over pixels, a linear head."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.block1 = NarrowBlock(width, 2 * width)
        self.block2 = NarrowBlock(2 * width, 4 * width)
        self.head = nn.Linear(4 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.stem(images)), inplace=True)
        hidden = self.block2(self.block1(hidden))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


@final
class NarrowBlock(nn.Module):
    """Two 3x3 convolutions beside a projection, the image halved: [N, before, H, W] -> [N, after, H / 2, W / 2]."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.project = nn.Conv2d(before, after, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(after)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = F.relu(self.norm1(self.conv1(hidden)), inplace=True)
        branch = self.norm2(self.conv2(branch))
        return F.relu(branch + self.norm3(self.project(F.avg_pool2d(hidden, 2))), inplace=True)
