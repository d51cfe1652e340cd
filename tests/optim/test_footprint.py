"""What is said of an optimizer before its first step is what it keeps after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.optim._cases import OPTIMIZER_NAMES
from torch import nn

from headway.model.flops import MultiplyAddCounter
from headway.optim import build_optimizer, convert_to_bf16, read_optimizer
from headway.optim.footprint import count_multiply_adds, estimate_footprint

EXTRA: dict[str, dict[str, Any]] = {"lbsgd": {"warmup": "lars", "batch_scale": 2}}

NO_BF16 = ("adam", "bf16")


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 5))


@pytest.mark.parametrize(
    ("name", "precision"),
    [(name, precision) for name in OPTIMIZER_NAMES for precision in ("fp32", "bf16") if (name, precision) != NO_BF16],
)
@pytest.mark.thin(16)
def test_it_is_what_the_optimizer_then_keeps(name: str, precision: str) -> None:
    model = network()
    options = {"weight_decay": 0.01, "no_decay": True, "precision": precision, **EXTRA.get(name, {})}
    recipe = read_optimizer(name=name, lr=0.1, **options)
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


@pytest.mark.parametrize(
    ("name", "weight_bytes", "bias_bytes"), [("sgd", 10, 10), ("adamw", 14, 14), ("lars", 14, 10), ("lamb", 22, 14)]
)
def test_bytes_by_hand_in_16_bits(name: str, weight_bytes: int, bias_bytes: int) -> None:
    """Half of each pass; LAMB reads its moments for the norms, and rounds them once."""
    model = nn.Linear(30, 20)
    optimizer = build_optimizer(read_optimizer(name=name, lr=0.1, precision="bf16"), model)
    convert_to_bf16(model)
    found = estimate_footprint(optimizer)
    assert found.moved_bytes == 600 * weight_bytes + 20 * bias_bytes
    assert found.state_bytes == 620 * (2 if name in ("sgd", "lars") else 4) + 2 * 4


def test_layers_with_a_trust_ratio_are_gone_through_once_more() -> None:
    model = network()
    weights = sum(4 * value.numel() for value in model.parameters() if value.ndim > 1)
    plain = estimate_footprint(build_optimizer(read_optimizer(name="sgd", lr=0.1), model))
    layerwise = estimate_footprint(build_optimizer(read_optimizer(name="lars", lr=0.1), model))
    assert layerwise.state_bytes == plain.state_bytes
    assert layerwise.moved_bytes == plain.moved_bytes + 2 * weights
    # Each layer of LBSGD has a ratio, biases too.
    linear, lars = (
        estimate_footprint(build_optimizer(read_optimizer(name="lbsgd", lr=0.1, warmup=warmup), model, 10))
        for warmup in ("linear", "lars")
    )
    assert lars.moved_bytes == linear.moved_bytes + 2 * sum(4 * value.numel() for value in model.parameters())


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
