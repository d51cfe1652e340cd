"""Lists the strategies of `parallel` that a recipe refuses, for the menu of a plan."""

from __future__ import annotations

from collections.abc import Mapping

from headway.parallel.parallel_recipe import (
    AnyParallelRecipe,
    AsyncRecipe,
    ExpertsRecipe,
    HybridRecipe,
    LocalRecipe,
    ShardedRecipe,
    SpatialRecipe,
    TowersRecipe,
)
from headway.setup.parallel_checks import check_parallel
from headway.setup.recipe import TrainRecipe

STRATEGIES: Mapping[str, AnyParallelRecipe] = {
    "spatial": SpatialRecipe(),
    "hybrid": HybridRecipe(),
    "towers": TowersRecipe(),
    "experts": ExpertsRecipe(),
    "sharded": ShardedRecipe(),
    "sharded all": ShardedRecipe(what="all"),
    "local": LocalRecipe(),
    "async": AsyncRecipe(),
}
"""The strategies by their names in a Workload. Data parallel training refuses nothing."""


def list_refused_strategies(recipe: TrainRecipe) -> tuple[str, ...]:
    """Returns the names of the strategies that do not work with the other keys of a recipe."""
    return tuple(name for name, parallel in STRATEGIES.items() if _is_refused(recipe, parallel))


def _is_refused(recipe: TrainRecipe, parallel: AnyParallelRecipe) -> bool:
    # A copy is not validated: only what the strategy itself refuses counts here.
    try:
        check_parallel(recipe.model_copy(update={"parallel": parallel}))
    except ValueError:
        return True
    return False
