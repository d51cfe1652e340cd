"""The mixture of experts: each token's output is the weighted sum of its experts', and gates follow the papers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headway import model
from headway.core.errors import UsageError
from headway.model.activation_checkpointing import checkpoint_activations
from headway.model.auxiliary import AuxiliaryLosses
from headway.model.gates import NOISE_EPSILON, NoisyTopKGate, SwitchGate
from headway.model.mixture import Experts, MixtureOfExperts

WIDTH, EXPERTS = 6, 5


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def build(gate: str, capacity_factor: float | None = None, k: int = 2) -> MixtureOfExperts:
    made: Any = NoisyTopKGate(WIDTH, EXPERTS, k=k) if gate == "noisy" else SwitchGate(WIDTH, EXPERTS)
    layer = MixtureOfExperts(WIDTH, 7, experts=EXPERTS, gate=made, capacity_factor=capacity_factor).double()
    for number, parameter in enumerate(layer.parameters()):
        with torch.no_grad():
            parameter.copy_(draw(*parameter.shape, seed=number))
    return layer


@pytest.mark.parametrize("gate", ["noisy", "switch"])
def test_an_output_is_the_weighted_sum_of_its_experts(gate: str) -> None:
    layer, x = build(gate).eval(), draw(2, 9, WIDTH, seed=9)
    routing = layer.gate(x.view(-1, WIDTH))
    expected = torch.zeros(18, WIDTH, dtype=torch.float64)
    for token, (numbers, weights) in enumerate(zip(routing.experts, routing.weights, strict=True)):
        for number, weight in zip(numbers, weights, strict=True):
            up, down = layer.experts.up[number], layer.experts.down[number]
            expected[token] += weight * (F.relu(x.view(-1, WIDTH)[token] @ up) @ down)
    torch.testing.assert_close(layer(x).view(18, WIDTH), expected, rtol=0, atol=1e-12)
    assert layer.pop_auxiliary_loss() is None


@pytest.mark.parametrize("gate", ["noisy", "switch"])
def test_gradients_are_right(gate: str) -> None:
    layer, x = build(gate), draw(6, WIDTH, seed=9).requires_grad_()
    torch.manual_seed(0)
    noise = torch.randn(6, EXPERTS, dtype=torch.float64)
    if gate == "noisy":
        layer.gate.forward = lambda tokens: NoisyTopKGate.forward(layer.gate, tokens, noise)  # type: ignore

    def run(x: Tensor, *_: Tensor) -> Tensor:
        out, loss = layer(x), layer.pop_auxiliary_loss()
        assert loss is not None
        return torch.cat([out.flatten(), loss.view(1)])

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()))


def test_the_noisy_gate_is_that_of_the_paper() -> None:
    """Load: the chance that an expert is chosen if its noise alone is drawn anew, counted in many draws."""
    gate, x = NoisyTopKGate(WIDTH, EXPERTS, k=2, importance_weight=0.3, load_weight=0.7).double(), draw(1, WIDTH)
    with torch.no_grad():
        gate.weight.copy_(draw(WIDTH, EXPERTS, seed=1))
        gate.noise_weight.copy_(draw(WIDTH, EXPERTS, seed=2))
    noise = draw(1, EXPERTS, seed=3)
    with torch.no_grad():
        routing = gate(x, noise)
    clean, scale = x @ gate.weight, F.softplus(x @ gate.noise_weight) + NOISE_EPSILON
    chosen = (clean + noise * scale)[0].topk(2)
    assert routing.experts[0].tolist() == chosen.indices.tolist()
    torch.testing.assert_close(routing.weights[0], chosen.values.softmax(0))
    drawn = draw(20_000, EXPERTS, seed=4)
    for expert in range(EXPERTS):
        again = noise.repeat(len(drawn), 1)
        again[:, expert] = drawn[:, expert]
        found = (gate(x.repeat(len(drawn), 1), again).experts == expert).any(1).double().mean()
        assert float(routing.sums[1, expert]) == pytest.approx(float(found), abs=0.015)
    importance = torch.zeros(EXPERTS, dtype=torch.float64).scatter(0, chosen.indices, chosen.values.softmax(0))
    torch.testing.assert_close(routing.sums[0], importance)
    sums = torch.tensor([[1.0, 3.0], [2.0, 2.0]], dtype=torch.float64)
    # Mean 2, variance 1: CV^2 is 1/4; the load is even.
    assert float(gate.compute_balance(sums)) == pytest.approx(0.3 / 4)


def test_switchs_loss_is_one_if_the_load_is_even_and_experts_if_one_has_all() -> None:
    gate = SwitchGate(WIDTH, 4, balance_weight=1.0)
    even = torch.full((4,), 5.0)
    alone = torch.tensor([20.0, 0.0, 0.0, 0.0])
    assert float(gate.compute_balance(torch.stack([even, even]))) == pytest.approx(1)
    assert float(gate.compute_balance(torch.stack([alone, alone]))) == pytest.approx(4)


def test_a_full_expert_drops_the_last_tokens_and_counts_them() -> None:
    layer, x = build("switch", capacity_factor=1.0), draw(20, WIDTH, seed=9)
    whole = build("switch")
    out, expected = layer(x), whole(x)
    chosen = layer.gate(x).experts[:, 0].tolist()
    seen = dict.fromkeys(range(EXPERTS), 0)
    for token, expert in enumerate(chosen):
        seen[expert] += 1
        # 20 tokens for 5 experts: room for 4.
        torch.testing.assert_close(out[token], expected[token] * (seen[expert] <= 4))
    dropped = sum(max(0, count - 4) for count in seen.values())
    assert layer.load is not None
    assert dropped > 0
    assert layer.load.summarise()["dropped"] == pytest.approx(dropped / 20)
    assert layer.load.rows.tolist() == list(seen.values())
    mean = 20 / EXPERTS
    cv = math.sqrt(sum((count - mean) ** 2 for count in seen.values()) / EXPERTS) / mean
    assert layer.load.summarise()["load_cv"] == pytest.approx(cv)


def test_the_grouped_product_of_gpus_is_the_loop_of_cpus() -> None:
    experts, counts = Experts(3, 8, 12), torch.tensor([4, 0, 7])
    rows = draw(11, 8).float().requires_grad_()
    grads = []
    for run in (experts.forward, experts.run_grouped):
        out = run(rows, counts)
        (out * draw(11, 8, seed=1).float()).sum().backward()
        grads.append([out.detach(), rows.grad, experts.up.grad, experts.down.grad])
        rows.grad = experts.up.grad = experts.down.grad = None
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_autocast_keeps_the_gate_wide() -> None:
    layer = build("noisy").float()
    x = draw(9, WIDTH).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x.bfloat16())
    assert out.dtype == torch.bfloat16
    assert layer.gate(x.bfloat16()).weights.dtype == torch.float32
    torch.testing.assert_close(out.float(), build("noisy").float().eval()(x), rtol=1, atol=5)


def test_recomputed_activations_have_the_same_gradients() -> None:
    """With the loss of the layer, and its noise."""
    x = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = []
    for recompute in (False, True):
        torch.manual_seed(0)
        network = model.cifar_moe(width=16, hidden=8)
        if recompute:
            assert len(checkpoint_activations(network)) == 2
        auxiliary = AuxiliaryLosses(network)
        loss = network(x).sum()
        added = auxiliary.pop()
        assert added is not None
        (loss + added).backward()
        found.append({name: value.grad for name, value in network.named_parameters()})
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=0, atol=0)


def test_cifar_moe_computes_as_much_as_its_dense_twin() -> None:
    x = torch.zeros(1, 3, 32, 32)
    for gate, k in (("noisy", 2), ("switch", 1)):
        sparse = model.measure_model_size(model.cifar_moe(gate=gate), x)
        dense = model.measure_model_size(model.cifar_moe(gate=gate, experts=0), x)
        assert sparse.multiply_adds is not None
        assert dense.multiply_adds is not None
        # Two blocks of 4 x 4 positions, 64 channels and 8 experts; the noisy gate has two matrices.
        assert sparse.multiply_adds - dense.multiply_adds == 2 * 16 * 64 * 8 * k
        assert sparse.parameters > dense.parameters
    assert model.cifar_moe(5)(x).shape == (1, 5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoisyTopKGate(4, 8, k=1), "k=1 of 8 experts"),
        (lambda: NoisyTopKGate(4, 2, k=2), "k=2 of 2 experts"),
        (lambda: SwitchGate(4, 1), "1 expert to choose from"),
        (lambda: build("switch", capacity_factor=0.0), "capacity_factor=0.0"),
        (lambda: model.cifar_moe(gate="soft"), "gate='soft'"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make()
