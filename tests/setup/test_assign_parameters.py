"""Ranks that repeat each other's matrix products are told of owners."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from headway.model.model_size import ModelSize
from headway.optim import build_optimizer
from headway.setup.assign_parameters import advise_owners
from headway.setup.recipe import TrainRecipe

MUON = {"name": "muon", "lr": 0.02}
# The 4 rounds of its filter [8, 72] make 8 x 8 x 72 for X X^T, 13 x 8^3 for the polynomials and as much as at first for
# the result: 15,872. A forward pass of so many and a backward pass of twice as many for each of two images of a rank.
PRODUCTS = 15_872
IMAGE = PRODUCTS // 6


def advise(changes: dict[str, Any], ranks: int = 2, multiply_adds: int | None = IMAGE) -> str:
    tree = {"data": "synthetic", "model": {"factory": "small_net"}, "optimizer": MUON, "batch": 4, "epochs": 1}
    recipe = TrainRecipe.model_validate(tree | changes)
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 4))
    optimizer = build_optimizer(recipe.optimizer, model)
    return advise_owners(recipe, model, optimizer, ModelSize(0, multiply_adds), ranks)


def test_the_share_of_the_products_is_said() -> None:
    assert advise({}) == (
        "Each of the 2 processes makes all matrix products of muon: 50% of the multiply-adds of its step. With"
        " parallel=sharded they share them."
    )


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, {"ranks": 1}),
        ({}, {"multiply_adds": None}),
        ({}, {"multiply_adds": 20 * IMAGE}),
        ({"optimizer": {"name": "lars", "lr": 1.0}}, {}),
        ({"parallel": "sharded"}, {}),
        ({"comm": {"algorithm": "ring"}}, {}),
    ],
)
def test_where_nothing_is_won_nothing_is_said(changes: dict[str, Any], options: dict[str, Any]) -> None:
    assert advise(changes, **options) == ""
