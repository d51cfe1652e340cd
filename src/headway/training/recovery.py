"""Recovery: how training goes on after a rank is lost, and how ranks that join come to the state of the others.

`Trainer.run` makes its steps inside `with recovery:`. When a collective fails there, the remaining ranks meet again
as the next generation, in one state; the step or action that was interrupted is then repeated.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast, final

import torch

from headway.checkpoint.checkpoints import Checkpoint, Checkpoints
from headway.checkpoint.locations import parse_step
from headway.checkpoint.pieces import Piece
from headway.core.errors import (
    CheckpointError,
    CommunicationError,
    GenerationEndedError,
    HeadwayError,
    TrainingError,
    UsageError,
)
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.launch.handover import TransferredState
from headway.setup.precision import Precision
from headway.setup.recipe import MACHINE_KEYS, TrainRecipe
from headway.setup.train_setup import TrainSetup
from headway.training.actions import Action

if TYPE_CHECKING:
    from headway.training.trainer import Trainer

PROCESS_KEYS = (*MACHINE_KEYS, "micro_batch")
"""Recipe keys that may differ between the ranks of a run."""


@final
class Recovery:
    """Keeps the queue of actions between two steps, and brings the ranks of a run to one state.

    A context manager around one pass of the training loop: a `CommunicationError` inside makes the remaining ranks
    meet again, unless this process trains alone or the run cannot continue.

    Attributes:
        actions: the actions due before the next step, next first.
        saved_files: the files of the run, to continue from if no rank holds its state.
    """

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints) -> None:
        # A proxy, because a reference cycle would keep the trainer's tensors until the next garbage collection.
        self._trainer = cast("Trainer", weakref.proxy(trainer))
        self._ranks = ranks = trainer.ranks
        self.actions: list[Action] = []
        self.saved_files = SavedRun(trainer.setup, trainer.run_folder, checkpoints)
        self._lock = ExitStack()
        # Steps and actions done. -1 without a state: rank 0 begins with one, all others receive it.
        self._progress = 0 if ranks is None or ranks.is_lead else -1
        self._buffers = list(trainer.setup.model.buffers()) if ranks is not None else []
        self._saved_buffers = [buffer.clone() for buffer in self._buffers]
        # A rank that joins computes in the precision of the others, not in the one that it would choose.
        if ranks is not None and ranks.is_joining:
            self.precision.recorded = self.saved_files.read_precision()

    def __enter__(self) -> Recovery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, CommunicationError) or self._ranks is None:
            return False
        # The launcher says why the collective failed: a lost rank, or an end of the whole run.
        if not isinstance(reason := self._ranks.explain_error(error), GenerationEndedError):
            raise reason from error
        self.meet()
        self._trainer.clock.lap("regroup")
        return True

    def queue(self, *actions: Action) -> None:
        """Queues actions behind those that are due already."""
        self.actions += actions

    def run_actions(self, run: Callable[[Action], None]) -> None:
        """Runs the queued actions in order."""
        while self.actions:
            run(action := self.actions[0])
            # Removed only now, so that an action that a lost rank interrupts is repeated. `meet` removes its own.
            if action is not Action.REGROUP:
                self.actions.remove(action)
                self.advance()

    def lose_state(self) -> None:
        """Notes that this rank no longer has the state of any step: it takes that of another rank or a checkpoint."""
        self._progress = -1

    def advance(self) -> None:
        """Counts a step or an action as done."""
        self._progress += 1

    @contextmanager
    def undo_on_loss(self) -> Iterator[None]:
        """Makes a step all or nothing: it completes on all ranks, or the network is as before."""
        if self._ranks is None:
            yield
            return
        trainer = self._trainer
        if self._buffers:
            torch._foreach_copy_(self._saved_buffers, self._buffers)
        try:
            yield
        except CommunicationError:
            # The step will be made again, so its losses must not count twice.
            trainer.accumulator.drop_step()
            if self._buffers:
                torch._foreach_copy_(self._buffers, self._saved_buffers)
            # Half of the gradients may have been reduced already.
            trainer.setup.model.zero_grad(set_to_none=True)
            raise

    def meet(self) -> None:
        """Meets the other ranks, at the start or after a loss; all of them have one state afterwards.

        Raises:
            UsageError: a rank has another recipe or other data. FencedError, CommunicationError: see `Ranks.meet`.
        """
        ranks, trainer = self._ranks, self._trainer
        assert ranks is not None
        accumulator = trainer.accumulator
        was_lead = accumulator.log.is_lead
        # The loader prefetches for a rank and world that are about to change.
        trainer.close_stream()
        trainer.setup.freezing.thaw()
        met = ranks.meet(trainer.setup.model, trainer.setup.device, self)
        trainer.saver.set_exchange(ranks.build_save_exchange(), ranks.build_confirmer())
        accumulator.log.confirm = ranks.build_confirmer()
        trainer.clock.waits = ranks.world.waits
        # A checkpoint that was being written may have lost the share of a lost rank.
        if met.unsaved and Action.CHECKPOINT not in self.actions:
            # Only once the ranks have the same weights again.
            self.actions.insert(int(self.actions[:1] == [Action.AVERAGE]), Action.CHECKPOINT)
        # The interrupted step is repeated, perhaps by other ranks, so its ids are removed.
        accumulator.log.cut_ids(trainer.position)
        if ranks.is_lead:
            for name in ranks.lost_workers:
                # What a lost rank has trained in a round that is not over is in no weights.
                trainer.run_folder.seal_ids(trainer.position - trainer.rounds.samples, name)
            if not was_lead:
                self._take_lead(met.names)
        ranks.lost_workers = ()
        accumulator.must_regroup = False
        self.actions = [action for action in self.actions if action is not Action.REGROUP]

    def _take_lead(self, names: tuple[str, ...]) -> None:
        """Makes this rank write the run folder. Args: names: those of all ranks."""
        trainer, position = self._trainer, self._trainer.position
        trainer.run_folder.seal_all_ids(position - trainer.rounds.samples, besides=names)
        # The former lead may only be asleep and hold the lock; it is fenced before it writes anything.
        with suppress(UsageError):
            self._lock.enter_context(trainer.run_folder.lock())
        trainer.accumulator.take_lead(position, trainer.step)
        # The former lead may have been lost between an evaluation and the weights of it.
        if trainer.best is not None and trainer.best["step"] == trainer.step:
            trainer.write_weights()

    def finish(self, write_results: Callable[[], None]) -> None:
        """Calls `write_results` on the lead while the others wait. If the lead is lost, the next lead calls it."""
        ranks = self._ranks
        assert ranks is not None
        while True:
            with self:
                if ranks.is_lead:
                    write_results()
                    # After the results: the others may only leave when nobody has to take over any more.
                    ranks.build_save_exchange().publish("end", b"")
                else:
                    ranks.build_save_exchange().collect("end", [0], lambda: None)
                return

    def close(self) -> None:
        """Releases the run folder's lock, if this rank took it over."""
        self._lock.close()

    # The protocol `StateCarrier` of `headway.launch.handover`, by which ranks hand over their state.

    @property
    def step(self) -> int:
        """Number of steps done."""
        return self._trainer.step

    @property
    def precision(self) -> Precision:
        """The precision of the setup, on which the ranks agree."""
        return self._trainer.setup.precision

    def get_shared_settings(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all ranks."""
        return collect_shared_settings(self._trainer.setup)

    def get_progress(self) -> int:
        """Returns the number of steps and actions done, -1 without a state.

        The counts of two ranks that were in the same collective differ if it succeeded on one of them alone. So no
        action may contain two collectives.
        """
        return self._progress

    def is_saving(self) -> bool:
        """Returns True if a checkpoint is being written."""
        return self._trainer.saver.is_writing

    def restart_from(self, checkpoint: Checkpoint | None, progress: int) -> None:
        """Continues from a checkpoint, or from the beginning, as the rank that gives its state to the others."""
        if checkpoint is not None:
            self._trainer.resume(checkpoint)
        self._progress, self.actions = progress, []

    def state_dict(self) -> TransferredState:
        """Returns all that another rank needs to continue from here."""
        trainer = self._trainer
        scalars = {
            **trainer.collect_scalars(),
            "step": trainer.step,
            "progress": self._progress,
            "actions": self.actions,
            "saved_step": trainer.saved_step,
            "finished": trainer.finished,
            "accumulator": trainer.accumulator.state(),
            "round": trainer.rounds.describe(),
        }
        # What each rank has of its own is no part of it; the weights are those that all ranks had last.
        with trainer.rounds.show_agreed():
            tensors = trainer.collect_tensors()
            is_within = bool(trainer.rounds.steps)
            return scalars, {
                name: value.clone() if is_within else value
                for name, value in tensors.items()
                if not isinstance(value, Piece)
            }

    def load_state_dict(self, scalars: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Continues from the state of another rank."""
        trainer = self._trainer
        held = trainer.collect_tensors()
        own: dict[str, torch.Tensor] = {}
        if trainer.setup.parts is not None:
            # Of 16-bit weights whose masters another rank has, this one has those of the step.
            own = {f"model/{name}": value for name, value in trainer.setup.model.state_dict().items()}
            own = {name: value for name, value in own.items() if name not in tensors}
            own |= {name: value.tensor for name, value in held.items() if isinstance(value, Piece)}
        if trainer.setup.parts is not None and trainer.step != scalars["step"]:
            what = f"this process holds its part of the state at step {trainer.step}, and the others are at step"
            fix = "Let all hosts see the folder of the run, or set checkpoint.folder to one that all of them share."
            raise UsageError(f"{what} {scalars['step']}", where="checkpoint.folder", fix=fix)
        if trainer.step == scalars["step"]:
            own |= trainer.rounds.list_own(held)
        trainer.load(Checkpoint(Path("the state of another rank"), scalars["step"], scalars, tensors | own))
        trainer.rounds.join(scalars["round"])
        trainer.accumulator.load_state(scalars["accumulator"])
        self._progress, self.actions = scalars["progress"], [Action(name) for name in scalars["actions"]]
        trainer.saved_step, trainer.finished = scalars["saved_step"], scalars["finished"]


def collect_shared_settings(setup: TrainSetup) -> dict[str, Any]:
    """Returns the settings that must be equal on all ranks: recipe and data, without machine-specific settings."""
    recipe = _select_shared(dict(setup.loaded.list_leaves()), setup)
    data = setup.inputs.build_state(setup.recipe)
    return {**recipe, **{f"the data's {name}": data[name] for name in ("fingerprint", "channels", "classes")}}


def _select_shared(leaves: Mapping[str, Any], setup: TrainSetup) -> dict[str, Any]:
    shared = {key: value for key, value in leaves.items() if key not in PROCESS_KEYS}
    # A precision chosen by `auto` is agreed on later, so ranks that measured differently still fit together.
    return {**shared, "precision": "auto"} if setup.precision.is_auto else shared


@final
class SavedRun:
    """The run folder and the checkpoints of a run, as this process sees them.

    Args:
        setup: the setup of this process, with which it would continue the run.
    """

    def __init__(self, setup: TrainSetup, run: RunFolder, checkpoints: Checkpoints) -> None:
        self._setup, self._run, self._checkpoints = setup, run, checkpoints

    def read_precision(self) -> Any:
        """Returns the precision that rank 0 recorded in the run folder; None if the folder cannot be seen from here."""
        if not self._run.recipe_path.is_file():
            return None
        return read_recipe(self._run.recipe_path, (), TrainRecipe).recipe.precision

    def is_ahead(self, step: int) -> bool:
        """Returns True if a later step has a complete checkpoint. If none has, this only lists the names."""
        try:
            paths = self._checkpoints.paths()
            if not paths or (parse_step(paths[0].name) or 0) <= step:
                return False
            newest = self._checkpoints.newest([])
        # Damaged or out of reach: no rank could continue from it.
        except HeadwayError:
            return False
        return newest is not None and newest.step > step

    def summarise(self) -> dict[str, Any]:
        """Summarises the run folder and its newest checkpoint, for JSON.

        Returns:
            `step` of the newest checkpoint by its name (-1: none), whether the run folder is `seen`, how many steps
            were `recorded` in it, and the `error` if the checkpoints are out of reach.
        """
        # Only names and sizes are read here; a checkpoint is loaded on the rank that is chosen for it.
        summary: dict[str, Any] = {
            "step": -1,
            "seen": self._run.recipe_path.is_file(),
            "recorded": self._count_recorded_steps(),
            "error": None,
        }
        try:
            # The newest name. It may turn out to be damaged, which reading finds.
            if paths := self._checkpoints.paths():
                summary["step"] = parse_step(paths[0].name)
        except HeadwayError as error:
            summary["error"] = {"what": error.what, "where": error.where, "fix": error.fix}
        return summary

    def read_checkpoint(self) -> tuple[Checkpoint, list[str]]:
        """Reads the newest checkpoint that is whole; also returns a message for each damaged one.

        Raises:
            CheckpointError: there is none. TrainingError: this process was started with another recipe.
        """
        messages: list[str] = []
        checkpoint = self._checkpoints.newest(messages)
        if checkpoint is None:
            raise CheckpointError("the checkpoints have gone", where=self._checkpoints.folder.shown)
        self._expect_own_recipe()
        return checkpoint, messages

    def explain_missing_state(self, recorded: int) -> HeadwayError:
        """Returns the error of a run that cannot continue. Args: recorded: number of steps in its logs."""
        what = "no process is left that holds the state of the run, and no checkpoint of it can be seen from here"
        if not recorded:
            fix = f"Start it on the hosts that see its folder: {self._run.resume_command}"
            return TrainingError(what, where=str(self._run.folder), fix=fix)
        what = f"no process is left that holds the state of the run, and there was no checkpoint yet: {recorded} steps"
        fix = f"A smaller checkpoint.every_steps would have kept more. Begin anew: {self._run.resume_command}"
        return TrainingError(f"{what} are lost", where=str(self._run.folder), fix=fix)

    def _count_recorded_steps(self) -> int:
        """Returns the newest step in the logs; at least 1 if any log has an entry."""
        step = max((record["step"] for record in self._run.read_metrics()), default=0)
        files = (self._run.quarantine_path, *self._run.folder.glob("ids*.bin"))
        return max(step, int(any(path.exists() and path.stat().st_size > 0 for path in files)))

    def _expect_own_recipe(self) -> None:
        """Raises TrainingError if the run folder has another recipe than this process.

        If a rank holds the state, `Ranks.meet` compares recipes; here none does, so the run folder stands in.
        """
        if not self._run.recipe_path.is_file():
            return
        recorded = read_recipe(self._run.recipe_path, (), TrainRecipe)
        theirs = _select_shared(dict(recorded.list_leaves()), self._setup)
        ours = _select_shared(dict(self._setup.loaded.list_leaves()), self._setup)
        if unlike := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
            key = unlike[0]
            what = f"{key} is {ours.get(key)!r} in the recipe, and the run began with {theirs.get(key)!r}"
            fix = f"Go on with the run's own recipe: {self._run.resume_command}"
            raise TrainingError(what, where=str(self._run.folder), fix=fix)
