"""Own loop: epochs differ, and a stop in the middle of an epoch changes nothing. The script of the README's kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests._support import packed_digits
from torch import nn

import headway


def build() -> tuple[nn.Module, torch.optim.Optimizer, headway.Loader[Any]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = headway.Loader("digits.packed/train", batch=32, seed=1, size=6, crop="random", flip=True)
    return model, optimizer, loader


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Any, labels: Any) -> None:
    loss = nn.functional.cross_entropy(model(images / 255), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def test_own_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)
    model, optimizer, loader = build()
    served: list[list[int]] = []
    pixels = []
    for _ in range(3):
        served.append([])
        for batch in loader:
            served[-1] += batch.samples.tolist()
            pixels.append(batch.images.sum().item())
            train_step(model, optimizer, *batch)
    assert served[0] != served[1] != served[2]
    assert len(set(pixels)) == len(pixels)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    # The same loop, stopped after the third step of the second epoch, and continued by another program.
    model, optimizer, loader = build()
    for epoch in range(2):
        for step, (images, labels) in enumerate(loader):
            train_step(model, optimizer, images, labels)
            if (epoch, step) == (1, 2):
                break
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}, "a.pt"
    )
    model, optimizer, loader = build()
    saved = torch.load("a.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])
    assert loader.epoch == 1
    for _ in range(loader.epoch, 3):
        for images, labels in loader:
            train_step(model, optimizer, images, labels)
    assert all(torch.equal(whole[name], tensor) for name, tensor in model.state_dict().items())
