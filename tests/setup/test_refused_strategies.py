"""The strategies that a recipe refuses are listed for the menu of a plan."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headway.setup.recipe import TrainRecipe
from headway.setup.refused_strategies import STRATEGIES, list_refused_strategies

SGD = {"name": "sgd", "lr": 0.1}
RECIPE: dict[str, Any] = {
    "data": "synthetic", "model": {"factory": "small_net"}, "optimizer": SGD, "batch": 32, "epochs": 4,
}  # fmt: skip

CHANGES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"micro_batch": 8}, {"spatial", "hybrid", "towers"}),
    ({"comm": {"wire": "bf16"}}, {"sharded all", "async"}),
    ({"optimizer": {**SGD, "clip_norm": 1.0}}, {"towers"}),
    ({"optimizer": {**SGD, "lookahead": {}}}, {"local", "async"}),
    ({"optimizer": {"name": "muon", "lr": 0.1}}, {"hybrid", "towers", "experts", "sharded all", "async"}),
    (
        {"optimizer": {"name": "soap", "lr": 0.1}},
        {"hybrid", "towers", "experts", "sharded all", "async", "local"},
    ),
    ({"batch_growth": {"milestones_epochs": [2], "factor": 2}}, {"local", "async"}),
    ({"activation_checkpointing": True}, {"spatial", "towers"}),
    ({"model": {"factory": "small_net", "batch_norm": {"ghost": 8}}}, {"spatial"}),
    ({"batch": {"per_device": 8}}, {"async"}),
]


@pytest.mark.parametrize(("changes", "refused"), CHANGES)
def test_the_list_is_what_the_recipe_refuses(changes: dict[str, Any], refused: set[str]) -> None:
    tree = RECIPE | changes
    assert set(list_refused_strategies(TrainRecipe.model_validate(tree))) == refused
    for name, parallel in STRATEGIES.items():
        with_strategy = tree | {"parallel": parallel.model_dump()}
        if name in refused:
            with pytest.raises(ValidationError):
                TrainRecipe.model_validate(with_strategy)
        else:
            TrainRecipe.model_validate(with_strategy)
