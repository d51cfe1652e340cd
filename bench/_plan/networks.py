"""Networks of the decks and of MLPerf that Headway trains no recipe of: the planner's catalog has their workloads.

They serve to count: layers, shapes, weights and multiply-adds. Initial values are torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

# Table 1 of Simonyan and Zisserman 2014 (arXiv 1409.1556), columns A and D: convolutions of each stage.
VGG_WIDTHS = (64, 128, 256, 512, 512)
VGG_DEPTHS = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3)}
# Table 1 of Szegedy et al. 2014 (arXiv 1409.4842): 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; projection of the pool.
INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64), "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64), "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128), "5b": (384, 192, 384, 48, 128, 128),
}  # fmt: skip
POOL_BEFORE = ("4a", "5a")
# BERT-large (Devlin et al. 2018, arXiv 1810.04805): word pieces, places, width, blocks, heads.
PIECES, PLACES, WIDTH, BLOCKS, HEADS = 30_522, 512, 1024, 24, 16
# Masked tokens of a sequence of 512 that the loss asks for, in the paper's second phase.
MASKED = 76


def build_vgg(depth: int) -> nn.Module:
    """Builds VGG with 11 or 16 layers with weights, without batch norm."""
    modules, channels = list[nn.Module](), 3
    for width, repeats in zip(VGG_WIDTHS, VGG_DEPTHS[depth], strict=True):
        for _ in range(repeats):
            modules += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        modules.append(nn.MaxPool2d(2))
    for inputs, outputs in ((512 * 7 * 7, 4096), (4096, 4096)):
        head = [nn.Linear(inputs, outputs), nn.ReLU(inplace=True), nn.Dropout()]
        modules += head if inputs == 4096 else [nn.Flatten(), *head]
    return nn.Sequential(*modules, nn.Linear(4096, 1000))


def build_googlenet() -> nn.Module:
    """Builds GoogLeNet as published, without the two classifiers that help training beside the last one."""
    modules: list[nn.Module] = [
        *_convolve(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5),
        *_convolve(64, 64, 1), *_convolve(64, 192, 3), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True),
    ]  # fmt: skip
    channels = 192
    for name, widths in INCEPTIONS.items():
        if name in POOL_BEFORE:
            modules.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        modules.append(Inception(channels, widths))
        channels = widths[0] + widths[2] + widths[4] + widths[5]
    return nn.Sequential(*modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.4), nn.Linear(channels, 1000))


def _convolve(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2), nn.ReLU(inplace=True)]


class Inception(nn.Module):
    """Four branches over one input, joined by channel.

    Args:
        widths: output channels, a row of `INCEPTIONS`.
    """

    def __init__(self, inputs: int, widths: Sequence[int]) -> None:
        super().__init__()
        single, less3, wide3, less5, wide5, pooled = widths
        self.single = nn.Sequential(*_convolve(inputs, single, 1))
        self.three = nn.Sequential(*_convolve(inputs, less3, 1), *_convolve(less3, wide3, 3))
        self.five = nn.Sequential(*_convolve(inputs, less5, 1), *_convolve(less5, wide5, 5))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), *_convolve(inputs, pooled, 1))

    def forward(self, images: Tensor) -> Tensor:
        return torch.cat([branch(images) for branch in (self.single, self.three, self.five, self.pool)], dim=1)


class Attention(nn.Module):
    """Self-attention of all heads, with dropout on its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.softmax, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.join = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        count, length, _ = tokens.shape
        queries, keys, values = (
            part.view(count, length, HEADS, -1).transpose(1, 2) for part in self.project(tokens).chunk(3, dim=-1)
        )
        weights = self.drop(self.softmax(queries @ keys.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5))
        joined: Tensor = self.join((weights @ values).transpose(1, 2).reshape(count, length, WIDTH))
        return joined


class Block(nn.Module):
    """Attention and two linear layers, each with dropout, a sum and a layer norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.drop1, self.norm1 = Attention(), nn.Dropout(0.1), nn.LayerNorm(WIDTH)
        self.widen, self.gelu, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        self.drop2, self.norm2 = nn.Dropout(0.1), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = self.norm1(tokens + self.drop1(self.attention(tokens)))
        moved: Tensor = self.norm2(tokens + self.drop2(self.narrow(self.gelu(self.widen(tokens)))))
        return moved


class BertLarge(nn.Module):
    """BERT-large with both heads of its pre-training: masked word pieces, and whether a sentence follows another.

    Input: numbers of word pieces as floats [N, 512], as the planner's profile of layers passes them. Output: [N, 77].
    """

    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.places, self.sides = (nn.Embedding(count, WIDTH) for count in (PIECES, PLACES, 2))
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.pool, self.follows = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.dense, self.gelu, self.last_norm = nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)
        self.decode = nn.Linear(WIDTH, PIECES)
        # Input and output share the matrix of word pieces.
        self.decode.weight = self.pieces.weight

    def forward(self, numbers: Tensor) -> Tensor:
        numbers = numbers.long()
        places = torch.arange(numbers.shape[1], device=numbers.device)
        tokens = self.pieces(numbers) + self.places(places) + self.sides(torch.zeros_like(numbers))
        tokens = self.blocks(self.drop(self.norm(tokens)))
        follows = self.follows(torch.tanh(self.pool(tokens[:, 0])))
        words = self.decode(self.last_norm(self.gelu(self.dense(tokens[:, :MASKED]))))
        return torch.cat([words.float().logsumexp(-1), follows[:, :1].float()], dim=1)
