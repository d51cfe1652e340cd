"""Runs: trains a recipe into a run folder; resumes, repeats and evaluates runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from headway.core.errors import CommunicationError, FencedError, GenerationEndedError, HeadwayError, UsageError
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.core.run_folder import RunFolder, describe_naming
from headway.core.untrusted_json import is_whole_number
from headway.data.decode import choose_available_backend
from headway.launch.ranks import Ranks
from headway.model import pretrained
from headway.setup.build import RecordedData, build_setup
from headway.setup.checks import check_batch_size, check_places
from headway.setup.rates import resolve_batch
from headway.setup.recipe import MACHINE_KEYS, TrainRecipe
from headway.setup.task import LABEL_PHRASES, TargetSpec
from headway.setup.train_setup import TrainSetup
from headway.training.ensemble import join_members, list_members
from headway.training.evaluate import evaluate as evaluate_set
from headway.training.evaluate import open_evaluation_set
from headway.training.evaluation_panels import build_evaluation_panels, write_panels
from headway.training.extension import extend_recipe
from headway.training.run_steps import (
    RunResult,
    complete,
    continue_run,
    lock_folder,
    open_checkpoints,
    separate_checkpoints,
    start_run,
)

LOG = logging.getLogger("headway.training")

FLOAT32: dict[str, Any] = {"precision": "fp32", "half_weights": False}
"""Overrides that build a network in float32 whatever it was trained in. Weights are saved in float32."""


def train(recipe: Path, overrides: Sequence[str], folder: Path | None) -> RunResult:
    """Trains a recipe into a new run folder (default: runs/NAME).

    In each process of a launcher, this trains with the other processes; rank 0 writes the run folder.

    Raises:
        HeadwayError: see `build_setup` and `Trainer`; the run folder exists.
    """
    return train_recipe(load_recipe(recipe, overrides), folder)


def train_recipe(loaded: LoadedRecipe[TrainRecipe], folder: Path | None, callbacks: Sequence[Any] = ()) -> RunResult:
    """Trains a loaded recipe; see `train`. Args: callbacks: objects that are called after those of the recipe."""
    ranks = Ranks.from_environment(loaded.recipe.comm)
    if ranks is None:
        check_places(loaded.recipe.parallel, 1)
        return complete(start_run(loaded, folder, callbacks=callbacks))
    if folder is None:
        raise UsageError("several processes need one run folder", fix=describe_naming())
    with _join_ranks(ranks, RunFolder(folder)):
        # Refused here, before data are opened: a step needs one sample per rank at least.
        check_batch_size(resolve_batch(loaded, ranks.launched_size).recipe, ranks.launched_size)
        check_places(loaded.recipe.parallel, ranks.launched_size)
        # A launcher that restarts all processes gives them the command line of the first start.
        again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
        if again and RunFolder(folder).recipe_path.exists():
            return _resume(RunFolder.open(folder), ranks, callbacks)
        return complete(start_run(loaded, folder, ranks, callbacks=callbacks))


def repeat(recipe: Path, overrides: Sequence[str], folder: Path | None, times: int) -> list[RunResult]:
    """Trains a recipe with seeds s, s + 1, ...; one run folder each, numbered inside `folder`."""
    loaded = load_recipe(recipe, overrides)
    parent = folder or RunFolder.find_free_name(Path("runs"), loaded.recipe.name)
    results = []
    for number in range(times):
        # All folders are checked first, so that the last of several long runs does not fail on its name.
        RunFolder.expect_free(parent / str(number + 1))
    for number in range(times):
        one = loaded
        if number:
            one = loaded.resolve("seed", loaded.recipe.seed + number, f"--repeat, run {number + 1}")
        one = separate_checkpoints(one, str(number + 1), f"--repeat, run {number + 1}")
        results.append(complete(start_run(one, parent / str(number + 1), warns=number == 0)))
        if results[-1].was_interrupted:
            break
    return results


def resume(folder: Path, callbacks: Sequence[Any] = (), overrides: Sequence[str] = ()) -> RunResult:
    """Continues a run from its newest good checkpoint, or from the beginning if it has none.

    Args:
        callbacks: objects that are called after those of the recipe.
        overrides: `key=value` for keys that may change, such as `epochs`; see `extension`.

    Raises:
        UsageError: no run folder. CheckpointError: every checkpoint is damaged.
    """
    run = RunFolder.open_resumable(folder)
    loaded = reload_recipe(run)
    ranks = Ranks.from_environment(loaded.recipe.comm)
    if ranks is None:
        return _resume(run, None, callbacks, overrides)
    with _join_ranks(ranks, run):
        return _resume(run, ranks, callbacks, overrides)


def find_finished_run(folder: Path) -> RunResult | None:
    """Returns the result of a run that is at its end; None if there is something left to do.

    Raises:
        UsageError: no run folder. CheckpointError: every checkpoint is damaged.
    """
    run = RunFolder.open_resumable(folder)
    summary = run.read_summary()
    if not summary.get("finished"):
        return None
    # The summary may say `finished` while the last checkpoint was lost with its folder.
    checkpoint = open_checkpoints(run, reload_recipe(run)).newest()
    if checkpoint is None or checkpoint.step != summary["step"]:
        return None
    LOG.info(f"{run.folder} is at its end, step {checkpoint.step} of {summary['steps']}: nothing is left to do.")
    return RunResult(run, summary, was_interrupted=False)


@contextmanager
def _join_ranks(ranks: Ranks, run: RunFolder) -> Iterator[None]:
    """Keeps this process among the ranks for the duration of the block.

    After an error of the run (recipe, data, numbers) it leaves in order, and raises the error afterwards. After a
    communication error it counts as lost, and the others continue without it.
    """
    # Raised after this process has left in order, so that the others do not take it for lost.
    own: HeadwayError | None = None
    try:
        with ranks:
            try:
                yield
            except CommunicationError as error:
                raise (_explain_lost_launcher(error, run) if _is_orphan(ranks) else error) from error.__cause__
            except HeadwayError as error:
                own = error
    # Leaving in order communicates too.
    except CommunicationError:
        if own is None:
            raise
    if own is not None:
        raise own


def _is_orphan(ranks: Ranks) -> bool:
    """Returns True if the launcher of this process can no longer be reached."""
    try:
        ranks.check()
    except (GenerationEndedError, FencedError):
        return False
    except CommunicationError:
        return True
    return False


def _explain_lost_launcher(error: CommunicationError, run: RunFolder) -> CommunicationError:
    fix = f"The run has ended; go on with its last checkpoint: {run.resume_command}"
    return CommunicationError(error.what, where=error.where, fix=fix)


def extend(folder: Path, overrides: Sequence[str], ranks: int) -> None:
    """Changes the recipe of a run that no process trains, and that so many will. Raises UsageError: see `extension`."""
    run = RunFolder.open_resumable(folder)
    with run.lock():
        extend_recipe(run, reload_recipe(run), overrides, ranks=ranks, writes=True)


def _resume(run: RunFolder, ranks: Ranks | None, callbacks: Sequence[Any], overrides: Sequence[str] = ()) -> RunResult:
    with lock_folder(run, ranks):
        loaded, size = reload_recipe(run), 1 if ranks is None else ranks.launched_size
        if overrides:
            loaded = extend_recipe(run, loaded, overrides, ranks=size, writes=ranks is None or ranks.is_lead)
        check_places(loaded.recipe.parallel, size)
        return complete(continue_run(loaded, run, ranks, callbacks=callbacks))


def reload_recipe(run: RunFolder) -> LoadedRecipe[TrainRecipe]:
    """Reads the resolved recipe of a run. Keys whose `auto` depends on the machine are `auto` again."""
    about = run.read_provenance(origins=dict, base=str)
    # Absent in older runs, and in those that a Python program began with a mapping.
    path = None if not isinstance(given := about.get("recipe"), str) else Path(given)
    recipe = read_recipe(run.recipe_path, (), TrainRecipe).recipe
    loaded = LoadedRecipe(recipe, about["origins"], Path(about["base"]), path)
    # The run may continue on another machine, where another device or cache is right.
    for key in MACHINE_KEYS:
        if loaded.origins.get(key, "").startswith("auto: "):
            loaded = loaded.resolve(key, "auto", "resolved again as the run continues")
    return loaded


def load_recipe(recipe: Path, overrides: Sequence[str]) -> LoadedRecipe[TrainRecipe]:
    """Reads a recipe. Paths in the recipe of a run folder are relative to the original recipe's folder."""
    loaded = read_recipe(recipe, overrides, TrainRecipe)
    run = RunFolder(recipe.parent)
    # The recipe of a run folder was written there; its relative paths still start at the original one.
    if recipe.name == run.recipe_path.name and (run.folder / "provenance.json").exists():
        return replace(loaded, base=Path(run.read_provenance(base=str)["base"]))
    return loaded


def evaluate(folder: Path, data: str | None) -> dict[str, float]:
    """Evaluates a run's best weights, or an ensemble, over its evaluation set, or over another packed folder.

    Raises:
        UsageError: the run has no weights yet, or there is nothing to evaluate on.
    """
    run = RunFolder.open_trained(folder)
    setup = load_trained(run)
    with closing(setup.inputs), closing(open_evaluation_set(setup, data, folder)) as held_out:
        evaluation = evaluate_set(setup, held_out)
        result = {**evaluation.metrics, "samples": float(len(evaluation.samples))}
        if evaluation.damaged:
            share = f"{evaluation.damaged:,} of {len(held_out):,} samples"
            LOG.warning(f"{held_out.folder}: {share} are damaged and left out.")
            result["damaged_samples"] = float(evaluation.damaged)
        about = {} if evaluation.counts is None else {"classes": evaluation.counts.describe(held_out.classes)}
        run.write_json("evaluation", {"data": str(held_out.folder), **result, **about})
        which = "the ensemble" if setup.members else "the best weights"
        write_panels(run, build_evaluation_panels(held_out, evaluation, which))
    return result


def load_trained(run: RunFolder, *, wide: bool = False) -> TrainSetup:
    """Builds the setup of a run, with its best weights, or of an ensemble.

    Data, GPU and the native core need not be there.

    Args:
        wide: build the network in float32, even if it was trained with 16-bit weights.

    Raises:
        UsageError: the run has no weights yet. HeadwayError: they are damaged.
    """
    if run.ensemble_path.exists():
        members = list_members(run)
        return join_members([load_trained(one, wide=wide) for one in members], [str(one.folder) for one in members])
    if not run.weights_path.exists():
        fix = "They are written by its first evaluation or checkpoint."
        raise UsageError("this run has no weights yet", where=str(run.folder), fix=fix)
    # The recorded target and size replace the training data, which may be gone.
    about, loaded = run.read_provenance(target=dict, samples=int), reload_recipe(run)
    # A run that was trained on a GPU can be evaluated on a CPU, in float32.
    if loaded.recipe.device.startswith("cuda") and not torch.cuda.is_available():
        instead: dict[str, Any] = {"device": "cpu", **FLOAT32}
        if loaded.recipe.compile == "graphs":
            instead["compile"] = True
        loaded = loaded.resolve_all({key: (value, "no GPU here") for key, value in instead.items()})
    if wide:
        loaded = loaded.resolve_all({key: (value, "measured in float32") for key, value in FLOAT32.items()})
    decoder = loaded.recipe.data.decoder
    if choose_available_backend(decoder) != decoder:
        reason = "the native core is not here"
        loaded = loaded.resolve("data.pin", False, reason).resolve("data.decoder", "pillow", reason)
    recorded = RecordedData(target=_read_target(about["target"], run), samples=about["samples"])
    setup = build_setup(loaded, fresh=False, recorded=recorded)
    # Weights left out mean that the network changed after the run, for example in the user's code.
    left_out = pretrained.load_weights(setup.model, run.weights_path)
    if left_out:
        raise HeadwayError("weights.safetensors does not fit the run's network", where=str(run.folder))
    return setup


def _read_target(entry: dict[str, Any], run: RunFolder) -> TargetSpec:
    """Reads the target from provenance.json. Raises HeadwayError: it is damaged."""
    values: list[Any] = [entry.get(name) for name in ("kind", "classes", "numbers")]
    kind, classes, numbers = values
    named = isinstance(classes, list) and all(isinstance(one, str) for one in classes)
    # The file may come from elsewhere, so its types are checked before they are used.
    if kind not in LABEL_PHRASES or not named or not is_whole_number(numbers, 1, 1 << 31):
        fix = "Copy the run folder again."
        raise HeadwayError("provenance.json has no good target", where=str(run.folder), fix=fix)
    return TargetSpec(kind=kind, classes=tuple(classes), numbers=numbers)
