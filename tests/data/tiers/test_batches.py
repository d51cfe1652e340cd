"""A Loader's batches are the same bytes whatever tier they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.tiers._near import HEIGHT, WIDTH, N
from tests.data.tiers._server import serving

from headway.core.errors import UsageError
from headway.data import native
from headway.data.data_recipe import CropRecipe
from headway.data.dataset import Dataset
from headway.data.decode import build_decoder
from headway.data.loader import Loader
from headway.data.order import Order
from headway.data.resolution import ProgressiveRecipe
from headway.data.tiers import choose_tier
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.remote_dataset import open_remote
from headway.data.tiers.tier import MappedTier, Tier


def batches(data: Dataset, tier: Tier, options: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    loader = Loader(data, batch=7, order=Order(N, 3, 16), stop=3 * N, tier=tier, threads=2, **options)
    return [(images.clone(), labels) for images, labels in loader]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"crop": "random", "flip": True, "size": 24},
        {"flip": "alternating", "translate": 3},
        {"size": (WIDTH, HEIGHT), "channels": 1},
    ],
    ids=["whole", "crop", "move", "resize"],
)
def test_batches_are_the_same_from_every_tier(
    folder: Path, data: Dataset, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = batches(data, MappedTier(data, ""), options)
    with serving(folder) as server:
        far = open_remote(server.uri, tmp_path / "columns")
        tiers: list[tuple[Dataset, Tier]] = [(data, choose_tier(data, "memory"))]
        tiers += [
            (far, choose_tier(far, cache, folder=tmp_path / "cache")) for cache in ("none", "disk", "disk", "memory")
        ]
        for some, tier in tiers:
            found = batches(some, tier, options)
            tier.close()
            assert len(found) == len(expected)
            for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
                assert torch.equal(images, expected_images), tier.name
                assert torch.equal(labels, expected_labels)
        far.close()


@pytest.mark.skipif(not native.is_available(), reason="the native core is not built")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flip": "alternating", "translate": 3},
        {"crop": "random", "flip": "both", "size": 24},
        {"crop": "random", "translate": 2, "size": (20, 33)},
        {"crop": CropRecipe(share=0.7), "size": 16},
        {"crop": "random", "size": 24, "progressive": ProgressiveRecipe(start=12, until_epoch=2, step=4)},
    ],
    ids=["whole", "move", "crop", "crop and move", "resize", "progressive"],
)
def test_batches_are_the_same_from_a_device_that_crops(data: Dataset, options: dict[str, Any]) -> None:
    expected = batches(data, MappedTier(data, ""), options)
    decoder = build_decoder(1)
    tier = DeviceTier(data, MappedTier(data, ""), decoder, "cpu", why="")
    decoder.close()
    found = batches(data, tier, {"crop_on": "device", **options})
    assert len(found) == len(expected)
    for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
        assert torch.equal(images, expected_images)
        assert torch.equal(labels, expected_labels)


def test_what_a_device_cannot_crop_as_the_host_does_is_refused(data: Dataset) -> None:
    decoder = build_decoder(1)
    tier = DeviceTier(data, MappedTier(data, ""), decoder, "cpu", why="")
    decoder.close()
    for options in (
        {"crop": "random", "size": 24},
        {"crop_on": "device", "crop": "random", "size": 24, "backend": "pillow"},
        # Too much smaller than the stored images, and other colours.
        {"crop_on": "device", "crop": "random", "size": int(min(HEIGHT, WIDTH) / 3.6)},
        {"crop_on": "device", "size": 24, "channels": 1},
    ):
        with pytest.raises(UsageError, match="kept decoded on the device cannot be cropped"):
            batches(data, tier, options)
    with pytest.raises(UsageError, match=r"unknown place 'gpu'\. Give host or device"):
        Loader(data, batch=7, crop_on="gpu")  # type: ignore[arg-type]
