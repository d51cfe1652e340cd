"""Networks, transforms and a task that the injectors give to a job, in the role of the user's code. The strengths of
the transforms come from environment variables, since a recipe cannot pass them arguments."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional as F

from headway.setup.task import Classification, TargetSpec, Task

ROUNDS = "HEADWAY_BENCH_ROUNDS"
"""How often `smooth` goes over a batch."""
READS = "HEADWAY_BENCH_READS"
"""Values that `read` asks for, of each sample."""
SLOW_RANK = "HEADWAY_BENCH_SLOW_RANK"
"""The rank on which `smooth_on_one` does anything."""

SIDE = 32
"""To which the light networks bring their images, by means over their pixels."""

Keys = NDArray[np.uint64]


@final
class Lenet(nn.Module):
    """Two convolutions and three linear layers, as LeNet-5 has them (LeCun et al. 1998): 0.65 million multiply-adds an
    image. Input: float [N, in_channels, H, W]."""

    def __init__(self, num_classes: int, in_channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 25, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.relu(self.conv1(averaged(images, SIDE))), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2)
        hidden = F.relu(self.fc2(F.relu(self.fc1(hidden.flatten(1)))))
        logits: torch.Tensor = self.fc3(hidden)
        return logits


@final
class Perceptron(nn.Module):
    """One hidden layer. Input: float [N, in_channels, H, W]."""

    def __init__(self, num_classes: int, in_channels: int = 3, *, hidden: int = 64) -> None:
        super().__init__()
        self.hidden = nn.Linear(in_channels * SIDE**2, hidden)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.relu(self.hidden(averaged(images, SIDE).flatten(1))))
        return logits


@final
class Chain(nn.Module):
    """Many layers that each do next to nothing: 1 x 1 convolutions of eight channels on 4 x 4 pixels. Input: float
    [N, in_channels, H, W]."""

    def __init__(self, num_classes: int, in_channels: int = 3, *, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 8, 1)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU()) for _ in range(layers)))
        self.head = nn.Linear(8, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.stem(averaged(images, 4))).mean(dim=(2, 3)))
        return logits


@final
class Blocks(nn.Module):
    """Four 3 x 3 convolutions on patches of 8 x 8 pixels; so wide that they take what they are to take. Input: float
    [N, in_channels, H, W], H and W multiples of 8."""

    def __init__(self, num_classes: int, in_channels: int = 3, *, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(in_channels, channels, 8, stride=8, bias=False)
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(4))
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(images)
        for conv in self.convs:
            hidden = F.relu(conv(hidden))
        logits: torch.Tensor = self.head(hidden.mean(dim=(2, 3)))
        return logits


def averaged(images: torch.Tensor, side: int) -> torch.Tensor:
    """Images of side x side pixels."""
    return images if images.shape[2:] == (side, side) else F.adaptive_avg_pool2d(images, side)


def smooth(images: torch.Tensor, labels: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """A transform that takes time: the mean over 3 x 3 pixels, again and again."""
    for _ in range(int(os.environ.get(ROUNDS, "0"))):
        images = F.avg_pool2d(images, 3, 1, 1)
    return images, labels


def smooth_on_one(images: torch.Tensor, labels: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on one rank alone."""
    on_this = os.environ.get("RANK", "0") == os.environ.get(SLOW_RANK)
    return smooth(images, labels, keys) if on_this else (images, labels)


def read(images: torch.Tensor, labels: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """A transform that asks for values, one after the other: the device is waited for each time."""
    reads = int(os.environ.get(READS, "0"))
    for place in range(len(images)):
        for _ in range(reads):
            images[place, 0, 0, 0].item()
    return images, labels


@final
class Reading(Task):
    """Classification whose loss looks at values of each sample in Python."""

    primary, higher_is_better = Classification.primary, Classification.higher_is_better

    def __init__(self, target: TargetSpec, *, reads: int) -> None:
        self._inner, self._reads = Classification(target), reads

    @property
    def outputs(self) -> int:
        return self._inner.outputs

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        values = outputs.detach()
        for place in range(len(values)):
            for _ in range(self._reads):
                values[place, 0].item()
        return self._inner.loss(outputs, labels)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return self._inner.metrics(outputs, labels)

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return self._inner.predict(outputs)
