"""Replays an asynchronous run from its log of updates, and compares it with the run's checkpoints."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoint.checkpoints import Checkpoint, Checkpoints, read
from headway.checkpoint.locations import parse_step
from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder
from headway.core.sample_progress import SampleProgress
from headway.core.text_format import pluralise
from headway.parallel.parallel_recipe import AsyncRecipe
from headway.parallel.replay import replay
from headway.parallel.update_log import read_updates
from headway.setup.build import build_setup
from headway.setup.train_setup import TrainSetup
from headway.training.async_server import ServerState, divide_weights, load_network
from headway.training.async_training import compute_step
from headway.training.runs import reload_recipe
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.training")
PARTS = ("model/", "optimizer/", "ema/", "async/")
"""Prefixes of the tensors of a checkpoint that follow from the updates."""


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        updates, workers: number of updates in the log, and of workers that made them.
        equal_steps: steps at which the checkpoint is that of the replay, bit for bit.
        first_difference: the first tensor, and step, that is not; empty if there is none.
    """

    updates: int
    workers: int
    equal_steps: tuple[int, ...]
    first_difference: str

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes by name."""
        return asdict(self)

    def describe(self) -> str:
        """Describes the result in a sentence or two."""
        what = f"Replayed {self.updates:,} updates of {pluralise(self.workers, 'worker')} in one process"
        if self.first_difference:
            threads = "A run that went on with another number of threads differs from its replay in rounding."
            return f"{what}: {self.first_difference}. {threads}"
        steps = " and ".join(f"{step:,}" for step in self.equal_steps)
        return (
            f"{what}: weights, statistics and the optimizer's state are those of the run at step {steps}, bit for bit."
        )


def replay_run(folder: Path) -> ReplayResult:
    """Repeats the updates of an asynchronous run, and compares the result with each of its checkpoints.

    Raises:
        UsageError: the run was not asynchronous, or has no checkpoint.
        DataError: its log is damaged.
    """
    run = RunFolder.open(folder)
    loaded = reload_recipe(run)
    recipe = loaded.recipe
    if not isinstance(recipe.parallel, AsyncRecipe):
        fix = "Other runs repeat exactly from their recipe: train it again."
        raise UsageError("only runs of parallel.strategy async are replayed", where=str(folder), fix=fix)
    updates = read_updates(run.updates_path)
    found = Checkpoints.locate(run.folder, recipe.checkpoint.keep, recipe.checkpoint.folder, loaded.base)
    # Read one after another: each holds the whole state.
    paths = {step: path for path in found.paths() if (step := parse_step(path.name)) is not None}
    steps = sorted(step for step in paths if 0 < step <= len(updates))
    if not steps:
        raise UsageError("the run has no checkpoint to compare with", where=str(folder), fix="Let it train longer.")
    # The number of threads changes the order of sums on a CPU.
    threads = torch.get_num_threads()
    torch.set_num_threads(run.read_provenance(torch_threads=int)["torch_threads"])
    try:
        setup = build_setup(loaded)
        # The run folder is only read: what the trainer logs goes elsewhere.
        with (
            closing(setup.inputs),
            tempfile.TemporaryDirectory() as aside,
            closing(Trainer(setup, RunFolder.create(Path(aside) / "replay"), _Silence())) as trainer,
        ):
            equal, difference = _compare(trainer, updates[: steps[-1]], {step: paths[step] for step in steps})
    finally:
        torch.set_num_threads(threads)
    return ReplayResult(steps[-1], len({update.worker for update in updates}), tuple(equal), difference)


def _compare(trainer: Trainer, updates: Any, paths: dict[int, Any]) -> tuple[list[int], str]:
    setup = trainer.setup
    (names,) = divide_weights(setup, 1)
    state = ServerState(setup, trainer.averages, {}, names, leads=True, step=0)
    assert state.buffers is not None
    equal: list[int] = []
    differences: list[str] = []
    with SampleProgress("Replaying", "updates", LOG) as progress:

        def on_update(applied: int) -> None:
            state.count_update()
            progress(applied, len(updates))
            if applied in paths and not differences:
                difference = _find_difference(state.collect(), read(paths[applied]))
                if difference:
                    differences.append(difference)
                else:
                    equal.append(applied)

        replay(
            updates,
            state.shard,
            state.buffers,
            _build_compute(trainer, state, setup),
            lambda update: setup.lr_at(setup.plan.find_position(update)),
            on_update,
        )
    return equal, "".join(differences)


def _build_compute(
    trainer: Trainer, state: ServerState, setup: TrainSetup
) -> Callable[[int], tuple[list[Tensor | None], list[Tensor]]]:
    read_step = setup.inputs.build_step_reader(setup.recipe, setup.plan)
    own = dict(setup.model.named_parameters())

    def compute(step: int) -> tuple[list[Tensor | None], list[Tensor]]:
        load_network(setup.model, {name: value for name, value in state.collect().items() if name.startswith("model/")})
        trainer.step, trainer.position = step, setup.plan.find_position(step)
        compute_step(trainer, read_step(trainer.position))
        gradients = [None if (grad := own[name].grad) is None else grad.cpu().clone() for name in state.shard.names]
        setup.optimizer.zero_grad(set_to_none=True)
        return gradients, [buffer.cpu().clone() for buffer in setup.model.buffers()]

    return compute


def _find_difference(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> str:
    """Returns the first tensor that is not that of a checkpoint, or an empty text."""
    theirs = checkpoint.tensors
    for name in sorted(name for name in theirs if name.startswith(PARTS)):
        if name not in tensors or not torch.equal(tensors[name].cpu(), theirs[name]):
            return f"{name} differs from that in the checkpoint of step {checkpoint.step:,}"
    return ""


class _Silence:
    """Shows nothing."""

    def step(self, trainer: Trainer) -> None:
        pass

    def record(self, record: dict[str, Any]) -> None:
        pass

    def stop(self) -> None:
        pass
