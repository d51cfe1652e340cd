"""Rotation against Pillow and grid_sample, and operations on blocks of a batch."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from headway.data.ops.blocks import apply_in_blocks
from headway.data.ops.colour import shift_hue
from headway.data.ops.move import build_rotation_matrices
from headway.data.ops.rotate import rotate


def some(b: int, height: int, width: int, channels: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (b, height, width, channels), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def photographs(data_root: Path) -> torch.Tensor:
    """uint8 [8, 60, 60, 3]."""
    files = sorted((data_root / "imagenet-250").rglob("*.JPEG"))[:8]
    pixels = [np.asarray(Image.open(io.BytesIO(file.read_bytes())).convert("RGB").resize((60, 60))) for file in files]
    return torch.from_numpy(np.stack(pixels))


@pytest.mark.parametrize("size", [(30, 40), (40, 30), (31, 31)])
def test_a_rotation_is_pillows(photographs: torch.Tensor, size: tuple[int, int]) -> None:
    images = photographs[:, : size[0], : size[1]].contiguous()
    angles, fill = np.array([15.0, -45, 90, 180, 7.5, -170, 33, 0]), torch.tensor([120, 110, 100], dtype=torch.uint8)
    out = rotate(images, angles, fill).numpy()
    matrices = build_rotation_matrices(angles, size)
    differ = 0
    for place, image in enumerate(images.numpy()):
        picture = Image.fromarray(image)
        expected = picture.transform(
            picture.size,
            Image.Transform.AFFINE,
            tuple(matrices[place]),
            Image.Resampling.BILINEAR,
            fillcolor=tuple(fill.tolist()),
        )
        apart = np.abs(out[place].astype(int) - np.asarray(expected)).max(axis=2)
        # A source on the very border is inside for one and outside for the other.
        differ += int((apart > 2).sum())
    assert differ <= 0.002 * images[..., 0].numel()
    assert (out[7] == images[7].numpy()).all()
    if size[0] == size[1]:
        assert (out[2] == images[2].rot90().numpy()).all()
    assert (out[3] == images[3].flip(0, 1).numpy()).all()


@pytest.mark.parametrize("size", [(24, 31), (3, 40), (1, 9), (20, 512)])
def test_a_reflected_rotation_is_grid_samples(size: tuple[int, int]) -> None:
    images, angles = some(6, *size), np.array([10.0, -33, 90, 145, -179, 61])
    out = rotate(images, angles, None)
    a, b, c, d, e, f = torch.from_numpy(build_rotation_matrices(angles, size)).T[:, :, None, None]
    x, y = torch.arange(size[1]) + 0.5, torch.arange(size[0])[:, None] + 0.5
    column, row = a * x + b * y + c - 0.5, d * x + e * y + f - 0.5
    grid = torch.stack([column / max(1, size[1] - 1), row / max(1, size[0] - 1)], dim=3) * 2 - 1
    expected = nn.functional.grid_sample(
        images.double().permute(0, 3, 1, 2), grid, padding_mode="reflection", align_corners=True
    ).permute(0, 2, 3, 1)
    # Half for the rounding, and up to 255 / 512 for a source that is rounded to 1/256 on each axis.
    assert (out.double() - expected).abs().max() <= 0.5 + 2 * 255 / 512


@pytest.mark.parametrize("channels", [1, 2, 4, 7])
def test_each_channel_is_rotated_alone(channels: int) -> None:
    images, angles = some(2, 11, 14, channels), np.array([37.0, -120])
    for fill in (None, torch.arange(channels, dtype=torch.uint8)):
        out = rotate(images, angles, fill)
        for channel in range(channels):
            one = None if fill is None else fill[channel : channel + 1]
            assert (out[..., channel] == rotate(images[..., channel : channel + 1], angles, one)[..., 0]).all()


@pytest.mark.parametrize(("side", "blocks"), [(400, [1, 1, 1]), (150, [1, 1, 1]), (140, [2, 1]), (9, [3])])
def test_blocks_of_images_are_the_batch(side: int, blocks: list[int]) -> None:
    images, found = some(3, side, side), list[int]()

    def invert(part: torch.Tensor, block: slice) -> torch.Tensor:
        assert (part == images[block]).all()
        found.append(len(part))
        return 255 - part

    assert (apply_in_blocks(images, invert) == 255 - images).all()
    assert found == blocks
    parameters = np.array([0.1, -0.4, 0.3])
    hues = [shift_hue(images[k : k + 1], parameters[k : k + 1]) for k in range(3)]
    assert (shift_hue(images, parameters) == torch.cat(hues)).all()
    turned = [rotate(images[k : k + 1], parameters[k : k + 1] * 360, None) for k in range(3)]
    assert (rotate(images, parameters * 360, None) == torch.cat(turned)).all()
