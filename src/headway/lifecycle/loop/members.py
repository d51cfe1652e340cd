"""Members of a round: networks that differ in their seeds, each trained in a run folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from headway.core.errors import HeadwayError
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.setup.recipe import TrainRecipe
from headway.training.run_steps import separate_checkpoints
from headway.training.runs import find_finished_run, resume, train_recipe

PINNED_KEYS = ("device", "precision")
"""Keys whose `auto` may be measured. The first member decides for all, so that members differ in their seeds alone."""


@final
class LoopStoppedError(HeadwayError):
    """A signal has stopped the loop, which can be continued."""


def build_member(
    loaded: LoadedRecipe[TrainRecipe], member: int, name: str, values: Mapping[str, Any]
) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe of a member.

    Args:
        member: number of the member; the first is 1 and has the seed of the recipe.
        name: part of `checkpoint.folder` that belongs to this member, if the recipe names one.
        values: further values by key, which the loop sets.
    """
    given = {**values, "seed": loaded.recipe.seed + member - 1}
    own = loaded.resolve_all({key: (value, "headway loop") for key, value in given.items()})
    return separate_checkpoints(own, name, "each member has its own")


def train_member(loaded: LoadedRecipe[TrainRecipe], folder: Path) -> RunFolder:
    """Trains a member, or continues it where it was killed.

    Raises LoopStoppedError if a signal has stopped it; its state is saved.
    """
    if RunFolder(folder).recipe_path.is_file():
        result = find_finished_run(folder) or resume(folder)
    else:
        result = train_recipe(loaded, folder)
    if result.was_interrupted:
        raise LoopStoppedError("the loop was stopped, and the network that was trained is saved")
    return result.run


def read_pinned_values(run: RunFolder) -> dict[str, Any]:
    """Returns the values of PINNED_KEYS with which a member was trained."""
    tree = run.read_recipe_tree()
    return {key: tree[key] for key in PINNED_KEYS if key in tree}
