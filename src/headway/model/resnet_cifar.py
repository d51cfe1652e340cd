"""The ResNets of He et al. 2015 (arXiv 1512.03385), section 4.2, for images of 32 pixels."""

from __future__ import annotations

from typing import final

import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.errors import UsageError

WIDTHS = (16, 32, 64)


def cifar_resnet(
    num_classes: int = 10, in_channels: int = 3, *, depth: int = 20, skip_connections: bool = True
) -> CifarResNet:
    """Builds a ResNet of 6 n + 2 layers for images of 32 pixels.

    The paper has 20, 32, 44, 56 and 110 layers, with 0.27, 0.46, 0.66, 0.85 and 1.73 million parameters.

    Input: normalised images, float [N, in_channels, H, W], made for 32 pixels; output: logits [N, num_classes].

    Args:
        depth: number of layers with weights: 8, 14, 20, ...
        skip_connections: False leaves the shortcuts out, as in figure 1 of Li et al. 2018 (arXiv 1712.09913), which
            compares the loss landscapes of both.

    Raises:
        UsageError: the depth is not 6 n + 2.
    """
    if depth < 8 or depth % 6 != 2:
        lower_depth = max(8, 6 * ((depth - 2) // 6) + 2)
        what = f"a CIFAR ResNet has 6 n + 2 layers, not {depth}"
        raise UsageError(what, where="depth", fix=f"Set it to {lower_depth} or {lower_depth + 6}.")
    return CifarResNet(depth // 6, num_classes, in_channels, skip_connections)


@final
class CifarResNet(nn.Module):
    """A 3x3 convolution, three stages of `blocks_per_stage` blocks, a linear head. Made by `cifar_resnet`."""

    def __init__(self, blocks_per_stage: int, num_classes: int, in_channels: int, skip_connections: bool) -> None:
        super().__init__()
        self.conv1 = _build_conv(in_channels, WIDTHS[0])
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        stages = []
        in_width = WIDTHS[0]
        # The first block of a stage widens, and halves the image.
        for width in WIDTHS:
            blocks = [CifarBlock(in_width, width, skip_connections)]
            blocks += [CifarBlock(width, width, skip_connections) for _ in range(blocks_per_stage - 1)]
            stages.append(nn.Sequential(*blocks))
            in_width = width
        self.layer1, self.layer2, self.layer3 = stages
        self.fc = nn.Linear(in_width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                # He et al. 2015 (arXiv 1502.01852), fan out.
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.bn1(self.conv1(images)), inplace=True)
        hidden = self.layer3(self.layer2(self.layer1(hidden)))
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return logits


@final
class CifarBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut: [N, in_channels, H, W] -> [N, width, H / stride, W / stride].

    The stride is 2 if the block widens. Its shortcut has no parameters (option A of section 4.1 of the paper): it takes
    every second pixel, and zeros for the new channels.
    """

    def __init__(self, in_channels: int, width: int, skip_connection: bool) -> None:
        super().__init__()
        # `_extra_channels`: channels that the shortcut lacks.
        self._stride, self._extra_channels = (1, 0) if in_channels == width else (2, width - in_channels)
        self._skip_connection = skip_connection
        self.conv1 = _build_conv(in_channels, width, self._stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _build_conv(width, width)
        self.bn2 = nn.BatchNorm2d(width)

    @property
    def last_norm(self) -> nn.Module | None:
        """The batch norm whose scale decides how much the block adds to its shortcut; None without a shortcut."""
        # Without a shortcut, a scale of zero would cut the network.
        return self.bn2 if self._skip_connection else None

    def forward(self, hidden: Tensor) -> Tensor:
        branch = F.relu(self.bn1(self.conv1(hidden)), inplace=True)
        branch = self.bn2(self.conv2(branch))
        if not self._skip_connection:
            return F.relu(branch, inplace=True)
        if self._extra_channels:
            # Zeros for the new channels: a shortcut without parameters.
            hidden = F.pad(hidden[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, 0, self._extra_channels))
        return F.relu(branch + hidden, inplace=True)


def _build_conv(in_channels: int, out_channels: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
