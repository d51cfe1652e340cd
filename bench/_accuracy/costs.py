"""Counts the multiply-adds of a whole training, to know what a choice can save before it is timed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch

from bench._accuracy import airbench
from headway.data.resolution import compute_progressive_size
from headway.model import cifar_net, measure_model_size
from headway.setup.recipe import TrainRecipe

SAMPLES, SIDE, PATCH = 50_000, 32, 12


@cache
def passes(widths: tuple[int, ...], side: int, bias_trained: bool) -> float:
    """Counts the multiply-adds of one image of the network that both arms have, forward and backward.

    Backward costs twice as much as forward; but the whitening layer's filters have no gradient, and below the first
    trained layer none goes on to the input: with the bias frozen that is the first convolution of the first block.
    """
    with torch.device("meta"):
        found = measure_model_size(cifar_net(widths=widths), torch.empty(1, 3, side, side)).multiply_adds
    assert found is not None
    pixels = (side - 1) ** 2
    whitening, first = pixels * 2 * PATCH * PATCH, pixels * 2 * PATCH * widths[0] * 9
    return 3 * found - 2 * whitening - (0 if bias_trained else first)


def method_cost(method: airbench.Method, widths: Sequence[int], epochs: float) -> float:
    """Counts the multiply-adds of a port: whole batches only."""
    served = SAMPLES // method.batch * method.batch
    early = min(epochs, method.bias_epochs)
    shape = tuple(widths)
    return served * (early * passes(shape, SIDE, True) + (epochs - early) * passes(shape, SIDE, False))


def recipe_cost(recipe: TrainRecipe) -> float:
    """Counts the multiply-adds of a recipe with `cifar_net`, without the optimizer's own work: Muon's is 1 %."""
    widths = tuple(recipe.model.args.get("widths", airbench.WIDTHS))
    assert isinstance(recipe.epochs, float)
    frozen = min((one.after_epochs for one in recipe.model.freeze_after), default=recipe.epochs)
    total = 0.0
    for epoch in range(math.ceil(recipe.epochs)):
        side = SIDE
        if recipe.data.progressive is not None:  # a whole epoch has one size, that of its beginning
            side = compute_progressive_size(recipe.data.progressive, (SIDE, SIDE), epoch)[0]
        part = min(1.0, recipe.epochs - epoch)
        early = min(part, max(0.0, frozen - epoch))
        total += early * passes(widths, side, True) + (part - early) * passes(widths, side, False)
    return total * SAMPLES
