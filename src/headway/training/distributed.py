"""Training by several processes that Headway launches: builds the command of each worker."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from headway.core.errors import UsageError
from headway.core.launcher_environment import read_launcher_environment
from headway.core.recipe import read_recipe
from headway.core.run_folder import RESUME_COMMAND, RunFolder
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
from headway.parallel.parallel_recipe import AsyncRecipe, DataParallelRecipe, LocalRecipe
from headway.setup.checks import check_batch_size, check_places
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.training import runs


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
    """Trains a recipe into a new run folder, or resumes one, with several processes; returns the exit status.

    Args:
        recipe, overrides, folder: as for `runs.train`. resume: the run folder to resume instead.
        procs, hosts: as on the command line; see `parse_hosts`.
        respawn: replace lost processes.
        options: options of the command line that each process gets too.

    Raises:
        UsageError: recipe or hosts are wrong, or a launcher started this process. CommunicationError: see `launch`.
    """
    on = parse_hosts(procs, hosts)
    num_ranks = sum(host.procs for host in on)
    if (above := read_launcher_environment()) is not None:
        fix = "Leave --procs and --hosts out: the launcher says how many processes there are."
        raise UsageError(f"this process was started by a launcher ({above.launcher}) and cannot be one", fix=fix)
    # The recipe is read here first, so that a mistake in it is reported once and not by every process. The name of the
    # run folder is chosen here too, as all processes must know it; rank 0 creates the folder.
    if resume is not None:
        tree = runs.reload_recipe(RunFolder.open_resumable(resume)).recipe
        folder, verb = resume, ["--resume", str(resume)]
    elif recipe is not None:
        tree = resolve_batch(read_recipe(recipe, overrides, TrainRecipe), num_ranks).recipe
        folder = folder or RunFolder.find_free_name(Path("runs"), tree.name)
        RunFolder.expect_free(folder)
        verb = [str(recipe), *overrides, "--run", str(folder)]
    else:
        raise UsageError("there is neither a recipe nor a run")
    check_batch_size(tree, num_ranks)
    check_places(tree.parallel, num_ranks)
    command = ["-m", "headway", "train", *options]
    again = ["--resume", str(folder)]

    def build_restart_command() -> list[str]:
        # Processes may be lost before rank 0 has created the run folder.
        return [*command, *(again if RunFolder(folder).recipe_path.exists() else verb)]

    ranks = ["--hosts", hosts] if hosts is not None else ["--procs", str(procs)]
    go_on = shlex.join(["headway", "train", *again, *ranks])
    return launch(
        [*command, *verb],
        on,
        restart_command=build_restart_command,
        environ={RESUME_COMMAND: go_on},
        resume_hint=f"Go on from the last checkpoint: {go_on}",
        timeout_s=tree.comm.timeout_s,
        respawn=respawn,
        on_rank_failure=_resolve_on_rank_failure(tree),
    )


def _resolve_on_rank_failure(recipe: TrainRecipe) -> Literal["continue", "restart"]:
    """Resolves `comm.on_rank_failure: auto`."""
    if recipe.comm.on_rank_failure != "auto":
        return recipe.comm.on_rank_failure
    # A worker that is lost holds nothing that the others need.
    if isinstance(recipe.parallel, AsyncRecipe):
        return "continue"
    # A lost process takes its part of each image, or of the network, with it.
    if not isinstance(recipe.parallel, DataParallelRecipe | LocalRecipe):
        return "restart"
    # On GPUs the ranks communicate through NCCL, which cannot continue after a loss.
    on_gpu = recipe.device.startswith("cuda") or (recipe.device == "auto" and torch.cuda.is_available())
    return "restart" if on_gpu else "continue"
