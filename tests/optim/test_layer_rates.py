"""The local learning rate is what the step was made with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests._waits import counted
from torch import Tensor

from headway.optim import FTML, LAMB, LARS, LBSGD, Muon, NovoGrad
from headway.optim.layer_rates import has_layer_rates, measure_layer_rates

SHAPES = ((3, 4), (5, 2, 3, 3), (4,))
WAYS = pytest.mark.parametrize("fused", [True, False], ids=["native", "torch"])
DECAY = 0.01


def stepped(
    make: Callable[[list[Tensor]], Any], steps: int = 1, *, fused: bool = True
) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor]:
    """(before, gradients, steps, local rates) of the last of some steps, in float64."""
    random = torch.Generator().manual_seed(0)
    weights = [torch.randn(shape, generator=random, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    optimizer = make(weights)
    for group in optimizer.param_groups:
        group["fused"] = fused
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=random, dtype=torch.float64)
        before, grads = ([one.detach().clone() for one in some] for some in (weights, [w.grad for w in weights]))
        optimizer.step()
    moved = [weight.detach() - one for weight, one in zip(weights, before, strict=True)]
    rates = measure_layer_rates(optimizer, weights, before, torch.stack([grad.norm() for grad in grads]))
    assert rates.dtype == torch.float64
    return before, grads, moved, rates


@WAYS
@pytest.mark.parametrize(
    "make",
    [
        lambda params: LARS(params, 0.3, momentum=0, weight_decay=DECAY, trust=0.02, eps=1e-3),
        lambda params: LARS(
            params, torch.tensor(0.3), momentum=0, weight_decay=DECAY, trust=0.02, lr_in_momentum=False
        ),
        lambda params: LARS(params, 0.003, momentum=0, weight_decay=DECAY, trust=0.02, clip=True),
        lambda params: LARS(params, 9.0, momentum=0, weight_decay=DECAY, trust=0.02, clip=True),
        lambda params: LBSGD(params, 0.3, momentum=0, weight_decay=DECAY, warmup="lars", steps_per_epoch=10),
    ],
)
def test_the_step_is_the_rate_times_the_decayed_gradient(make: Callable[[list[Tensor]], Any], fused: bool) -> None:
    before, grads, moved, rates = stepped(make, fused=fused)
    for weight, grad, step, rate in zip(before, grads, moved, rates, strict=True):
        torch.testing.assert_close(step, -rate * (grad + DECAY * weight), rtol=1e-9, atol=0)


@WAYS
def test_that_of_novograd_is_on_the_gradient(fused: bool) -> None:
    _, grads, moved, rates = stepped(lambda params: NovoGrad(params, 0.3, betas=(0.0, 0.9)), steps=4, fused=fused)
    for grad, step, rate in zip(grads, moved, rates, strict=True):
        torch.testing.assert_close(step, -rate * grad, rtol=1e-9, atol=0)


@WAYS
def test_that_of_lamb_is_on_the_update_of_adam(fused: bool) -> None:
    def lamb(layerwise: bool) -> Callable[[list[Tensor]], Any]:
        return lambda params: LAMB(params, 1e-9, weight_decay=DECAY, layerwise=layerwise)

    _, _, moved, rates = stepped(lamb(True), steps=3, fused=fused)
    _, _, plain, ones = stepped(lamb(False), steps=3, fused=fused)  # lr so small that the weights are the same to 1e-9
    assert ones.isnan().all()
    for step, update, rate in zip(moved, plain, rates, strict=True):
        torch.testing.assert_close(step.norm(), rate * update.norm() / 1e-9, rtol=1e-5, atol=0)


def test_optimizers_that_take_all_layers_alike_have_none() -> None:
    weights = [torch.ones(2, 2, requires_grad=True)]
    for optimizer in (
        torch.optim.SGD(weights, 0.1),
        FTML(weights, 0.1),
        Muon(weights, 0.1),
        LARS(weights, 0.1, trust=None),
    ):
        assert not has_layer_rates(optimizer)
        assert measure_layer_rates(optimizer, weights, weights, torch.ones(1).double()).isnan().all()
    assert not has_layer_rates(LBSGD(weights, 0.1, steps_per_epoch=10))
    assert has_layer_rates(LBSGD(weights, 0.1, steps_per_epoch=10, warmup="lars"))


def test_a_macro_batch_of_several_steps_has_none() -> None:
    """Most of its steps move nothing, and the one that does goes by the mean of all their gradients."""
    for steps in (1, 2):
        *_, rates = stepped(lambda params: LBSGD(params, 0.3, warmup="lars", batch_scale=2, steps_per_epoch=10), steps)
        assert rates.isnan().all()


@pytest.mark.parametrize("optimizer", [LARS, LAMB, NovoGrad])
def test_a_layer_without_a_norm_has_none_and_nothing_waits(optimizer: Any) -> None:
    weights = [torch.zeros(2, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True), torch.ones(2, 2)]
    made = optimizer(weights[:2], 0.1)
    weights[1].grad = torch.ones(2, 2)
    before = [weight.detach().clone() for weight in weights[:2]]
    made.step()
    with counted() as waits:
        rates = measure_layer_rates(made, weights[:2], before, torch.tensor([0.0, 2.0]).double())
    assert not waits
    assert math.isnan(rates[0])
    assert rates[1] > 0
