"""A Loader's batches are the same bytes whatever tier they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.tiers._near import HEIGHT, WIDTH, N
from tests.data.tiers._server import serving

from headway.data.dataset import Dataset
from headway.data.decode import build_decoder
from headway.data.loader import Loader
from headway.data.order import Order
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
        if not options:  # what else it does with pixels is done where they are decoded
            decoder = build_decoder(1)
            tiers.append((data, DeviceTier(data, MappedTier(data, ""), decoder, "cpu", why="")))
            decoder.close()
        for some, tier in tiers:
            found = batches(some, tier, options)
            tier.close()
            assert len(found) == len(expected)
            for (images, labels), (expected_images, expected_labels) in zip(found, expected, strict=True):
                assert torch.equal(images, expected_images), tier.name
                assert torch.equal(labels, expected_labels)
        far.close()
