"""Which parameters Muon takes, and the norm of its filters. Its iteration: test_orthogonalise.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway import optim
from headway.core.errors import UsageError
from headway.optim.orthogonalise import orthogonalise


def test_a_network_falls_into_filters_and_the_rest() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4))
    optimizer = optim.Muon(model.parameters(), 0.02)
    shapes = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    assert [group["filters"] for group in optimizer.param_groups] == [True, False]
    assert shapes == [[(8, 3, 3, 3)], [(8,), (8,), (8,), (4, 8), (4,)]]
    asked = optim.Muon(
        [{"params": [model[3].weight], "filters": True, "lr": 0.1}, {"params": [model[0].weight], "filters": False}],
        1.0,
    )
    assert [(group["filters"], group["lr"]) for group in asked.param_groups] == [(True, 0.1), (False, 1.0)]
    other = optim.Muon(model.parameters(), 0.02)
    other.load_state_dict(optimizer.state_dict())
    assert [group["filters"] for group in other.param_groups] == [True, False]


def test_a_group_that_is_refused_leaves_nothing_behind() -> None:
    optimizer = optim.Muon([nn.Parameter(torch.zeros(4, 3, 2, 2))], 0.02)
    filters, complex_bias = nn.Parameter(torch.zeros(4, 3, 2, 2)), nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(UsageError, match="dense real parameters"):
        optimizer.add_param_group({"params": [filters, complex_bias]})
    with pytest.raises(TypeError, match="ordered"):
        optimizer.add_param_group({"params": {filters}})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1]


def test_a_state_of_an_earlier_version_gets_the_options_that_came_later() -> None:
    weights = [nn.Parameter(torch.full((4, 3, 2, 2), 0.5)) for _ in range(2)]
    optimizer, other = (optim.Muon([weight], 0.02, ns_precision="fp32") for weight in weights)
    grad = torch.randn_like(weights[0])
    weights[0].grad = grad
    optimizer.step()
    weights[1].data.copy_(weights[0])
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        del group["ns_precision"]
    other.load_state_dict(state)
    assert other.param_groups[0]["ns_precision"] == "fp32"
    for weight in weights:
        weight.grad = grad
    optimizer.step()
    other.step()
    assert torch.equal(*weights)


def test_normalise_gives_filters_one_norm() -> None:
    weight = nn.Parameter(torch.randn(16, 4, 3, 3) * 7)
    weight.grad = torch.randn_like(weight)
    optim.Muon([weight], 0.0, normalise=True).step()
    assert weight.norm().item() == pytest.approx(4.0, rel=1e-6)


def test_normalise_lets_filters_of_zeros_step_from_there() -> None:
    weights = [nn.Parameter(torch.zeros(16, 4, 3, 3)), nn.Parameter(torch.randn(16, 4, 3, 3))]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    expected = -0.1 * orthogonalise([weights[0].grad * 1.95])[0]  # type: ignore[operator]
    optim.Muon(weights, 0.1, normalise=True).step()
    torch.testing.assert_close(weights[0], nn.Parameter(expected))
    assert weights[1].isfinite().all()
