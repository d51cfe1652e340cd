"""The steps of one run, as generators: a run trains alone, or takes turns with others in one process."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.errors import CommunicationError, UsageError
from headway.core.files import write_atomically
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder, collect_provenance
from headway.core.signals import handle_signals
from headway.core.text_format import pluralise
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.setup.checks import list_set_warnings
from headway.setup.rates import describe_batch
from headway.setup.recipe import TrainRecipe
from headway.setup.shared_inputs import SharedInputs
from headway.setup.train_setup import TrainSetup
from headway.setup.user_callbacks import NamedCallback, build_callbacks, name_callbacks
from headway.setup.versions import keep_versions
from headway.training.monitors import run_monitors
from headway.training.progress import build_display
from headway.training.results import describe_network_size, summarise, write_evaluation_panels, write_results
from headway.training.tracing import TracingDisplay
from headway.training.trainer import Trainer

LOG = logging.getLogger("headway.training")

RunSteps = Generator[Trainer, None, "RunResult"]
"""A run in steps: it yields its trainer before the first step and after each one, and returns the result."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run that ended.

    Attributes:
        was_interrupted: SIGTERM or Ctrl-C ended it, and its state is saved.
        is_lead: this process tells the user the result, for all ranks.
    """

    run: RunFolder
    summary: dict[str, Any]
    was_interrupted: bool
    is_lead: bool = True


def _meet_ranks(trainer: Trainer) -> None:
    """Meets the other ranks. A newcomer with another recipe counts as lost, and they continue without it."""
    try:
        trainer.recovery.meet()
    except UsageError as error:
        if os.environ.get("HEADWAY_JOINING") != "1":
            raise
        raise CommunicationError(error.what, where=error.where, fix=error.fix) from error


def continue_run(
    loaded: LoadedRecipe[TrainRecipe],
    run: RunFolder,
    ranks: Ranks | None = None,
    *,
    callbacks: Sequence[Any] = (),
    shared: SharedInputs | None = None,
) -> RunSteps:
    """Continues a run from its newest good checkpoint, or from the beginning if it has none; see `start_run`.

    The caller has locked the run folder.
    """
    # The number of threads changes the order of sums on a CPU, and with it the last digits.
    threads, before = torch.get_num_threads(), run.read_provenance(torch_threads=int)["torch_threads"]
    if threads != before:
        what = f"This run began with {before} threads of torch and goes on with {threads}"
        LOG.warning(f"{what}: results agree to rounding only.")
    _explain_new_ranks(loaded, run, ranks)
    checkpoint = open_checkpoints(run, loaded).newest()
    named = _collect_callbacks(loaded, callbacks)
    setup = build_setup(loaded, fresh=checkpoint is None, ranks=ranks, shared=shared)
    is_lead = ranks is None or ranks.is_lead
    with closing(setup.inputs), run.explain_disk_errors():
        if checkpoint is None:
            LOG.info("This run has no checkpoint yet: it starts from the beginning.")
            if is_lead:
                run.truncate_logs(0)
                record_recipe(run, setup, ranks)
        tracing = TracingDisplay(build_display(ranks=ranks), run, setup.recipe.observe.trace_steps)
        with closing(Trainer(setup, run, tracing, ranks, named)) as trainer:
            if checkpoint is not None:
                trainer.resume(checkpoint)
                # The folder may have been moved, or lie on a machine that the store does not see.
                if is_lead:
                    keep_versions(loaded, run.folder)
                done = " It is at its end: nothing is left to do." if trainer.finished else ""
                LOG.info(f"Resumed at step {trainer.step} of {setup.steps} from {checkpoint.path.name}.{done}")
            if not trainer.finished and is_lead:
                # The old summary is about a run that had stopped.
                (run.folder / "summary.json").unlink(missing_ok=True)
                if checkpoint is not None:
                    run.note_resume(trainer.step, 1 if ranks is None else ranks.launched_size)
            if ranks is not None:
                _meet_ranks(trainer)
            if trainer.finished and (summary := run.read_summary()).get("finished"):
                return RunResult(run, summary, was_interrupted=False, is_lead=is_lead)
            return (yield from _run_trainer(trainer, tracing))


def _explain_new_ranks(loaded: LoadedRecipe[TrainRecipe], run: RunFolder, ranks: Ranks | None) -> None:
    """Says how a batch that the recipe gave per device is shared by another number of ranks."""
    # Only a batch per device is resolved, so an origin `auto` tells it from a global one.
    if not loaded.origins.get("batch", "").startswith("auto: "):
        return
    before, now = run.read_provenance(ranks=int)["ranks"], 1 if ranks is None else ranks.launched_size
    if before == now:
        return
    batch = loaded.recipe.global_batch
    LOG.warning(
        f"This run began with {describe_batch(batch // before, before)}, and goes on with {pluralise(now, 'device')}:"
        f" the global batch stays {batch:,}, now {batch / now:,.4g} a device, as learning rate and sample order follow"
        " it."
    )


def start_run(
    loaded: LoadedRecipe[TrainRecipe],
    folder: Path | None,
    ranks: Ranks | None = None,
    *,
    callbacks: Sequence[Any] = (),
    warns: bool = True,
    shared: SharedInputs | None = None,
) -> RunSteps:
    """Begins a run in a new folder (default: runs/NAME).

    Args:
        ranks: the ranks of the run; None if one process trains.
        callbacks: objects that are called after those of the recipe.
        warns: say what is unusual about the data.
        shared: inputs that runs share which take turns in this process.

    Raises:
        HeadwayError: see `build_setup` and `Trainer`; the run folder exists.
    """
    is_lead = ranks is None or ranks.is_lead
    if is_lead and folder is not None:
        RunFolder.expect_free(folder)
    # Before the data are opened: a mistake in them is found at once.
    named = _collect_callbacks(loaded, callbacks)
    setup = build_setup(loaded, ranks=ranks, shared=shared)
    with closing(setup.inputs):
        # A resumed run said it when it began, and so did the first of several seeds.
        for warning in list_set_warnings(setup.train, setup.eval) if warns and is_lead else ():
            LOG.warning(warning)
        folder = folder or RunFolder.find_free_name(Path("runs"), loaded.recipe.name)
        run = RunFolder.create(folder) if is_lead else RunFolder(folder)
        if is_lead:
            # With checkpoint.folder, another run may have saved there.
            open_checkpoints(run, setup.loaded).expect_none()
            record_recipe(run, setup, ranks)
        tracing = TracingDisplay(build_display(ranks=ranks), run, setup.recipe.observe.trace_steps)
        with (
            lock_folder(run, ranks),
            run.explain_disk_errors(),
            closing(Trainer(setup, run, tracing, ranks, named)) as trainer,
        ):
            if ranks is not None:
                _meet_ranks(trainer)
                # The ranks may have agreed on another precision than this one had measured.
                if is_lead and setup.agreed_recipe is not setup.loaded:
                    record_recipe(run, setup, ranks)
            try:
                return (yield from _run_trainer(trainer, tracing))
            except UsageError:
                # Refused in its first step: the next try may have the name.
                if is_lead and not trainer.step:
                    shutil.rmtree(run.folder, ignore_errors=True)
                raise


def _collect_callbacks(loaded: LoadedRecipe[TrainRecipe], given: Sequence[Any]) -> list[NamedCallback]:
    return [*build_callbacks(loaded.recipe.callbacks, loaded.base), *name_callbacks(given)]


def separate_checkpoints(loaded: LoadedRecipe[TrainRecipe], name: str, reason: str) -> LoadedRecipe[TrainRecipe]:
    """Gives one of several runs a part of the recipe's `checkpoint.folder`, if it names one: runs must not share it."""
    folder = loaded.recipe.checkpoint.folder
    return loaded if folder is None else loaded.resolve("checkpoint.folder", f"{folder}/{name}", reason)


def open_checkpoints(run: RunFolder, loaded: LoadedRecipe[TrainRecipe]) -> Checkpoints:
    """Opens the folder of a run's checkpoints."""
    options = loaded.recipe.checkpoint
    return Checkpoints.locate(run.folder, options.keep, options.folder, loaded.base)


@contextmanager
def lock_folder(run: RunFolder, ranks: Ranks | None) -> Iterator[None]:
    """Locks the run folder for the duration of the block, on the lead of several ranks."""
    if ranks is not None and not ranks.is_lead:
        yield
        return
    # The operating system releases the lock if this process is killed.
    with run.lock():
        yield


def record_recipe(run: RunFolder, setup: TrainSetup, ranks: Ranks | None) -> None:
    """Writes the resolved recipe of a run and its provenance; from now on the folder is a run."""
    more = {
        # Facts about machine and data, for the report and for building the network without its data.
        "ranks": 1 if ranks is None else ranks.launched_size,
        "device": torch.cuda.get_device_name(setup.device) if setup.device.type == "cuda" else "cpu",
        "torch_threads": torch.get_num_threads(),
        "fingerprint": setup.train.fingerprint if setup.train is not None else "synthetic",
        "target": asdict(setup.target),
        "samples": setup.epoch,
        **describe_network_size(setup),
    }
    loaded = setup.agreed_recipe
    more["recipe"] = None if loaded.path is None else str(loaded.path)
    keep_versions(loaded, run.folder)
    run.write_json("provenance", collect_provenance(loaded.origins, loaded.base, **more))
    write_atomically(run.recipe_path, loaded.to_yaml())


def _run_trainer(trainer: Trainer, display: TracingDisplay) -> RunSteps:
    try:
        # The trainer closes its files before the summary is written, also after an error.
        with run_monitors(trainer):
            # Whoever drives the steps can stop the trainer from here on.
            yield trainer
            for _ in trainer.iterate():
                yield trainer
        # Before the sinks are closed.
        if has_panels := trainer.is_lead:
            write_evaluation_panels(trainer)
    finally:
        trainer.close()
        display.stop()
    summary = summarise(trainer)
    if "ended" in summary:
        LOG.info(f"The run ended at step {summary['step']:,} of {summary['steps']:,}: {summary['ended']}.")
    if trainer.ranks is None:
        write_results(trainer, summary, has_panels=has_panels)
    else:
        # The launcher restarts nothing if the run is at its end.
        trainer.ranks.is_complete = trainer.finished
        trainer.recovery.finish(lambda: write_results(trainer, summary, has_panels=has_panels))
    return RunResult(trainer.run_folder, summary, was_interrupted=not trainer.finished, is_lead=trainer.is_lead)


def complete(steps: RunSteps) -> RunResult:
    """Trains a run to its end; SIGTERM and Ctrl-C save its state and end it at the next step's boundary."""
    try:
        trainer = next(steps)
        with _stop_on_signals(trainer):
            while True:
                next(steps)
    except StopIteration as end:
        return cast("RunResult", end.value)


def _stop_on_signals(trainer: Trainer) -> AbstractContextManager[None]:
    """Makes SIGTERM and Ctrl-C save the state and end the run at the next step's boundary.

    A second Ctrl-C ends it at once.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        if trainer.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Only a flag: the loop reads it between two steps, and ranks exchange it with the gradients.
        trainer.stopping = True

    return handle_signals(stop, signal.SIGTERM, signal.SIGINT)
