"""Forks: a new run that goes on from a checkpoint of another run, with other values of its recipe."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.checkpoint.locations import parse_step
from headway.core.errors import CheckpointError, RecipeError
from headway.core.files import sync_folder, write_atomically
from headway.core.recipe_override import override_values
from headway.core.run_folder import RunFolder
from headway.training.run_steps import open_checkpoints
from headway.training.runs import reload_recipe

FORKABLE = ("optimizer", "augment", "task")
"""Parts of a recipe that a fork may change. Others decide which samples a step takes, or what a checkpoint holds."""


def check_forkable(keys: Mapping[str, Any]) -> None:
    """Checks that a fork may change these keys. Raises RecipeError if it may not."""
    for key in keys:
        if key.partition(".")[0] not in FORKABLE or key in ("optimizer.name", "optimizer", "task.factory"):
            what = f"a fork continues from a checkpoint, and {key} cannot change there"
            fix = "Vary keys of optimizer, augment or task.args alone, or use another method."
            raise RecipeError(what, where=key, fix=fix)


def fork_run(parent: Path, step: int, folder: Path, values: Mapping[str, Any], origin: str) -> RunFolder:
    """Makes a run that resumes from a checkpoint of another run with other values; the parent stays as it is.

    Args:
        parent: folder of the other run.
        step: step of the checkpoint.
        folder: folder of the new run; what a crash has left of an earlier try is replaced.
        values: values by dotted key.
        origin: origin of these values.

    Raises:
        RecipeError: these values cannot change, or the recipe refuses them.
        CheckpointError: the parent has no checkpoint of this step.
    """
    check_forkable(values)
    run = RunFolder.open(parent)
    loaded = reload_recipe(run)
    found = [path for path in open_checkpoints(run, loaded).paths() if parse_step(path.name) == step]
    if not found or not isinstance(found[0], Path):
        raise CheckpointError(f"there is no checkpoint of step {step} on this disk", where=str(run.folder))
    changed = override_values(loaded, values, origin)
    # Aside first: a folder is a run once it has a recipe, and a run needs its checkpoint.
    aside = folder.with_name(f".{folder.name}.fork")
    shutil.rmtree(aside, ignore_errors=True)
    made = RunFolder.create(aside)
    shutil.copytree(found[0], made.checkpoints / found[0].name)
    write_atomically(made.checkpoints / "latest", f"{found[0].name}\n")
    if run.weights_path.exists():
        shutil.copyfile(run.weights_path, made.weights_path)
    origins, forked = dict(changed.origins), {"run": str(parent.resolve()), "step": step}
    made.write_json("provenance", run.read_provenance() | {"origins": origins, "forked": forked})
    write_atomically(made.recipe_path, changed.to_yaml())
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    sync_folder(folder.parent)
    return RunFolder.open(folder)
