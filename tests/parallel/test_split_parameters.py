"""Clipping and layer-wise rates of parameters of which each rank has a part are those of the whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from torch import Tensor, nn

from headway.optim import LAMB, LARS, LBSGD
from headway.optim.fused_optimizer import FusedOptimizer
from headway.optim.split_parameters import clip_gradients_
from headway.parallel.divided_linear import divide_linear_layers

STEPS = 4
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9),
    "lars": lambda own: LARS(own, lr=0.5, trust=0.1, weight_decay=0.01),
    "larc": lambda own: LARS(own, lr=0.5, trust=0.02, clip=True, lr_in_momentum=False, nesterov=True),
    "lamb": lambda own: LAMB(own, lr=0.05, weight_decay=0.01),
    "lbsgd": lambda own: LBSGD(own, lr=0.01, steps_per_epoch=2, warmup="lars", batch_scale=2, weight_decay=0.01),
}
# Norms of gradients are about 11 here.
CLIPS = (None, 3.0, 1000.0)


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    out = nn.Sequential(nn.Linear(11, 9), nn.Linear(9, 8, bias=False), nn.Linear(8, 5)).double()
    for parameter in out.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return out


def train(
    name: str, clip_norm: float | None, rank: Rank | None, patterns: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the weights after some steps with given gradients, and what of them each rank has as a whole."""
    own, generator = network(), torch.Generator().manual_seed(5)
    shapes = {key: parameter.shape for key, parameter in own.named_parameters()}
    optimizer = OPTIMIZERS[name](own.parameters())
    split, parts = None, {}
    if rank is not None:
        divided = divide_linear_layers(own, patterns, rank.world.rank, rank.world.size, "all")
        divided.connect(rank.world)
        split, parts = divided.split, divided.parts.by_name
        if isinstance(optimizer, FusedOptimizer):
            optimizer.split = split
    for _ in range(STEPS):
        for key, parameter in own.named_parameters():
            gradient = torch.randn(shapes[key], generator=generator, dtype=torch.float64)
            parameter.grad = gradient[slice(*parts[key].rows)].clone() if key in parts else gradient
        if clip_norm is not None:
            clip_gradients_(list(own.parameters()), clip_norm, split)
        optimizer.step()
    weights = {key: value.detach() for key, value in own.named_parameters()}
    whole = {key: value for key, value in weights.items() if key not in parts}
    if rank is not None:
        with divided.join():
            weights |= divided.list_whole()
    return weights, whole


def train_all(rank: Rank, patterns: tuple[str, ...]) -> dict[tuple[str, float | None], tuple[dict[str, Tensor], ...]]:
    return {(name, clip): train(name, clip, rank, patterns) for name in OPTIMIZERS for clip in CLIPS}


@pytest.mark.parametrize(("ranks", "patterns"), [(2, ("^0$", "^1$")), pytest.param(3, (".",), marks=pytest.mark.check)])
def test_steps_of_parts_are_those_of_the_whole(ranks: int, patterns: tuple[str, ...]) -> None:
    found = run_ranks(ranks, train_all, patterns)
    for name in OPTIMIZERS:
        for clip in CLIPS:
            expected, _ = train(name, clip, None, patterns)
            for weights, _ in (one[name, clip] for one in found):
                assert weights.keys() == expected.keys()
                for key, value in weights.items():
                    assert float((value - expected[key]).abs().max()) <= 1e-12, (name, clip, key)
            # What all ranks have, none of them has otherwise.
            first, *others = (one[name, clip][1] for one in found)
            assert all(torch.equal(value, other[key]) for other in others for key, value in first.items())


def test_a_norm_without_parts_is_torchs() -> None:
    ours, theirs = network(), network()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        one.grad, other.grad = 3 * one.detach(), 3 * other.detach()
    clip_gradients_(list(ours.parameters()), 0.5)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(ours.parameters(), theirs.parameters(), strict=True)
    )  # type: ignore[arg-type]
