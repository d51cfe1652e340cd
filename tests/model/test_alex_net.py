from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headway.core.errors import UsageError
from headway.model import alexnet, join_towers, measure_model_size
from headway.model.alex_net import AlexNet


@pytest.mark.parametrize("two_towers", [False, True])
def test_the_published_size(two_towers: bool) -> None:
    """62 M parameters and 727 M multiply-adds at 227 pixels; in two towers they are as many."""
    with torch.device("meta"):
        found = measure_model_size(alexnet(two_towers=two_towers), torch.empty(1, 3, 227, 227))
    assert found.parameters == 60_965_224
    assert found.parameters == pytest.approx(62e6, rel=0.03)
    assert found.multiply_adds == pytest.approx(727e6, rel=0.03)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("pool5_norm", [False, True])
@pytest.mark.thin(1)
def test_two_towers_are_convolutions_in_two_groups(batch_norm: bool, pool5_norm: bool) -> None:
    """In float64, features, logits and gradients; one network's weights loaded into the other."""
    torch.manual_seed(0)
    options = {"batch_norm": batch_norm, "pool5_norm": pool5_norm, "fc_width": 8, "dropout": 0.0}
    towers: AlexNet = alexnet(5, two_towers=True, **options).double()  # type: ignore[arg-type]
    grouped: AlexNet = alexnet(5, **options).double()  # type: ignore[arg-type]
    assert len(towers.towers) == 2
    grouped.load_state_dict(join_towers(towers.state_dict()))
    images = torch.randn(3, 3, 80, 80, dtype=torch.float64)
    seen: list[Tensor] = []
    for model in (towers, grouped):
        model.get_submodule("pool5").register_forward_hook(lambda *given: seen.append(given[2]))
    one, other = towers(images), grouped(images)
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-12)
    assert seen[0].abs().max() > 1e-6
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    for logits in (one, other):
        logits.square().sum().backward()
    found = join_towers({name: value.grad for name, value in towers.named_parameters() if value.grad is not None})
    assert len(found) == len(list(grouped.parameters()))
    for name, value in grouped.named_parameters():
        torch.testing.assert_close(found[name], value.grad, rtol=1e-9, atol=1e-12)


def test_a_tower_knows_nothing_of_the_other_before_conv3() -> None:
    model = alexnet(two_towers=True, fc_width=8)
    images = torch.randn(1, 3, 67, 67)
    before = model.towers[0].begin(images)  # type: ignore[operator]
    for parameter in model.towers[1].parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(model.towers[0].begin(images), before)  # type: ignore[operator]


def test_bn5_lies_behind_pool5() -> None:
    model = alexnet(3, pool5_norm=True, batch_norm=True, fc_width=8)
    seen: dict[str, Tensor] = {}
    for name in ("pool5", "bn5"):
        model.get_submodule(name).register_forward_hook(lambda _, given, out, name=name: seen.update({name: out}))
    model(torch.randn(8, 3, 67, 67))
    norm = nn.BatchNorm2d(256)
    torch.testing.assert_close(norm(seen["pool5"]), seen["bn5"])
    assert isinstance(alexnet(fc_width=8).bn5, nn.Identity)
    norms = [name for name, one in model.named_modules() if isinstance(one, nn.BatchNorm2d)]
    assert norms == [*(f"towers.0.norm{layer}" for layer in range(1, 6)), "bn5"]


def test_local_response_is_that_of_the_paper() -> None:
    """b_i = a_i / (2 + 1e-4 * sum of a_j^2 over 5 neighbouring channels) ^ 0.75, in each half alone."""
    hidden = 100 * torch.rand(2, 12, 3, 3, dtype=torch.float64)
    norm = alexnet(fc_width=8).towers[0].norm1
    found = norm(hidden)  # type: ignore[operator]
    for half in (hidden[:, :6], hidden[:, 6:]):
        for channel in range(6):
            near = half[:, max(0, channel - 2) : channel + 3].square().sum(1)
            at = channel if half.data_ptr() == hidden.data_ptr() else channel + 6
            torch.testing.assert_close(found[:, at], half[:, channel] / (2 + 1e-4 * near) ** 0.75)


def test_it_begins_as_the_paper_says() -> None:
    torch.manual_seed(0)
    model = alexnet(fc_width=64)
    state = model.state_dict()
    for name in ("towers.0.conv2", "towers.0.conv4", "towers.0.conv5", "fc6", "fc7"):
        assert (state[f"{name}.bias"] == 1).all(), name
    for name in ("towers.0.conv1", "towers.0.conv3", "fc8"):
        assert (state[f"{name}.bias"] == 0).all(), name
    assert state["fc6.weight"].std().item() == pytest.approx(0.01, rel=0.02)
    with torch.device("meta"):
        assert not [name for name in alexnet(batch_norm=True).state_dict() if "conv" in name and "bias" in name]


@pytest.mark.parametrize("size", [67, 128, 227])
def test_sizes_channels_and_gradients(size: int) -> None:
    model = alexnet(4, 1, fc_width=8, batch_norm=True)
    logits = model(torch.randn(2, 1, size, size).to(memory_format=torch.channels_last))
    assert logits.shape == (2, 4)
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_small_images_are_refused() -> None:
    with pytest.raises(UsageError, match=r"images of 67 pixels or more, not 66 x 80\. Set data\.size to 227"):
        alexnet(fc_width=8)(torch.randn(1, 3, 66, 80))
