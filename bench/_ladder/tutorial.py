"""The usual first training script, as a contestant: a Dataset of loose image files, a DataLoader, a plain loop.

It uses PyTorch alone. Pillow opens the files in the DataLoader's worker, and each sample becomes float there. The loop
is eager fp32 with SGD, and adds up its loss with `item()`, as tutorials do. Without a network it only takes batches.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final

import numpy as np
import PIL
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Images and labels."""
DRAIN = 4
"""Batches: a worker has two ready."""


@final
class Photographs(Dataset[tuple[torch.Tensor, int]]):
    """The files CLASS/NAME of a folder, as float [3, H, W] in -1..1 with the class's number."""

    def __init__(self, folder: Path) -> None:
        classes = sorted(one for one in folder.iterdir() if one.is_dir())
        self._files = [(path, label) for label, one in enumerate(classes) for path in sorted(one.iterdir())]

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, int]:
        path, label = self._files[place]
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
        values = torch.from_numpy(pixels).permute(2, 0, 1).float().contiguous()
        return (values / 255 - 0.5) / 0.5, label


def steps(loader: Batches, network: nn.Module, device: torch.device) -> Iterator[int]:
    """Trains for ever; after each step the number of its images."""
    network = network.to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.001, momentum=0.9)
    running_loss = 0.0
    while True:
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(network(images), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            yield len(images)


def reads(loader: Batches) -> Iterator[int]:
    """Takes batches for ever, and does nothing with them."""
    while True:
        for images, _ in loader:
            yield len(images)


def batches(asked: dict[str, Any]) -> Iterator[int]:
    photographs = Photographs(Path(asked["images"]))
    loader: Batches = DataLoader(photographs, batch_size=asked["batch"], shuffle=True, num_workers=asked["workers"])
    if not asked["factory"]:
        return reads(loader)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return steps(loader, pkgutil.resolve_name(asked["factory"])(10), device)


if __name__ == "__main__":
    from bench._peers.serve import argument, serve  # it takes stdout for itself

    name = f"torch {torch.__version__}, Pillow {PIL.__version__}"
    serve(batches(argument()), version=name, kernel="none", drain=DRAIN)
