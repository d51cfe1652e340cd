"""A plain vision transformer, as a load for a device (Dosovitskiy et al. 2020, with the sizes of DeiT)."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@final
class Block(nn.Module):
    """Attention and perceptron, each behind a layer norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@final
class VisionTransformer(nn.Module):
    """Square images in patches, with a class token.

    Args:
        side: of the images. patch: side of a patch.
    """

    def __init__(self, num_classes: int, side: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(0.02 * torch.randn(1, 1 + (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


def vit_small(num_classes: int) -> VisionTransformer:
    """ViT-S/16 for 224 x 224: 22 million parameters, 4.6 billion multiply-adds."""
    return VisionTransformer(num_classes, 224, 16, 384, 12, 6)


def vit_tiny(num_classes: int) -> VisionTransformer:
    """For 16 x 16: shows that it works."""
    return VisionTransformer(num_classes, 16, 8, 32, 1, 2)
