"""ResNet v2 (He, Zhang, Ren and Sun 2016, arXiv 1603.05027): batch norm and ReLU come before each convolution."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from bench._export.zoo.blocks import build_head
from bench._export.zoo.densenet import norm_relu

DEPTHS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet_v2(num_classes: int = 1000, in_channels: int = 3, *, depth: int = 50) -> nn.Sequential:
    """Builds ResNet-50, -101 or -152 v2 as MXNet's Gluon has it, with a batch norm of the images.

    ResNet-50 v2 has 25.55 million parameters, and 4.1 billion multiply-adds at 224 pixels.
    """
    stem = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
    layers: list[nn.Module] = [nn.BatchNorm2d(in_channels), stem, *norm_relu(64), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate(DEPTHS[depth]):
        width = 64 << stage
        for number in range(blocks):
            # The max pool has already halved the image before the first stage.
            layers.append(PreActivation(channels, width, stride=2 if stage and not number else 1))
            channels = 4 * width
    return nn.Sequential(*layers, *norm_relu(channels), build_head(channels, num_classes))


@final
class PreActivation(nn.Module):
    """A bottleneck of 1x1, 3x3, 1x1 convolutions: [N, C, H, W] -> [N, 4 width, H / stride, W / stride]."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.activate = nn.Sequential(*norm_relu(channels))
        self.branch = nn.Sequential(
            nn.Conv2d(channels, width, 1, bias=False),
            *norm_relu(width),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            *norm_relu(width),
            nn.Conv2d(width, 4 * width, 1, bias=False),
        )
        fits = channels == 4 * width and stride == 1
        self.shortcut = None if fits else nn.Conv2d(channels, 4 * width, 1, stride, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        active = self.activate(hidden)
        shortcut: Tensor = hidden if self.shortcut is None else self.shortcut(active)
        return shortcut + self.branch(active)
