"""ResNet v1.5 (He et al. 2015, arXiv 1512.03385; the stride of a bottleneck in its 3x3 convolution).

State-dict names are the common ones (conv1, bn1, layer1.0.conv1, ..., fc), so that published weights load.
Input: normalised images, float [N, in_channels, H, W], H and W at least 32; output: logits [N, num_classes].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch.nn.functional as F
from torch import Tensor, nn


def resnet18(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Builds ResNet-18: 11.69 million parameters, 1.81 billion multiply-adds at 224 pixels."""
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, in_channels)


def resnet34(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Builds ResNet-34: 21.80 million parameters, 3.66 billion multiply-adds at 224 pixels."""
    return ResNet(BasicBlock, (3, 4, 6, 3), num_classes, in_channels)


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Builds ResNet-50: 25.56 million parameters, 4.09 billion multiply-adds at 224 pixels."""
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, in_channels)


def resnet101(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """Builds ResNet-101: 44.55 million parameters, 7.80 billion multiply-adds at 224 pixels."""
    return ResNet(Bottleneck, (3, 4, 23, 3), num_classes, in_channels)


@final
class ResNet(nn.Module):
    """A stem, four stages of blocks, a linear head. Made by `resnet18`, `resnet34`, `resnet50` and `resnet101`."""

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        num_classes: int,
        in_channels: int,
    ) -> None:
        super().__init__()
        # Names are those of published weights.
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        block_channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            blocks = []
            for index in range(depth):
                # The first block of a stage halves the image, but for the stage behind the max pool.
                blocks.append(block(block_channels, width, stride=2 if stage > 0 and index == 0 else 1))
                block_channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(block_channels, num_classes)

        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al. 2015 (arXiv 1502.01852), fan out, as in torchvision.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        # ReLU works in place: batch norm does not need its output for the backward pass.
        hidden = F.relu(self.bn1(self.conv1(images)), inplace=True)
        hidden = self.maxpool(hidden)
        # Strides 4 (stem), then 2 for each of the last three stages: 32 in all.
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return logits


@final
class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [N, in_channels, H, W] -> [N, width, H / stride, W / stride]."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _build_conv(in_channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _build_conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _build_shortcut(in_channels, width, stride)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2

    def forward(self, hidden: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(hidden)), inplace=True)
        branch = self.bn2(self.conv2(branch))
        shortcut = hidden if self.downsample is None else self.downsample(hidden)
        return F.relu(branch + shortcut, inplace=True)


@final
class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut: [N, in_channels, H, W] -> [N, 4 width, H / stride, W / stride]."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = _build_conv(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        # v1.5: the stride is in the 3x3 convolution, not in the first 1x1.
        self.conv2 = _build_conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _build_conv(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _build_shortcut(in_channels, out_channels, stride)

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3

    def forward(self, hidden: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(hidden)), inplace=True)
        branch = F.relu(self.bn2(self.conv2(branch)), inplace=True)
        branch = self.bn3(self.conv3(branch))
        shortcut = hidden if self.downsample is None else self.downsample(hidden)
        return F.relu(branch + shortcut, inplace=True)


def _build_conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False)


def _build_shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    # An identity needs no module: `downsample` is None, as in published weights.
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_build_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))
