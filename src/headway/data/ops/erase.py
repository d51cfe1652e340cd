"""Cutout and random erasing fill a box of each sample. A box is (left, top, width, height) in pixels."""

from __future__ import annotations

import torch

from headway.core.errors import UsageError
from headway.core.random_keys import GOLDEN, UInt64, draw_words
from headway.data.augment_draws import Boxes
from headway.data.random_streams import STREAM_ERASE_NOISE
from headway.data.upload import to_device

MAX_NOISE_CHANNELS = 4


def erase(images: torch.Tensor, boxes: Boxes, fill: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the images with a box of each sample filled.

    Args:
        images: [b, H, W, C], any type.
        boxes: int32 [b, 4]; a box without area fills nothing.
        fill: same type and device as `images`: [C], or [b, H, W, C] from `make_noise`.
    """
    b, height, width, channels = images.shape
    # One row of [W * C] values is broadcast over all rows; noise differs in each value.
    fill_rows = fill.repeat(width) if fill.ndim == 1 else fill.reshape(b, height, width * channels)
    filled = torch.where(build_box_mask(images, boxes), fill_rows, images.reshape(b, height, width * channels))
    return filled.view(images.shape)


def build_box_mask(images: torch.Tensor, boxes: Boxes) -> torch.Tensor:
    """Returns a mask of the values that lie in their sample's box: bool [b, H, W * C]."""
    # Pixels and channels are one dimension: a mask broadcast over 3 channels takes three times as long on a CPU.
    _, height, width, channels = images.shape
    left, top, box_width, box_height = to_device(boxes, images.device)[:, :, None].unbind(1)
    x = torch.arange(width * channels, dtype=torch.int32, device=images.device) // channels
    y = torch.arange(height, dtype=torch.int32, device=images.device)
    in_columns, in_rows = (x >= left) & (x < left + box_width), (y >= top) & (y < top + box_height)
    return in_rows[:, :, None] & in_columns[:, None, :]


def make_noise(images: torch.Tensor, keys: UInt64) -> torch.Tensor:
    """Draws independent uniform bytes with the shape, type and device of `images`, from the samples' keys (uint64 [b]).

    Raises:
        UsageError: the images have more than 4 channels.
    """
    _, height, width, channels = images.shape
    if channels > MAX_NOISE_CHANNELS:
        raise UsageError(f"random bytes for images of {channels} channels", fix="Fill with the mean or a number.")
    # One 32-bit word a pixel, mixed from the pixel's number and the key; its bytes are the channels.
    seed = to_device((draw_words(keys, STREAM_ERASE_NOISE) >> 32).astype("uint32").view("int32"), images.device)
    pixel_index = torch.arange(height * width, dtype=torch.int32, device=images.device)
    words = pixel_index * _to_signed(GOLDEN >> 32 | 1) + seed[:, None]
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ _shift_right(words, shift)) * _to_signed(factor)
    words = words ^ _shift_right(words, 16)
    return words.view(torch.uint8).view(-1, height, width, 4)[..., :channels].to(images.dtype)


def _shift_right(word: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift to the right; that of torch is arithmetic (it copies the sign bit)."""
    return (word >> num_bits) & ((1 << (32 - num_bits)) - 1)


def _to_signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
