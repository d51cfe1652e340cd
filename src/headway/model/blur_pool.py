"""Anti-aliased downsampling (Zhang 2019, "Making Convolutional Networks Shift-Invariant Again", arXiv 1904.11486).

Strided convolutions and max pools take every second pixel of an image with fine detail, which aliases. Here a 3x3
binomial filter comes first, as in the ImageNet recipes of FFCV and Composer: before max pools and convolutions with a
stride and at least 16 input channels, with zeros beyond the border.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.core.modules import replace_modules

LEAST_CHANNELS = 16
"""Fewest input channels of a convolution that is changed. The first layer, with 3, sees whole images, and blurring
these costs the most."""


def add_blur_pool(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Adds a blur before every layer that takes every second pixel.

    Parameters keep their names and values, and layers return images of the same sizes as before.

    Returns:
        the network (another object only if it is itself such a layer), and the names of the changed layers.
    """
    changed: list[str] = []

    def replace(one: nn.Module, name: str) -> nn.Module:
        # A subclass with a forward pass of its own is left alone: it would be lost.
        if isinstance(one, nn.Conv2d) and type(one).forward is nn.Conv2d.forward:
            if max(one.stride) == 1 or one.in_channels < LEAST_CHANNELS:
                return one
            new: nn.Module = BlurConv2d.from_conv(one)
        elif type(one) is nn.MaxPool2d and _takes_every_second(one):
            new = BlurMaxPool2d(one.kernel_size, one.stride, one.padding)
        else:
            return one
        changed.append(name)
        return new

    return replace_modules(module, replace), changed


@final
class BlurConv2d(nn.Conv2d):
    """A convolution with a stride that blurs its input. It shares the parameters of the convolution it replaces."""

    @staticmethod
    def from_conv(conv: nn.Conv2d) -> BlurConv2d:
        new = BlurConv2d.__new__(BlurConv2d)
        new.__dict__.update(conv.__dict__)
        new.register_buffer("filter", _make_filter(conv.weight), persistent=False)
        return new

    def forward(self, input: Tensor) -> Tensor:
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            # The stride commutes with a 1x1 convolution, so only every second pixel is blurred.
            return F.conv2d(_blur(input, self.filter, self.stride), self.weight, self.bias, groups=self.groups)
        return super().forward(_blur(input, self.filter, 1))


@final
class BlurMaxPool2d(nn.Module):
    """A max pool with stride 1, a blur, and then every second pixel."""

    def __init__(self, kernel_size: Any, stride: Any, padding: Any) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        # Not persistent: state dicts stay those of the network without blur.
        self.register_buffer("filter", _make_filter(torch.empty(0)), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return _blur(F.max_pool2d(input, self.kernel_size, 1, self.padding), self.filter, self.stride)


def _takes_every_second(pool: nn.MaxPool2d) -> bool:
    # Only the plain form is replaced: dilation, ceil mode and indices would be lost.
    strided = pool.stride != 1 and pool.stride != (1, 1)
    return strided and pool.dilation in (1, (1, 1)) and not pool.ceil_mode and not pool.return_indices


def _make_filter(like: Tensor) -> Tensor:
    # The outer product of (1, 2, 1) / 4: all frequencies at the limit vanish.
    line = torch.tensor([0.25, 0.5, 0.25], device=like.device, dtype=like.dtype)
    return torch.outer(line, line)[None, None]


def _blur(images: Tensor, filter: Any, stride: Any) -> Tensor:
    channels = images.shape[1]
    # One filter for all channels: a depthwise convolution.
    return F.conv2d(images, filter.expand(channels, -1, -1, -1), stride=stride, padding=1, groups=channels)
