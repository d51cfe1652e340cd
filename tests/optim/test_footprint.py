"""What is said of an optimizer before its first step is what it keeps after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim._cases import OPTIMIZER_NAMES
from torch import nn

from headway.model.flops import MultiplyAddCounter
from headway.optim import build_optimizer, read_optimizer
from headway.optim.footprint import count_multiply_adds, estimate_footprint

EXTRA: dict[str, dict[str, Any]] = {"lbsgd": {"warmup": "lars", "batch_scale": 2}}


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))


@pytest.mark.parametrize("name", OPTIMIZER_NAMES)
def test_it_is_what_the_optimizer_then_keeps(name: str) -> None:
    model = network()
    recipe = read_optimizer(name=name, lr=0.1, weight_decay=0.01, no_decay=True, **EXTRA.get(name, {}))
    optimizer = build_optimizer(recipe, model, steps_per_epoch=10)
    found = estimate_footprint(optimizer)
    model(torch.randn(4, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    assert found.state_bytes == sum(value.numel() * value.element_size() for value in state)
    assert estimate_footprint(optimizer) == found


@pytest.mark.parametrize(("name", "passes"), [("sgd", 5.0), ("adamw", 7.0), ("signum", 5.0)])
def test_passes_by_hand(name: str, passes: float) -> None:
    """Weights and each state are read and written, gradients read."""
    model = network()
    size = sum(4 * value.numel() for value in model.parameters())
    assert estimate_footprint(build_optimizer(read_optimizer(name=name, lr=0.1), model)).moved_bytes == passes * size


def test_layers_with_a_trust_ratio_are_gone_through_once_more() -> None:
    model = network()
    weights = sum(4 * value.numel() for value in model.parameters() if value.ndim > 1)
    plain = estimate_footprint(build_optimizer(read_optimizer(name="sgd", lr=0.1), model))
    layerwise = estimate_footprint(build_optimizer(read_optimizer(name="lars", lr=0.1), model))
    assert layerwise.state_bytes == plain.state_bytes
    assert layerwise.moved_bytes == plain.moved_bytes + 2 * weights


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"name": "muon"}, 0),
        # In every third step, without QR decompositions, which torch does not count.
        ({"name": "soap", "precondition_every": 3}, sum(4 / 3 * side**3 / 3 for side in (8, 27, 5, 288))),
        ({"name": "lamb"}, 0),
    ],
)
def test_matrix_products_are_those_that_the_steps_make(options: dict[str, Any], missing: float) -> None:
    model = network()
    optimizer = build_optimizer(read_optimizer(lr=0.1, **options), model)
    expected = count_multiply_adds(optimizer, model.named_parameters())
    found = []
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        with MultiplyAddCounter() as counter:
            optimizer.step()
        found.append(counter.total)
    # SOAP's first step makes no step of Adam.
    assert sum(found[1:]) / 3 + missing == pytest.approx(sum(expected.values()))
    assert all(dict(model.named_parameters())[name].ndim > 1 for name in expected)
