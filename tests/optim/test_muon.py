"""Muon's iteration, and which parameters it takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from headway import optim
from headway.optim.muon import orthogonalise


@given(st.integers(1, 24), st.integers(1, 24), st.integers(0, 1000))
def test_singular_vectors_stay_and_singular_values_come_near_1(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    (found,) = orthogonalise([matrix], ns_steps=6)
    left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
    inner = left.mT @ (found / max(1, rows / columns) ** 0.5) @ right.mT
    values = inner.diagonal()
    torch.testing.assert_close(inner, torch.diag(values), rtol=0, atol=1e-9)
    large = sizes > 0.01 * sizes.square().sum().sqrt()
    assert values[large].min() > 0.6
    assert values[large].max() < 1.25


def test_filters_are_flattened_and_go_together_by_shape() -> None:
    filters = [torch.randn(6, 2, 3, 3), torch.randn(6, 18), torch.randn(40, 2, 2, 2), torch.randn(6, 2, 3, 3)]
    found = orthogonalise(filters)
    for given_, one in zip(filters, found, strict=True):
        (alone,) = orthogonalise([given_.flatten(1)])
        torch.testing.assert_close(one.flatten(1), alone, rtol=1e-4, atol=1e-5)
        assert one.shape == given_.shape


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
