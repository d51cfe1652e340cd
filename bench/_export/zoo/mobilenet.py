"""MobileNet (Howard et al. 2017, arXiv 1704.04861) and MobileNetV2 (Sandler et al. 2018, arXiv 1801.04381)."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from bench._export.zoo.blocks import build_head, conv_norm

# Channels and stride of the 13 separable convolutions: table 1 of the paper.
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))
# Expansion, channels, blocks, stride of the first of them: table 2 of the second paper.
BOTTLENECKS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
LAST_CHANNELS = 1280


def mobilenet(num_classes: int = 1000, in_channels: int = 3, *, width: float = 1.0) -> nn.Sequential:
    """Builds MobileNet: 4.23 million parameters and 569 million multiply-adds at width 1."""
    return nn.Sequential(*build_separable(in_channels, width), build_head(int(1024 * width), num_classes))


def build_separable(in_channels: int = 3, width: float = 1.0) -> list[nn.Module]:
    """Builds the stem and the 13 separable convolutions of MobileNet, 14 modules."""
    channels = int(32 * width)
    layers: list[nn.Module] = [conv_norm(in_channels, channels, 3, 2)]
    for outputs, stride in SEPARABLE:
        own = int(outputs * width)
        depthwise = conv_norm(channels, channels, 3, stride, groups=channels)
        layers.append(nn.Sequential(depthwise, conv_norm(channels, own)))
        channels = own
    return layers


def mobilenet_v2(num_classes: int = 1000, in_channels: int = 3, *, width: float = 1.0) -> nn.Sequential:
    """Builds MobileNetV2 as MXNet's Gluon has it, whose figures the deck prints: 3.5 million parameters at width 1.

    Unlike the paper's, its first block has an expansion too, of 1, and the last layer has no bias: 152 numbers more.
    """
    channels = int(32 * width)
    layers: list[nn.Module] = [conv_norm(in_channels, channels, 3, 2, activation=nn.ReLU6)]
    for expansion, outputs, blocks, stride in BOTTLENECKS:
        for number in range(blocks):
            own = int(outputs * width)
            layers.append(InvertedResidual(channels, own, expansion, 1 if number else stride))
            channels = own
    layers.append(conv_norm(channels, LAST_CHANNELS, activation=nn.ReLU6))
    head = nn.Linear(LAST_CHANNELS, num_classes, bias=False)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


@final
class InvertedResidual(nn.Module):
    """Expansion, depthwise 3x3 convolution, linear projection; a shortcut where it fits."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        width = inputs * expansion
        self.is_residual = stride == 1 and inputs == outputs
        self.expand = conv_norm(inputs, width, activation=nn.ReLU6)
        self.depthwise = conv_norm(width, width, 3, stride, groups=width, activation=nn.ReLU6)
        self.project = conv_norm(width, outputs, activation=None)

    @property
    def last_norm(self) -> nn.Module | None:
        """The batch norm before the addition, if there is one."""
        return self.project[-1] if self.is_residual else None

    def forward(self, hidden: Tensor) -> Tensor:
        branch: Tensor = self.project(self.depthwise(self.expand(hidden)))
        return hidden + branch if self.is_residual else branch
