"""Transforms of torchvision v2 and albumentations on packed photographs: other crops in each epoch, exact resume.

Neither library is here, so two stand-ins are called as they would be: v2 with a tensor [C, H, W], albumentations with
image= and set_random_seed.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import packed_digits

import headway


class Flip(torch.nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        assert image.shape == (1, 8, 8)
        return image.flip(-1) if torch.rand(()) < 0.5 else image


Flip.__module__ = "torchvision.transforms.v2"


class Brighten:
    """As albumentations.Compose: named arguments, and a generator of its own."""

    def __init__(self) -> None:
        self.random = np.random.default_rng()

    def set_random_seed(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def __call__(self, *args: Any, force_apply: bool = False, **data: Any) -> dict[str, Any]:
        assert not args
        shift = int(self.random.integers(0, 60))
        return {"image": np.clip(data["image"].astype(int) + shift, 0, 255).astype(np.uint8)}


@pytest.mark.parametrize("transform", [Flip(), Brighten()], ids=["torchvision", "albumentations"])
def test_own_transforms(transform: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)

    def load(workers: int) -> headway.Loader[Any]:
        return headway.Loader("digits.packed/train", batch=64, seed=1, transform=transform, workers=workers)

    loader = load(0)
    epochs = [[batch.images.numpy().tobytes() for batch in loader] for _ in range(2)]
    assert epochs[0] != epochs[1]
    stopped = load(0)
    taken = [batch.images.numpy().tobytes() for batch in islice(stopped, 2)]
    again = load(0)
    again.load_state_dict(stopped.state_dict())
    assert taken + [batch.images.numpy().tobytes() for batch in again] == epochs[0]
