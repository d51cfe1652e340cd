from __future__ import annotations

import pytest
import torch
from torch import nn

from headway.core.errors import CheckpointError
from headway.model import Ema


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(dtype)


def change(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize(("half_life", "every"), [(1.0, 1), (10.0, 1), (3.0, 4), (0.5, 2)])
def test_it_is_the_mean_with_weights_that_halve(half_life: float, every: int) -> None:
    model = net()
    ema = Ema(model, half_life_steps=half_life, every_steps=every)
    seen, steps = [], []
    for step in range(1, 26):
        change(model, step)
        ema.update(step)
        if step % every == 0:
            steps.append(step)
            seen.append({name: value.clone() for name, value in model.state_dict().items()})
    weights = torch.tensor([0.5 ** ((steps[-1] - step) / half_life) for step in steps], dtype=torch.float64)
    weights /= weights.sum()
    now = {name: value.clone() for name, value in model.state_dict().items()}
    with ema.swap_weights():
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                expected = sum(weight * one[name] for weight, one in zip(weights, seen, strict=True))
                torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)
    for name, value in model.state_dict().items():
        assert torch.equal(value, now[name])


def test_an_update_after_several_steps_is_one_after_each_of_them() -> None:
    """If the weights stay the same over these steps, as the common weights of local training do."""
    model = net()
    each, once = Ema(model, half_life_steps=3.0), Ema(model, half_life_steps=3.0)
    step = 0
    for since in (1, 1, 4, 2, 7):
        change(model, step)
        for number in range(step + 1, step + since + 1):
            each.update(number)
        step += since
        once.update(step, since)
    for name, value in each.state().items():
        torch.testing.assert_close(once.state()[name], value, rtol=1e-5, atol=1e-6)


def test_before_the_first_update_the_network_is_itself() -> None:
    model = net()
    ema = Ema(model, half_life_steps=2, every_steps=3)
    for step in (1, 2):
        change(model, step)
        ema.update(step)
        assert ema.state() == {}
        now = {name: value.clone() for name, value in model.state_dict().items()}
        with ema.swap_weights():
            assert all(torch.equal(value, now[name]) for name, value in model.state_dict().items())
    change(model, 3)
    ema.update(3)
    with ema.swap_weights():
        torch.testing.assert_close(model[0].weight, ema.state()["ema/0.weight"], rtol=0, atol=0)


def test_it_goes_on_from_its_state_bit_by_bit() -> None:
    model, other = net(torch.float32), net(torch.float32).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    whole, first = (Ema(one, half_life_steps=3, every_steps=2) for one in (model, model))
    for step in range(1, 9):
        change(model, step)
        whole.update(step)
        if step <= 5:
            first.update(step)
    second = Ema(other, half_life_steps=3, every_steps=2)
    second.load({name: value.clone() for name, value in first.state().items()})
    for step in range(6, 9):
        change(other, step)
        second.update(step)
    for name, value in whole.state().items():
        assert torch.equal(value, second.state()[name]), name
    second.load({})
    assert second.state() == {}


def test_weights_of_half_precision_are_averaged_in_fp32() -> None:
    model = net(torch.bfloat16)
    ema = Ema(model, half_life_steps=1000)
    for step in range(1, 4):
        with torch.no_grad():
            model[0].weight.fill_(step)  # type: ignore[operator]
        ema.update(step)
    assert ema.state()["ema/0.weight"].dtype == torch.float32
    assert ema.state()["ema/0.weight"].mean().item() == pytest.approx(2, abs=1e-2)
    with ema.swap_weights():
        assert model[0].weight.dtype == torch.bfloat16


def test_an_error_within_leaves_the_newest_weights() -> None:
    model = net()
    ema = Ema(model, half_life_steps=5)
    ema.update(1)
    change(model, 2)
    now = model[0].weight.clone()  # type: ignore[operator]
    with pytest.raises(ZeroDivisionError), ema.swap_weights():
        raise ZeroDivisionError
    assert torch.equal(model[0].weight, now)  # type: ignore[arg-type]


def test_averages_of_another_network_are_refused() -> None:
    ema = Ema(nn.Linear(2, 2), half_life_steps=5)
    other = Ema(nn.Linear(2, 3), half_life_steps=5)
    other.update(1)
    with pytest.raises(CheckpointError, match="another network's"):
        ema.load(other.state())
