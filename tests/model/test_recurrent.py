from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.model._digits import learn_digits
from torch import nn

from headway.core.errors import UsageError
from headway.model import gru


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("size", "pixels"), [((8, 8), 4), ((8, 8), 64), ((3, 10), 5), ((7, 7), 1)])
def test_it_reads_the_pixels_in_rows_some_in_each_step(size: tuple[int, int], pixels: int, channels: int) -> None:
    """Beside a loop over the pixels of a cell with the same weights."""
    torch.manual_seed(0)
    model = gru(5, channels, hidden=6, layers=2, pixels_per_step=pixels)
    images = torch.randn(3, channels, *size)
    cells = [nn.GRUCell(channels * pixels, 6), nn.GRUCell(6, 6)]
    for layer, cell in enumerate(cells):
        for name, parameter in cell.named_parameters():
            parameter.data.copy_(getattr(model.recurrent, f"{name}_l{layer}"))
    states = [torch.zeros(3, 6) for _ in cells]
    read = [images[:, :, row, column] for row in range(size[0]) for column in range(size[1])]
    for first in range(0, len(read), pixels):
        states[0] = cells[0](torch.cat(read[first : first + pixels], dim=1), states[0])
        states[1] = cells[1](*states)
    expected = model.head(states[1])
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.testing.assert_close(model(images.contiguous(memory_format=layout)), expected)


def test_sizes_that_do_not_come_out_even_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"images of 9 x 7 have 63 pixels, no multiple of pixels_per_step \(4\)"
    ) as found:
        gru(10, 1)(torch.randn(2, 1, 9, 7))
    # The fix works: a row in each step.
    assert "{pixels_per_step: 7}" in str(found.value)
    assert gru(10, 1, pixels_per_step=7)(torch.randn(2, 1, 9, 7)).shape == (2, 10)
    for name in ("hidden", "layers", "pixels_per_step"):
        with pytest.raises(UsageError, match=f"gru has {name}=0"):
            gru(**{name: 0})


def test_size() -> None:
    assert sum(parameter.numel() for parameter in gru(10, 1).parameters()) == 14_090


def test_bf16_changes_the_logits_by_rounding_only() -> None:
    torch.manual_seed(0)
    model, images = gru(10, 1), torch.randn(16, 1, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(images)
    assert rounded.dtype == torch.bfloat16
    rounded.float().square().mean().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    exact = model(images)
    exact.square().mean().backward()
    # bfloat16 has eight bits: 16 steps of it stay within a few of them.
    torch.testing.assert_close(rounded.float(), exact, atol=0.01, rtol=0)
    for one, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert one.dtype == torch.float32
        assert F.cosine_similarity(one.flatten(), parameter.grad.flatten(), dim=0) > 0.99


@pytest.mark.check
def test_it_reads_handwritten_digits() -> None:
    accuracy = learn_digits(lambda: gru(10, 1), lambda model: torch.optim.Adam(model.parameters(), lr=0.01), 32)
    assert accuracy > 0.9
