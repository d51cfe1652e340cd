from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from headway.core.errors import CheckpointError, UsageError
from headway.optim import Lookahead


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(dtype)


def step_of(model: nn.Module, step: int) -> None:
    """A step of some optimizer: by a fixed random move."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.add_(torch.randn(value.shape, generator=generator, dtype=torch.float64))


@settings(max_examples=10, deadline=None)
@given(st.floats(0.05, 1), st.integers(1, 7), st.sampled_from([0.0, 1.0, 3.0]))
def test_it_is_the_papers_recursion(alpha: float, every: int, power: float) -> None:
    """Of weights that move by fixed steps, by hand in one number; statistics as weights."""
    model, steps = net(), 20
    ahead = Lookahead(model, alpha=alpha, every_steps=every, power=power, steps=steps)
    places = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    slow = {name: value.clone() for name, value in places.items()}
    fast = {name: value.clone() for name, value in places.items()}
    for step in range(1, steps + 1):
        before = {name: value.clone() for name, value in places.items()}
        step_of(model, step)
        for name, value in places.items():
            fast[name] += value - before[name]
        ahead.update(step)
        if step % every == 0:
            share = 1 - (1 - alpha) * (step / steps) ** power
            for name in slow:
                slow[name] += share * (fast[name] - slow[name])
                fast[name] = slow[name].clone()
        for name, value in places.items():
            torch.testing.assert_close(value, fast[name], rtol=0, atol=1e-9)
    with ahead.swap_weights():
        for name, value in places.items():
            torch.testing.assert_close(value, slow[name], rtol=0, atol=1e-9)
    for name, value in places.items():
        torch.testing.assert_close(value, fast[name], rtol=0, atol=1e-9)


def test_with_all_of_the_way_it_changes_nothing() -> None:
    model, other = net(torch.float32), net(torch.float32)
    ahead = Lookahead(model, alpha=1, every_steps=3)
    for step in range(1, 10):
        for one in (model, other):
            step_of(one, step)
        ahead.update(step)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_airbenchs_share_falls_from_one_to_alpha() -> None:
    ahead = Lookahead(net(), alpha=1 - 0.95**5, every_steps=5, power=3, steps=475)
    assert ahead.compute_share(0) == 1
    assert ahead.compute_share(475) == pytest.approx(1 - 0.95**5)
    assert ahead.compute_share(240) == pytest.approx(1 - 0.95**5 * (240 / 475) ** 3)


def test_it_goes_on_from_its_state_bit_by_bit() -> None:
    whole, first = net(torch.float32), net(torch.float32)
    both = [Lookahead(one, alpha=0.3, every_steps=4) for one in (whole, first)]
    for step in range(1, 7):
        for model, ahead in zip((whole, first), both, strict=True):
            step_of(model, step)
            ahead.update(step)
    second = Lookahead(first, alpha=0.3, every_steps=4)
    second.load({name: value.clone() for name, value in both[1].state().items()})
    for step in range(7, 14):
        for model, ahead in ((whole, both[0]), (first, second)):
            step_of(model, step)
            ahead.update(step)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, first.state_dict()[name]), name


def test_weights_of_half_precision_have_slow_ones_in_fp32() -> None:
    ahead = Lookahead(net(torch.bfloat16), alpha=0.01, every_steps=1)
    assert {value.dtype for value in ahead.state().values()} == {torch.float32}


def test_an_error_within_leaves_the_newest_weights() -> None:
    model = net()
    ahead = Lookahead(model)
    step_of(model, 1)
    now = model[0].weight.clone()  # type: ignore[operator]
    with pytest.raises(ZeroDivisionError), ahead.swap_weights():
        raise ZeroDivisionError
    assert torch.equal(model[0].weight, now)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"alpha": 0.0}, "alpha=0, every_steps=5 and power=0. Give alpha in (0, 1]"),
        ({"alpha": 1.5}, "Give alpha in (0, 1]"),
        ({"every_steps": 0}, "every_steps of at least 1"),
        ({"power": -1.0, "steps": 10}, "power of at least 0"),
        ({"power": 1.0}, "which is not known. Give steps."),
        ({"steps": 4}, "every 5 steps, and the run has 4. Set every_steps to at most 4."),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Lookahead(net(), **options)  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_slow_weights_of_another_network_are_refused() -> None:
    ahead = Lookahead(nn.Linear(2, 2))
    for other in (Lookahead(nn.Linear(2, 3)).state(), {}):
        with pytest.raises(CheckpointError, match="another network's"):
            ahead.load(other)
