"""AlexNet (Krizhevsky, Sutskever and Hinton 2012, "ImageNet Classification with Deep Convolutional Neural Networks").

For hooks: `pool5` has the features before the batch norm of Jia et al., `bn5` those after it.
"""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.errors import UsageError

MIN_SIDE = 67
"""Shorter side of an image in pixels: three pixels are left before pool5."""

POOL5_SIDE = 6
"""Side of pool5's output for images of 227 pixels. Other sizes are averaged or repeated to it."""

RESPONSE_NORM = {"size": 5, "alpha": 5e-4, "beta": 0.75, "k": 2.0}
"""Section 3.3 of the paper, which multiplies its alpha with the sum over 5 channels; torch uses their mean."""


def alexnet(
    num_classes: int = 1000,
    in_channels: int = 3,
    *,
    batch_norm: bool = False,
    pool5_norm: bool = False,
    two_towers: bool = False,
    fc_width: int = 4096,
    dropout: float = 0.5,
) -> AlexNet:
    """Builds AlexNet: five convolutions and three linear layers, initialised as in section 5 of the paper.

    It has 60.97 million parameters, and 724 million multiply-adds at 227 pixels.

    Input: normalised images, float [N, in_channels, H, W], H and W at least 67, made for 227; output: logits
    [N, num_classes].

    Args:
        batch_norm: use batch norm after each convolution instead of a bias and local response normalisation:
            AlexNet-BN, the network of You, Gitman and Ginsburg 2017 (arXiv 1708.03888).
        pool5_norm: add a batch norm, `bn5`, after pool5, which Jia et al. 2018 (arXiv 1807.11205) needed for a batch of
            65,536.
        two_towers: make each half of the channels a module of its own, as on the paper's two GPUs; they meet before
            conv3 and after conv5. Otherwise conv2, conv4 and conv5 have two groups, which is the same function: see
            `join_towers`.
        fc_width: units of fc6 and of fc7.
        dropout: probability of dropping an output of fc6 or fc7.
    """
    return AlexNet(num_classes, in_channels, batch_norm, pool5_norm, two_towers, fc_width, dropout)


@final
class AlexNet(nn.Module):
    """Convolutions in one tower or two, pool5, and the linear layers. Made by `alexnet`."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        batch_norm: bool,
        pool5_norm: bool,
        two_towers: bool,
        fc_width: int,
        dropout: float,
    ) -> None:
        super().__init__()
        # Either two modules without groups, or one module whose convolutions have two.
        towers, groups = (2, 1) if two_towers else (1, 2)
        self.towers = nn.ModuleList(AlexNetTower(in_channels, towers, groups, batch_norm) for _ in range(towers))
        # Overlapping pools: 3 x 3 with stride 2 (section 3.4).
        self.pool5 = nn.MaxPool2d(3, 2)
        self.bn5 = nn.BatchNorm2d(256) if pool5_norm else nn.Identity()
        self.fc6 = nn.Linear(256 * POOL5_SIDE**2, fc_width)
        self.drop6 = nn.Dropout(dropout)
        self.fc7 = nn.Linear(fc_width, fc_width)
        self.drop7 = nn.Dropout(dropout)
        self.fc8 = nn.Linear(fc_width, num_classes)
        self._initialise(batch_norm)

    def forward(self, images: Tensor) -> Tensor:
        if min(images.shape[2:]) < MIN_SIDE:
            what = f"alexnet needs images of {MIN_SIDE} pixels or more, not {images.shape[2]} x {images.shape[3]}"
            raise UsageError(what, fix="Set data.size to 227, or use headway.model:cifar_net.")
        hidden = _concatenate([tower.begin(images) for tower in self.towers])  # type: ignore[operator]
        # conv3 sees the channels of both towers.
        hidden = _concatenate([tower.end(hidden) for tower in self.towers])  # type: ignore[operator]
        # Images of another size still fit fc6: see GRID.
        hidden = self.bn5(self.pool5(hidden))
        hidden = F.adaptive_avg_pool2d(hidden, POOL5_SIDE).flatten(1)
        hidden = self.drop6(F.relu(self.fc6(hidden)))
        hidden = self.drop7(F.relu(self.fc7(hidden)))
        logits: Tensor = self.fc8(hidden)
        return logits

    def _initialise(self, batch_norm: bool) -> None:
        """Initialises as in section 5 of the paper; with batch norm, linear layers as in You et al."""
        hidden_std, hidden_bias = (0.005, 0.1) if batch_norm else (0.01, 1.0)
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                is_hidden = name in ("fc6", "fc7")
                nn.init.normal_(module.weight, std=hidden_std if is_hidden else 0.01)
                if module.bias is not None:
                    # Biases of conv2, conv4, conv5 and the hidden linear layers begin at 1 (0.1 with batch norm), which
                    # feeds ReLU positive inputs.
                    nn.init.constant_(module.bias, hidden_bias if is_hidden or name[-1] in "245" else 0.0)


@final
class AlexNetTower(nn.Module):
    """The convolutions, or one tower's half of their channels.

    Args:
        towers: number of towers that share the channels of a layer.
        groups: groups of conv2, conv4 and conv5.
    """

    def __init__(self, in_channels: int, towers: int, groups: int, batch_norm: bool) -> None:
        super().__init__()

        # Channels are divided among the towers; the input channels of conv3 are those of both.
        def build_conv(in_features: int, out_features: int, kernel: int, **options: int) -> nn.Conv2d:
            return nn.Conv2d(in_features, out_features // towers, kernel, **options, bias=not batch_norm)  # type: ignore[arg-type]

        def build_norm(channels: int, response: bool = False) -> nn.Module:
            if batch_norm:
                return nn.BatchNorm2d(channels // towers)
            return LocalResponseNorm(groups) if response else nn.Identity()

        self.conv1 = build_conv(in_channels, 96, 11, stride=4)
        self.norm1 = build_norm(96, response=True)
        self.pool1 = nn.MaxPool2d(3, 2)
        self.conv2 = build_conv(96 // towers, 256, 5, padding=2, groups=groups)
        self.norm2 = build_norm(256, response=True)
        self.pool2 = nn.MaxPool2d(3, 2)
        self.conv3 = build_conv(256, 384, 3, padding=1)
        self.norm3 = build_norm(384)
        self.conv4 = build_conv(384 // towers, 384, 3, padding=1, groups=groups)
        self.norm4 = build_norm(384)
        self.conv5 = build_conv(384 // towers, 256, 3, padding=1, groups=groups)
        self.norm5 = build_norm(256)
        self._batch_norm = batch_norm

    def begin(self, images: Tensor) -> Tensor:
        """Returns this tower's output of pool2 from images."""
        hidden = self.pool1(self._activate(self.norm1, self.conv1(images)))
        output: Tensor = self.pool2(self._activate(self.norm2, self.conv2(hidden)))
        return output

    def end(self, joined: Tensor) -> Tensor:
        """Returns this tower's output of conv5 from the concatenated outputs of all towers."""
        hidden = self._activate(self.norm3, self.conv3(joined))
        hidden = self._activate(self.norm4, self.conv4(hidden))
        return self._activate(self.norm5, self.conv5(hidden))

    def _activate(self, norm: nn.Module, hidden: Tensor) -> Tensor:
        """Applies ReLU after batch norm, but before local response normalisation."""
        # Each in the order of its own paper.
        output: Tensor = F.relu(norm(hidden)) if self._batch_norm else norm(F.relu(hidden))
        return output


@final
class LocalResponseNorm(nn.Module):
    """Local response normalisation within each group of channels, as on each of the paper's GPUs."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, hidden: Tensor) -> Tensor:
        groups = [_normalise_response(group) for group in hidden.chunk(self.groups, dim=1)]
        return _concatenate(groups)


def join_towers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts the state dict of a network with two towers to that of the same network with groups."""
    joined: dict[str, Tensor] = {}
    for name, value in state.items():
        if not name.startswith("towers."):
            joined[name] = value
        elif name.startswith("towers.0."):
            second_half = state[name.replace("towers.0.", "towers.1.", 1)]
            # A scalar is batch norm's count of batches, which is the same in both towers.
            joined[name] = torch.cat([value, second_half]) if value.dim() else value
    return joined


def _normalise_response(hidden: Tensor) -> Tensor:
    return F.local_response_norm(
        hidden, int(RESPONSE_NORM["size"]), RESPONSE_NORM["alpha"], RESPONSE_NORM["beta"], RESPONSE_NORM["k"]
    )


def _concatenate(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
