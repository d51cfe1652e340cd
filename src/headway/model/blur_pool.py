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

from headway.core.modules import convert_module, replace_modules

MIN_CHANNELS = 16
"""Fewest input channels of a convolution that is changed. The first layer, with 3, sees whole images, and blurring
these costs the most."""


def add_blur_pool(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Adds a blur before every layer with a stride, in place.

    Parameters keep their names and values, and layers return images of the same sizes as before.

    Returns:
        The network (another object only if it is itself such a layer), and the names of the changed layers.
    """
    changed: list[str] = []

    def replace(layer: nn.Module, name: str) -> nn.Module:
        # A subclass that overrides `forward` is left alone: its forward pass would be lost.
        if isinstance(layer, nn.Conv2d) and type(layer).forward is nn.Conv2d.forward:
            if max(layer.stride) == 1 or layer.in_channels < MIN_CHANNELS:
                return layer
            replacement: nn.Module = BlurConv2d.from_conv(layer)
        elif type(layer) is nn.MaxPool2d and _can_be_blurred(layer):
            replacement = BlurMaxPool2d(layer.kernel_size, layer.stride, layer.padding)
        else:
            return layer
        changed.append(name)
        return replacement

    return replace_modules(module, replace), changed


@final
class BlurConv2d(nn.Conv2d):
    """A convolution with a stride that blurs its input. It shares the parameters of the convolution it replaces."""

    @staticmethod
    def from_conv(conv: nn.Conv2d) -> BlurConv2d:
        """Returns a replacement of a convolution that shares its parameters, buffers and hooks."""
        blurred = convert_module(conv, BlurConv2d)
        blurred.register_buffer("filter", _build_filter(conv.weight), persistent=False)
        return blurred

    def forward(self, input: Tensor) -> Tensor:
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            # The stride commutes with a 1x1 convolution, so only every second pixel is blurred.
            return F.conv2d(_blur(input, self.filter, self.stride), self.weight, self.bias, groups=self.groups)
        return super().forward(_blur(input, self.filter, 1))


@final
class BlurMaxPool2d(nn.Module):
    """A max pool with stride 1, and a blur with the stride of the pool."""

    def __init__(self, kernel_size: Any, stride: Any, padding: Any) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        # Not persistent: state dicts stay those of the network without blur.
        self.register_buffer("filter", _build_filter(torch.empty(0)), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        return _blur(F.max_pool2d(input, self.kernel_size, 1, self.padding), self.filter, self.stride)


def _can_be_blurred(pool: nn.MaxPool2d) -> bool:
    # A pool with dilation, ceil mode or indices stays: they would be lost.
    is_strided = pool.stride != 1 and pool.stride != (1, 1)
    return is_strided and pool.dilation in (1, (1, 1)) and not pool.ceil_mode and not pool.return_indices


def _build_filter(like: Tensor) -> Tensor:
    # The outer product of (1, 2, 1) / 4, which removes the Nyquist frequency.
    weights = torch.tensor([0.25, 0.5, 0.25], device=like.device, dtype=like.dtype)
    return torch.outer(weights, weights)[None, None]


def _blur(images: Tensor, filter: Any, stride: Any) -> Tensor:
    channels = images.shape[1]
    # One filter for all channels: a depthwise convolution.
    return F.conv2d(images, filter.expand(channels, -1, -1, -1), stride=stride, padding=1, groups=channels)
