"""cifar_moe: a small network for 32-pixel images whose blocks have a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Literal, final

import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.model.gates import Gate, NoisyTopKGate, SwitchGate
from headway.model.mixture import MixtureOfExperts


def cifar_moe(
    num_classes: int = 10,
    in_channels: int = 3,
    *,
    width: int = 64,
    blocks: int = 2,
    experts: int = 8,
    hidden: int = 128,
    gate: Literal["noisy", "switch"] = "noisy",
    k: int = 2,
    balance: float | None = None,
    capacity_factor: float | None = None,
) -> CifarMoe:
    """Builds three convolutions, which reduce an image to an eighth of its sides, and blocks with a mixture of experts.

    A block is a 3x3 convolution and a mixture over the positions of its maps, each with batch norm and a shortcut.

    Input: normalised images, float [N, in_channels, H, W], H and W at least 8; output: logits [N, num_classes].

    Args:
        width: channels of the blocks.
        blocks: number of blocks.
        experts: experts of each block. 0: each block has one network instead, as large as the k experts that a position
            passes, so that the multiply-adds are equal (but for the gate's).
        hidden: values inside an expert.
        gate: `noisy` (Shazeer's, k experts for each position) or `switch` (one).
        k: experts of each position, for the noisy gate.
        balance: factor of the losses for an even load: 0.1 for the noisy gate, 0.01 for Switch's, 0 for none.
        capacity_factor: see `MixtureOfExperts`; by default nothing is dropped.

    Raises:
        UsageError: an argument is out of range.
    """
    if gate not in ("noisy", "switch"):
        raise UsageError(f"cifar_moe has gate={gate!r}", fix="Set it to 'noisy' or 'switch'.")

    def build_gate() -> Gate:
        if gate == "switch":
            return SwitchGate(width, experts, balance_weight=0.01 if balance is None else balance)
        weight = 0.1 if balance is None else balance
        return NoisyTopKGate(width, experts, k=k, importance_weight=weight, load_weight=weight)

    def build_mixture() -> nn.Module:
        if experts == 0:
            size = hidden * (k if gate == "noisy" else 1)
            return nn.Sequential(nn.Linear(width, size, bias=False), nn.ReLU(), nn.Linear(size, width, bias=False))
        return MixtureOfExperts(width, hidden, experts=experts, gate=build_gate(), capacity_factor=capacity_factor)

    return CifarMoe(num_classes, in_channels, width, blocks, build_mixture)


@final
class CifarMoe(nn.Module):
    """Convolutions, blocks, global average pooling, a linear head. Made by `cifar_moe`."""

    def __init__(
        self, num_classes: int, in_channels: int, width: int, blocks: int, build_mixture: Callable[[], nn.Module]
    ) -> None:
        super().__init__()
        sizes = [in_channels, width // 2, width, width]
        self.stem = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b)) for a, b in pairwise(sizes)
        )
        self.blocks = nn.Sequential(*(CifarMoeBlock(width, build_mixture()) for _ in range(blocks)))
        self.head = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        hidden = images
        for layer in self.stem:
            hidden = F.max_pool2d(F.relu(layer(hidden)), 2)
        logits: Tensor = self.head(self.blocks(hidden).mean((2, 3)))
        return logits


@final
class CifarMoeBlock(nn.Module):
    """A 3x3 convolution and a mixture of experts over the positions, each with batch norm and a shortcut."""

    def __init__(self, width: int, mixture: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.mixture = mixture

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + F.relu(self.norm1(self.conv(hidden)))
        # The mixture takes positions as tokens: channels last.
        mixed: Tensor = self.mixture(self.norm2(hidden).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return hidden + mixed
