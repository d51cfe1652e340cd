"""Norms around one step of the optimizer, and nothing at any other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests._waits import counted
from torch import Tensor, nn

from headway.observe.layer_statistics import LayerStatistics
from headway.optim import LARS


def nothing(after: object, before: object, g: Tensor) -> Tensor:
    return torch.full_like(g, torch.nan)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3), nn.Linear(3, 3))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    model.zero_grad()
    (model(torch.randn(8, 1, 8, 8)).square().mean() * scale).backward()


def test_norms_are_those_around_the_step() -> None:
    model = network()
    model[4].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    watch = LayerStatistics(model.named_parameters(), optimizer, lambda after, before, g: g * 2)
    assert watch.names == ("0.weight", "3.weight")  # as for LARS: no bias, no batch norm, nothing frozen
    assert watch.sizes == (36, 432)
    for _ in range(3):
        backward(model)
        with counted() as waits:
            watch.arm()
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
            after = [p.detach().clone() for p in model.parameters()]
        assert not waits
        found = watch.read()
        assert found is not None
        values, gradient = found
        for row, place in zip(values, (0, 4), strict=True):
            grad = list(model.parameters())[place].grad
            assert grad is not None
            expected = [before[place].norm(), grad.norm(), (after[place] - before[place]).norm(), 2 * grad.norm()]
            assert row == pytest.approx([float(one) for one in expected], rel=1e-5)
        every = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradient == pytest.approx(float(every.norm()), rel=1e-5)
        assert watch.read() is None, "it is read once"


def test_it_is_off_but_for_one_step() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = LayerStatistics(model.named_parameters(), optimizer, nothing)
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    for disarmed in (False, True):
        backward(model)
        watch.arm()
        watch.arm()
        assert [len(one) for one in hooks] == [1, 1]
        if disarmed:
            watch.disarm()
        optimizer.step()
        assert [len(one) for one in hooks] == [0, 0]
        assert (watch.read() is None) == disarmed
    optimizer.step()
    assert watch.read() is None


def test_loss_scaling_is_taken_off() -> None:
    model = network()
    optimizer = LARS(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    watch = LayerStatistics(model.named_parameters(), optimizer, nothing)
    torch.manual_seed(1)
    backward(model, scale=1024.0)
    plain = [float(p.grad.norm()) / 1024 for p in model.parameters() if p.grad is not None and p.ndim > 1]
    scaler.scale(torch.zeros(()))  # makes its tensors
    watch.arm()
    scaler.step(optimizer)
    found = watch.read()
    assert found is not None
    assert found[0][:, 1] == pytest.approx(plain, rel=1e-5)


def test_a_layer_without_a_gradient_has_none() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch = LayerStatistics(model.named_parameters(), optimizer, nothing)
    backward(model)
    model[3].weight.grad = None
    watch.arm()
    optimizer.step()
    found = watch.read()
    assert found is not None
    assert np.isfinite(found[0][:, :3]).all()
    assert found[0][1, 1:3].tolist() == [0, 0]
    vectors = nn.BatchNorm1d(3)
    watch = LayerStatistics(vectors.named_parameters(), torch.optim.SGD(vectors.parameters(), 0.1), nothing)
    watch.arm()
    assert watch.names == ()
    assert watch.read() is None
