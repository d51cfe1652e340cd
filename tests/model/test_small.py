from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests._support import digits_arrays

from headway.model import small_net


@pytest.mark.parametrize("size", [4, 8, 17, 24])
@pytest.mark.parametrize("channels", [1, 3])
def test_sizes_and_channels(size: int, channels: int) -> None:
    model = small_net(5, channels)
    logits = model(torch.randn(3, channels, size, size + 1))
    assert logits.shape == (3, 5)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_width_and_size() -> None:
    assert sum(parameter.numel() for parameter in small_net().parameters()) == 66_410
    assert sum(parameter.numel() for parameter in small_net(width=64).parameters()) > 4 * 60_000


@pytest.mark.check
def test_it_reads_handwritten_digits() -> None:
    """1,797 real images, a fifth held out, six epochs; thirty epochs with shifted images reach 99 %."""
    torch.manual_seed(0)
    pixels, targets = digits_arrays()
    images = (torch.tensor(pixels, dtype=torch.float32)[:, None] - 4.9) / 6
    labels = torch.tensor(targets)
    order = torch.randperm(len(labels))
    train, held_out = order[360:], order[:360]
    model = small_net(10, in_channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    model.eval()
    assert (model(images[held_out]).argmax(1) == labels[held_out]).float().mean() > 0.95
