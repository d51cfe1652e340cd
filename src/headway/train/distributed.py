"""Training by several processes of ours: a recipe, or a run that goes on, becomes the command of each worker."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from headway.core.errors import UsageError
from headway.core.launched import launched
from headway.core.recipe import load
from headway.core.run import GO_ON, Run
from headway.launch.hosts import hosts_of, shared
from headway.launch.launcher import launch
from headway.setup.recipe import TrainRecipe
from headway.train import runs


def train_on_ranks(
    recipe: Path | None,
    overrides: Sequence[str],
    folder: Path | None,
    resume: Path | None,
    *,
    procs: int | None,
    hosts: str | None,
    respawn: bool,
    options: Sequence[str],
) -> int:
    """Trains a recipe into a new run folder, or goes on with one, by several processes; returns the exit status.

    The recipe is read here first, so that what is wrong with it is said once; so is the name of the run folder chosen,
    which all processes have to know. The folder itself is made by rank 0.

    Args:
        recipe, overrides, folder: as for `runs.train`. resume: the run folder to go on with, instead of them.
        procs, hosts: as on the command line; see `hosts_of`.
        respawn: lost processes are replaced.
        options: of the command line, handed on to each process.

    Raises:
        UsageError: of the recipe, the hosts, or since a launcher has started this process. CommunicationError: see
            `launch`.
    """
    on = hosts_of(procs, hosts)
    if (above := launched()) is not None:
        fix = "Leave --procs and --hosts out: the launcher says how many processes there are."
        raise UsageError(f"this process was started by a launcher ({above.launcher}) and cannot be one", fix=fix)
    if resume is not None:
        tree = runs.reload_recipe(Run.open(resume)).recipe
        folder, verb = resume, ["--resume", str(resume)]
    elif recipe is not None:
        tree = load(recipe, overrides, TrainRecipe).recipe
        folder = folder or Run.free_name(Path("runs"), tree.name)
        Run.expect_free(folder)
        verb = [str(recipe), *overrides, "--run", str(folder)]
    else:
        raise UsageError("there is neither a recipe nor a run")
    shared(tree.batch, sum(host.procs for host in on))
    command = ["-m", "headway", "train", *options]
    again = ["--resume", str(folder)]

    def restarted() -> list[str]:
        return [*command, *(again if Run(folder).recipe_path.exists() else verb)]

    places = ["--hosts", hosts] if hosts is not None else ["--procs", str(procs)]
    go_on = shlex.join(["headway", "train", *again, *places])
    return launch(
        [*command, *verb],
        on,
        again=restarted,
        environ={GO_ON: go_on},
        how=f"Go on from the last checkpoint: {go_on}",
        timeout_s=tree.comm.timeout_s,
        respawn=respawn,
        on_loss=_resolve_on_loss(tree),
    )


def _resolve_on_loss(recipe: TrainRecipe) -> Literal["continue", "restart"]:
    """On GPUs ranks meet through NCCL, which survives no loss."""
    if recipe.comm.on_loss != "auto":
        return recipe.comm.on_loss
    on_gpu = recipe.device.startswith("cuda") or (recipe.device == "auto" and torch.cuda.is_available())
    return "restart" if on_gpu else "continue"
