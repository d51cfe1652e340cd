"""Experts that processes share compute what one process computes, bit for bit, and send what the formula says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor

from headway.comm.reducer import StepReduction
from headway.model.gates import NoisyTopKGate, SwitchGate
from headway.model.mixture import MixtureOfExperts
from headway.parallel.experts import SharedExperts, connect_mixtures, count_exchange_bytes, list_expert_weights

EXPERTS, WIDTH, TOKENS = 8, 12, 52


def build_layer(gate: str, capacity_factor: float | None = None) -> MixtureOfExperts:
    torch.manual_seed(3)
    made: Any = NoisyTopKGate(WIDTH, EXPERTS, k=3) if gate == "noisy" else SwitchGate(WIDTH, EXPERTS)
    layer = MixtureOfExperts(WIDTH, 20, experts=EXPERTS, gate=made, capacity_factor=capacity_factor).double()
    for parameter in made.parameters():
        # Not the zeros, or near zeros, that a gate begins with. Nobody's first choice is the last expert.
        torch.nn.init.normal_(parameter)
        with torch.no_grad():
            parameter[:, -1] = 0
    return layer


def run_layer(layer: MixtureOfExperts, rows: slice) -> dict[str, Tensor]:
    """Outputs, gradients and balance loss of some of the tokens; the loss is a sum over tokens."""
    draw = torch.Generator().manual_seed(5)
    x, chosen = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=draw)
    noise = torch.randn(TOKENS, EXPERTS, dtype=torch.float64, generator=draw)
    gate, own = layer.gate, x[rows].clone().requires_grad_()
    if isinstance(gate, NoisyTopKGate):
        # Noise of each token, whichever rank has it.
        gate.forward = lambda tokens: NoisyTopKGate.forward(gate, tokens, noise[rows])  # type: ignore[method-assign]
    out = layer(own)
    auxiliary = layer.pop_auxiliary_loss()
    assert auxiliary is not None
    ((out * chosen[rows]).sum() + auxiliary).backward()
    assert own.grad is not None
    found = {"out": out.detach(), "x": own.grad, "balance": auxiliary.detach()}
    return found | {name: value.grad for name, value in layer.named_parameters() if value.grad is not None}


def run_share(rank: Rank, gate: str, ranks: int) -> dict[str, Tensor]:
    layer = build_layer(gate)
    shared = SharedExperts(layer, rank.rank, rank.size, ranks) if ranks > 1 else None
    if shared is None:
        connect_mixtures(layer, rank.world)
    else:
        shared.connect(rank.world)
    cuts = [0, 10, 26, 39, TOKENS] if rank.size == 4 else [0, 22, TOKENS]
    found = run_layer(layer, slice(*cuts[rank.rank : rank.rank + 2]))
    if shared is not None:
        shared.complete_step(StepReduction(torch.zeros(16)))
    for name, parameter in list_expert_weights(layer).items():
        found[name] = parameter.grad if parameter.grad is not None else torch.empty(0)
    return found


@pytest.mark.parametrize("gate", ["noisy", "switch"])
@pytest.mark.parametrize(("size", "ranks"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_outputs_and_expert_gradients_are_those_of_one_process(gate: str, size: int, ranks: int) -> None:
    """Bit for bit in one place; with two, the gradients of an expert are sums of two. Gates are sums over ranks."""
    whole = run_layer(build_layer(gate), slice(None))
    # An expert without a row is there too.
    assert bool(whole["experts.up"][-1].any()) == (gate == "noisy")
    found = run_ranks(size, run_share, gate, ranks)
    out = torch.cat([one["out"] for one in found])
    if size == ranks:
        assert torch.equal(out, whole["out"])
    torch.testing.assert_close(out, whole["out"], rtol=0, atol=2e-14)
    torch.testing.assert_close(torch.cat([one["x"] for one in found]), whole["x"], rtol=0, atol=2e-14)
    for name in ("experts.up", "experts.down"):
        if ranks == 1:
            # Plain data parallel: the reducer sums them.
            total = torch.stack([one[name] for one in found]).sum(0)
            torch.testing.assert_close(total, whole[name], rtol=0, atol=2e-14)
        for first in range(0, size, ranks) if ranks > 1 else ():
            together = torch.cat([one[name] for one in found[first : first + ranks]])
            if size == ranks:
                assert torch.equal(together, whole[name])
            torch.testing.assert_close(together, whole[name], rtol=0, atol=2e-14)
    for name in (name for name in whole if name.startswith("gate.")):
        total = torch.stack([one[name] for one in found]).sum(0)
        torch.testing.assert_close(total, whole[name], rtol=0, atol=2e-14)
    for one in found:
        torch.testing.assert_close(one["balance"], whole["balance"], rtol=0, atol=2e-14)


def test_the_formula_of_bytes_counts_rows_that_move() -> None:
    counts = torch.tensor([[1, 2, 3, 4], [5, 0, 0, 7]])
    # Rank 0 sends 7 rows, and 5 outputs; 8 bytes for each of the two counts.
    assert count_exchange_bytes(counts, 3, 4) == [2 * 12 * 3 * 4 + 16] * 2
    assert count_exchange_bytes(counts, 3, 4, backward=False) == [12 * 3 * 4 + 16] * 2
