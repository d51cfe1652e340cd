"""Passes that are no part of the training leave a network, and all generators, as they were."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headway.core.modules import preserve_training_state
from headway.model.layer_profile import profile_layers
from headway.setup.trial import build_trial_pass


class Careless(nn.Module):
    """Draws from all generators; counts in integers and averages in floats."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        self.mean += images.mean()
        drawn = random.random() + np.random.rand() + torch.rand(())
        out: Tensor = self.linear(images) * drawn
        return out


def within(model: nn.Module, images: Tensor) -> None:
    with pytest.raises(AttributeError), preserve_training_state(model):
        model(images).sum().backward().fails()


PASSES: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "a failure": within,
    "layers": lambda model, images: profile_layers(model, images, nullcontext),
    "a trial": lambda model, images: build_trial_pass(model, images, nullcontext)(3),
}


def drawn() -> tuple[float, float, float]:
    return random.random(), float(np.random.normal()), float(torch.rand(()))


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES.keys())
def test_a_pass_leaves_no_trace(passes: Callable[[nn.Module, Tensor], object]) -> None:
    model, images = Careless(), torch.ones(3, 1, 1, 4)
    kept = torch.ones(2, 4)
    model.linear.weight.grad = kept
    found = []
    for run in (True, False):
        random.seed(1)
        np.random.seed(2)
        np.random.normal()  # a second number is kept for the next call
        torch.manual_seed(3)
        if run:
            passes(model, images)
        found.append(drawn())
    assert found[0] == found[1]
    assert not any(value.any() for value in model.buffers())
    assert model.linear.weight.grad is kept
    assert (kept == 1).all()
    assert model.linear.bias.grad is None
