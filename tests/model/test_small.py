from __future__ import annotations

import pytest
import torch
from tests.model._digits import learn_digits

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
    """Thirty epochs with shifted images reach 99 %."""
    accuracy = learn_digits(
        lambda: small_net(10, in_channels=1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        64,
    )
    assert accuracy > 0.95
