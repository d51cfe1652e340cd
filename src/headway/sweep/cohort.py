"""Cohorts: trials that train in one process, in turns of one step, on batches that are decoded once for all of them."""

from __future__ import annotations

import errno
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.errors import HeadwayError, TrainingError, UserCodeError
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.core.system_errors import FULL
from headway.setup.recipe import TrainRecipe
from headway.setup.seeding import GeneratorStates
from headway.setup.shared_inputs import SharedInputs, Source, describe_shared_values
from headway.sweep.fuse import FusedTrials, Fusing
from headway.training.actions import Action
from headway.training.progress import hide_progress
from headway.training.run_steps import RunSteps, continue_run, start_run
from headway.training.runs import reload_recipe
from headway.training.trainer import Trainer


@final
@dataclass(frozen=True, kw_only=True)
class Assignment:
    """Training to do: a trial, and the step that it trains to.

    Attributes:
        trial: number of the trial.
        folder: its run folder; a trial that has one goes on.
        loaded: its recipe.
        until: the step after which it pauses; the last step of the run ends it.
    """

    trial: int
    folder: Path
    loaded: LoadedRecipe[TrainRecipe]
    until: int


@final
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of an assignment.

    Attributes:
        trial: number of the trial.
        step: step that it has reached.
        metrics: metrics of its evaluation at the step that it was to reach; None if it failed or has no evaluation set.
        failure: why it failed; empty if it did not.
        kind: `diverged` if its numbers did, `crashed` after any other error, `stopped` if it was told to stop.
        trace: the traceback of a crash.
    """

    trial: int
    step: int
    metrics: dict[str, float] | None = None
    failure: str = ""
    kind: str = "done"
    trace: str = ""


@final
class _Generators:
    """The global random generators, which several trials use in turn. States are copied only when the trial changes."""

    def __init__(self) -> None:
        # Weak: a trial that has ended leaves the memory.
        self._user: weakref.ref[_Member] | None = None

    def give_to(self, member: _Member) -> None:
        """Sets the generators to the states that a trial left them in, and keeps those of the trial before it."""
        before = None if self._user is None else self._user()
        if before is member:
            return
        if before is not None and before.trainer is not None:
            before.states = GeneratorStates.read(before.trainer.setup.device)
        if member.states is not None:
            member.states.restore()
        self._user = weakref.ref(member)


@final
class _Member:
    """A trial in this process, between two of its steps.

    Attributes:
        states: the states of its generators, while another trial uses them.
    """

    def __init__(self, assignment: Assignment, key: str, shared: SharedInputs, generators: _Generators) -> None:
        self.trial, self.key, self.until = assignment.trial, key, assignment.until
        self._run = RunFolder(assignment.folder)
        self.states: GeneratorStates | None = None
        self._generators = generators
        self._steps = _open_steps(assignment, shared)
        # None once the run has ended.
        self.trainer: Trainer | None = None
        self._last: Trainer | None = None
        self._summary: dict[str, Any] = {}
        self.take_turn()

    def take_turn(self) -> None:
        """Makes the next step, and the actions after it."""
        self._generators.give_to(self)
        if self.trainer is not None:
            # The time of the others belongs to no stage.
            self.trainer.clock.start()
        try:
            self.trainer = self._last = next(self._steps)
        except StopIteration as end:
            self.trainer, self._summary = None, end.value.summary

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self._summary["step"]) if self._last is None else self._last.step

    @property
    def metrics(self) -> dict[str, float] | None:
        """Metrics of the evaluation at `until`; None if there is none."""
        if self.step > self.until:
            # A journal whose end was removed asks again for a rung that the trial has passed.
            records = self._run.read_metrics()
            at = (one for one in records if one.get("kind") == "evaluate" and one.get("step") == self.until)
            return next(({name: value for name, value in one.items() if isinstance(value, float)} for one in at), None)
        if self._last is not None:
            return self._last.metrics
        # The run was at its end before, so it has no trainer.
        return {name: value for name, value in self._summary.items() if isinstance(value, float)}

    def pause(self) -> None:
        """Saves a checkpoint, so that the trial can go on here or in another process; a run at its end ends."""
        assert self.trainer is not None
        if self.trainer.finished:
            self.end()
            return
        actions = [Action.CHECKPOINT] if self.trainer.saved_step != self.trainer.step else []
        self.trainer.recovery.queue(*actions, Action.SETTLE)
        self.take_turn()

    def end(self) -> None:
        """Ends the trial at its step, with a checkpoint and a summary."""
        if self.trainer is not None:
            self.trainer.stopping = True
        while self.trainer is not None:
            self.take_turn()

    def close(self) -> None:
        """Ends the trial at once; it goes on from its newest checkpoint."""
        self._steps.close()


def _open_steps(assignment: Assignment, shared: SharedInputs) -> RunSteps:
    run = RunFolder(assignment.folder)
    if not run.recipe_path.exists():
        return (yield from start_run(assignment.loaded, assignment.folder, warns=False, shared=shared))
    with run.lock():
        return (yield from continue_run(reload_recipe(run), run, shared=shared))


@final
class Cohorts:
    """The trials of one process. Those that read the same batches take turns on one loader.

    A trial that pauses keeps its network in memory, and goes on without being built again.

    Args:
        stopping: returns True once the process has to end; every trial then saves its state.
        tell: called with the number of steps made by all trials since the last call, a few times a second.

    Attributes:
        fusing: chooses which trials take forward and backward together; None: none does.
    """

    def __init__(self, stopping: Callable[[], bool], tell: Callable[[int], None] = lambda steps: None) -> None:
        self._stopping, self._tell = stopping, tell
        self.fusing: Fusing | None = None
        self._told = time.monotonic()
        self._members: dict[int, _Member] = {}
        self._shared: dict[str, SharedInputs] = {}
        self._generators = _Generators()

    @property
    def trials(self) -> list[int]:
        """Numbers of the trials that are in memory."""
        return list(self._members)

    def train(self, assignments: Sequence[Assignment], source: Source | None = None) -> Iterator[Outcome]:
        """Trains each trial to its step, and yields what became of it as soon as it is there.

        Args:
            source: has the batches of one position on, which other processes read too.
        """
        groups: dict[tuple[str, int], list[_Member]] = defaultdict(list)
        for assignment in assignments:
            if self._stopping():
                yield Outcome(trial=assignment.trial, step=0, kind="stopped")
                continue
            member, outcome = self._prepare(assignment)
            if outcome is not None:
                yield outcome
            elif member is not None:
                groups[member.key, member.step].append(member)
        # Only trials at one position read the same batch.
        for (key, _), members in sorted(groups.items(), key=lambda group: -len(group[1])):
            shared = self._shared[key]
            # The source is used once: by the largest group, which comes first.
            shared.follow(source)
            try:
                yield from self._train_together(members)
            finally:
                shared.follow(None)
            source = None

    def _prepare(self, assignment: Assignment) -> tuple[_Member | None, Outcome | None]:
        member = self._members.get(assignment.trial)
        if member is not None:
            member.until = assignment.until
            return member, None
        run = RunFolder(assignment.folder)
        try:
            loaded = reload_recipe(run) if run.recipe_path.exists() else assignment.loaded
            key = describe_shared_values(loaded)
            if key not in self._shared:
                self._shared[key] = SharedInputs()
            with hide_progress(True):
                member = _Member(assignment, key, self._shared[key], self._generators)
        except Exception as error:
            return None, _explain(assignment.trial, 0, error)
        self._members[assignment.trial] = member
        return member, None

    def _train_together(self, members: list[_Member]) -> Iterator[Outcome]:
        """Trains members that are at one step, step by step in turn."""
        with ExitStack() as stack:
            fused = None
            if self.fusing is not None:
                trainers = {one.trial: (one.trainer, one.until) for one in members if one.trainer is not None}
                fused = stack.enter_context(closing(self.fusing.begin(trainers)))
            yield from self._take_turns(members, fused)

    def _take_turns(self, members: list[_Member], fused: FusedTrials | None) -> Iterator[Outcome]:
        steps = 0
        while members:
            stopping = self._stopping()
            for member in tuple(members):
                try:
                    if stopping:
                        member.end()
                    elif member.trainer is not None and member.step < member.until:
                        member.take_turn()
                        steps += 1
                    if member.trainer is not None and member.step >= member.until:
                        member.pause()
                except Exception as error:
                    members.remove(member)
                    if fused is not None:
                        fused.leave(member.trial)
                    yield self._drop(member, _explain(member.trial, member.step, error))
                    continue
                if member.trainer is None or member.step >= member.until:
                    members.remove(member)
                    if fused is not None:
                        fused.leave(member.trial)
                    outcome = self._describe(member, stopping)
                    yield outcome if member.trainer is not None else self._drop(member, outcome)
            if time.monotonic() - self._told > 0.3:
                self._tell(steps)
                steps, self._told = 0, time.monotonic()
        self._tell(steps)

    def _describe(self, member: _Member, stopping: bool) -> Outcome:
        is_short = stopping and member.step < member.until
        return Outcome(
            trial=member.trial,
            step=member.step,
            metrics=None if is_short else member.metrics,
            kind="stopped" if is_short else "done",
        )

    def end(self, trials: Sequence[int]) -> None:
        """Ends trials that do not go on: they write their summaries and leave the memory."""
        for trial in trials:
            if (member := self._members.pop(trial, None)) is not None:
                member.end()
                self._close_unused(member.key)

    def _drop(self, member: _Member, outcome: Outcome) -> Outcome:
        self._members.pop(member.trial, None)
        member.close()
        self._close_unused(member.key)
        return outcome

    def _close_unused(self, key: str) -> None:
        if all(member.key != key for member in self._members.values()) and key in self._shared:
            self._shared.pop(key).close()

    def close(self) -> None:
        """Ends all trials."""
        self.end(self.trials)
        for shared in self._shared.values():
            shared.close()
        self._shared.clear()


def _explain(trial: int, step: int, error: Exception) -> Outcome:
    """Returns the outcome of a trial that failed."""
    kind = "crashed"
    if isinstance(error, TrainingError):
        kind = "diverged"
    elif _is_of_machine(error):
        kind = "machine"
    # Errors of ours are sentences, and those of the user's code show its lines.
    shown = error.__cause__ if isinstance(error, UserCodeError) else None if isinstance(error, HeadwayError) else error
    trace = "" if shown is None else "".join(traceback.format_exception(shown))
    failure = str(error)
    if kind == "machine" and isinstance(error, HeadwayError):
        # Its fix continues this trial alone, and the coordinator's continues the sweep.
        failure = f"{error.where}: {error.what}" if error.where else error.what
    return Outcome(trial=trial, step=step, failure=failure, kind=kind, trace=trace)


def _is_of_machine(error: BaseException | None) -> bool:
    """Returns True for errors that another trial would have too: a full disk, or too little memory."""
    while error is not None:
        if isinstance(error, MemoryError):
            return True
        if isinstance(error, OSError) and error.errno in (*FULL, errno.EMFILE):
            return True
        error = error.__cause__
    return False
