from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.core.errors import UsageError
from headway.model import cifar_resnet, measure_model_size, zero_init


@pytest.mark.parametrize(
    ("depth", "millions"), [(20, 0.27), (32, 0.46), (44, 0.66), (56, 0.85), (110, 1.7)], ids=lambda value: str(value)
)
def test_the_sizes_of_table_6(depth: int, millions: float) -> None:
    with torch.device("meta"):
        model = cifar_resnet(depth=depth)
        found = measure_model_size(model, torch.empty(1, 3, 32, 32))
    assert found.parameters == pytest.approx(millions * 1e6, rel=0.03)
    layers = [name for name, one in model.named_modules() if isinstance(one, nn.Conv2d | nn.Linear)]
    assert len(layers) == depth


def test_multiply_adds_of_resnet_20_by_hand() -> None:
    """conv1; 6 convolutions of 16 channels on 32 x 32; of each later stage 1 that widens and 5 others; the head."""
    with torch.device("meta"):
        found = measure_model_size(cifar_resnet(), torch.empty(2, 3, 32, 32))
    by_hand = 1024 * 9 * (3 * 16 + 6 * 16 * 16) + 256 * 9 * (16 * 32 + 5 * 32 * 32)
    by_hand += 64 * 9 * (32 * 64 + 5 * 64 * 64) + 640
    assert found.multiply_adds == by_hand == 40_551_040


@pytest.mark.parametrize("depth", [8, 20])
@pytest.mark.parametrize("skip", [True, False])
def test_channels_sizes_and_gradients(depth: int, skip: bool) -> None:
    model = cifar_resnet(7, 1, depth=depth, skip_connections=skip)
    logits = model(torch.randn(2, 1, 33, 32).to(memory_format=torch.channels_last))
    assert logits.shape == (2, 7)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_without_skip_connections_the_same_weights_are_another_function() -> None:
    torch.manual_seed(0)
    with_them, without = cifar_resnet(depth=56), cifar_resnet(depth=56, skip_connections=False)
    without.load_state_dict(with_them.state_dict())
    images = torch.randn(2, 3, 16, 16)
    assert not torch.equal(with_them(images), without(images))
    block = without.layer1[0]
    hidden = torch.randn(2, 16, 8, 8)
    expected = block.bn2(block.conv2(block.bn1(block.conv1(hidden)).relu())).relu()  # type: ignore[operator]
    torch.testing.assert_close(block(hidden), expected)


def test_the_shortcut_takes_every_second_pixel_and_adds_zeros() -> None:
    model = cifar_resnet(depth=8)
    assert len(zero_init(model)) == 3
    hidden = torch.rand(2, 16, 8, 8)
    out = model.layer2[0](hidden)
    assert torch.equal(out[:, :16], hidden[:, :, ::2, ::2])
    assert out[:, 16:].count_nonzero() == 0
    assert zero_init(cifar_resnet(depth=8, skip_connections=False)) == []


@pytest.mark.parametrize(("depth", "near"), [(18, "14 or 20"), (3, "8 or 14"), (111, "110 or 116")])
def test_other_depths_are_refused(depth: int, near: str) -> None:
    with pytest.raises(UsageError, match=rf"6 n \+ 2 layers, not {depth}\. Set it to {near}"):
        cifar_resnet(depth=depth)
