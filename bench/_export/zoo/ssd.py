"""SSD (Liu et al. 2015, arXiv 1512.02325) for 300 pixels, on VGG16 and on MobileNet, for the 90 classes of COCO.

Both end at the scores and the offsets of all boxes; what remains for an application is to sort them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench._export.zoo.blocks import chain
from bench._export.zoo.mobilenet import build_separable
from bench._export.zoo.vgg16 import build_features

CLASSES = 91
"""COCO's 90 and the background."""
COORDINATES = 4


def ssd_vgg16(num_classes: int = CLASSES, in_channels: int = 3) -> Detector:
    """Builds SSD300 on VGG16: 35.64 million parameters, 8,732 boxes for an image."""
    layers = build_features(in_channels)
    # 75 pixels become 38.
    layers[16] = nn.MaxPool2d(2, ceil_mode=True)
    # Linear layers as convolutions, as in the paper: fc6 with holes of 6 pixels instead of a pool.
    linear = [nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()]
    stages = [nn.Sequential(*layers[:23]), nn.Sequential(*layers[23:30], nn.MaxPool2d(3, 1, 1), *linear)]
    channels = 1024
    for width, outputs, stride in ((256, 512, 2), (128, 256, 2), (128, 256, 1), (128, 256, 1)):
        # The last two have no padding: 5 pixels become 3, and those 1.
        grow = nn.Conv2d(width, outputs, 3, stride, padding=stride - 1)
        stages.append(nn.Sequential(nn.Conv2d(channels, width, 1), nn.ReLU(), grow, nn.ReLU()))
        channels = outputs
    heads = build_heads((512, 1024, 512, 256, 256, 256), (4, 6, 6, 6, 4, 4), 3, num_classes)
    heads[0] = nn.Sequential(ScaledNorm(512), heads[0])
    return Detector(stages, heads, num_classes)


def ssd_mobilenet(num_classes: int = CLASSES, in_channels: int = 3) -> Detector:
    """Builds SSD300 on MobileNet: 6.8 million parameters, 1,917 boxes (Howard et al. 2017, arXiv 1704.04861, table 13).

    Layers and boxes are those of the authors' code: heads of 1x1 convolutions.
    """
    layers = build_separable(in_channels)
    stages = [nn.Sequential(*layers[:12]), nn.Sequential(*layers[12:])]
    channels = 1024
    for width, outputs in ((256, 512), (128, 256), (128, 256), (64, 128)):
        stages.append(chain(channels, (width, 1), (outputs, 3, 2, 1)))
        channels = outputs
    heads = build_heads((512, 1024, 512, 256, 256, 128), (3, 6, 6, 6, 6, 6), 1, num_classes)
    return Detector(stages, heads, num_classes)


def build_heads(channels: Sequence[int], boxes: Sequence[int], kernel: int, num_classes: int) -> list[nn.Module]:
    """Builds a convolution for each map, which gives scores and offsets of its boxes at each pixel."""
    return [
        nn.Conv2d(own, count * (num_classes + COORDINATES), kernel, padding=kernel // 2)
        for own, count in zip(channels, boxes, strict=True)
    ]


@final
class Detector(nn.Module):
    """Stages, each of which has a head: images [N, 3, 300, 300] -> [N, boxes, classes + 4]."""

    def __init__(self, stages: Sequence[nn.Module], heads: Sequence[nn.Module], num_classes: int) -> None:
        super().__init__()
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        self.numbers = num_classes + COORDINATES

    def forward(self, images: Tensor) -> Tensor:
        hidden, found = images, list[Tensor]()
        for stage, head in zip(self.stages, self.heads, strict=True):
            hidden = stage(hidden)
            found.append(head(hidden).permute(0, 2, 3, 1).reshape(len(images), -1, self.numbers))
        return torch.cat(found, 1)


@final
class ScaledNorm(nn.Module):
    """Divides each pixel by the length of its channels, and multiplies each channel by a weight that begins at 20."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((channels, 1, 1), 20.0))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.weight * F.normalize(hidden, dim=1)
