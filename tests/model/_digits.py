"""Training of a small network on real handwritten digits."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests._support import digits_arrays


def learn_digits(
    build: Callable[[], torch.nn.Module], optimize: Callable[[torch.nn.Module], torch.optim.Optimizer], batch_size: int
) -> float:
    """The accuracy on a fifth of 1,797 images that is held out, after six epochs on the others."""
    torch.manual_seed(0)
    pixels, targets = digits_arrays()
    images = (torch.tensor(pixels, dtype=torch.float32)[:, None] - 4.9) / 6
    labels = torch.tensor(targets)
    order = torch.randperm(len(labels))
    train, held_out = order[360:], order[:360]
    model = build()
    optimizer = optimize(model)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(images[held_out]).argmax(1) == labels[held_out]).float().mean())
