"""The coordinator of a sweep: decides by the journal, gives trials to slots, and writes their results down."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction
from itertools import cycle
from queue import SimpleQueue
from typing import Any, final

from headway.core.errors import HeadwayError, RecipeError, UserCodeError
from headway.core.recipe import LoadedRecipe
from headway.core.run_folder import RunFolder
from headway.setup.recipe import TrainRecipe
from headway.setup.shared_inputs import describe_shared_values
from headway.sweep.cohort import Assignment, Outcome
from headway.sweep.costs import TrialCosts
from headway.sweep.feed import Ticket
from headway.sweep.feeders import Feeders, can_be_fed
from headway.sweep.halving import decide, is_over
from headway.sweep.journal import Journal
from headway.sweep.lease import EXPIRED_STATUS
from headway.sweep.machines import Machines
from headway.sweep.records import Forked, Fused, Result, Stopped, Values, build_result
from headway.sweep.slots import Event, Slot, share_machine
from headway.sweep.space import Space
from headway.sweep.state import State, Task, list_fuse_choices, list_tasks
from headway.sweep.sweep_folder import SweepFolder, SweepRecipe, describe_sweep_resume
from headway.sweep.trial_values import TrialValues
from headway.sweep.trials import build_assignment, find_step
from headway.sweep.worker import decode_outcome
from headway.training.fork import fork_run
from headway.training.run_steps import open_checkpoints

LOG = logging.getLogger("headway.sweep")

MOST_CRASHES = 3
"""Trials that crash one after another, and processes that die with a trial at one place, until the sweep gives up."""
MEASURE_S = 30.0
"""Wall seconds after which no more trials are measured."""


@final
class Coordinator:
    """Runs the trials of one sweep until nothing is left to decide.

    A result is in the journal before anything is decided by it. A trial that crashes has no result until another
    trial has shown that the sweep works: if three crash one after another, the sweep ends with the last traceback,
    and `--resume` tries them again.

    Attributes:
        steps: steps that were made.
        feeds: a feeder decodes for slots that train from the same batches.
    """

    def __init__(
        self, sweep: SweepFolder, settings: SweepRecipe, loaded: LoadedRecipe[TrainRecipe], gpus: Sequence[str] = ()
    ) -> None:
        self._sweep, self._settings, self._loaded = sweep, settings, loaded
        self._resume = describe_sweep_resume(sweep.folder)
        self._space = Space(settings.space)
        self._events: SimpleQueue[Event] = SimpleQueue()
        # Those that came while the coordinator waited for another one.
        self._passed = deque[Event]()
        shares = share_machine(settings.slots, gpus)
        self._numbers = itertools.count()
        self._slots = [Slot(next(self._numbers), sweep.folder, cpus, gpu, self._events) for cpus, gpu in shares]
        self._machines = Machines(sweep, settings, self._events, self._numbers)
        self._left_core_s = 0.0
        self._crashes: list[Result] = []
        self._deaths: Counter[int] = Counter()
        # The newest checkpoint of each trial at its last death.
        self._places: dict[int, str | None] = {}
        self._assignments: dict[tuple[int, int], Assignment] = {}
        self._whole: dict[int, Assignment] = {}
        self._keys: dict[int, str] = {}
        self._feeders = Feeders(sweep.logs)
        self._said = set[str]()
        self.feeds = False
        self.steps = 0

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self._machines.stop(is_over=error[0] is None)
        with ExitStack() as stack:
            stack.callback(self._machines.close)
            for slot in self._slots:
                stack.callback(slot.close)
            # First: no slot waits for a batch while it has to end.
            stack.callback(self._feeders.close)

    def run(self, journal: Journal, show: Callable[[State, int], None]) -> State:
        """Runs the trials; returns the state at the end.

        Args:
            show: called with the state and the number of steps whenever something has changed.

        Raises:
            HeadwayError: trials crash one after another, or the machine has not what a trial needs.
        """
        journal.guard = self._machines.expect_own
        self._decide(journal)
        while not is_over(journal.state):
            self._assign(journal)
            if self._slots and all(slot.is_idle for slot in self._slots):
                # No other trial can show any more that the sweep works.
                crashes, self._crashes = self._crashes, []
                self._record(crashes, journal)
            else:
                # Most answers only count steps. A slot that waits for its feed may be free to go on, though.
                while not self._handle(self._next_event(), journal) and not any(slot.is_idle for slot in self._slots):
                    show(journal.state, self.steps)
            show(journal.state, self.steps)
        return journal.state

    def wait_for_slot(self) -> None:
        """Waits for the first worker of another machine, if this one has no slots."""
        if self._slots:
            return
        LOG.info("Waiting for the first worker.")
        # It is a slot now; what it said is for whoever gives it work.
        self._passed.append(replace(self._next_event(), joined=None))

    def train(self, assignments: Sequence[Assignment]) -> list[Outcome]:
        """Trains runs that are no trials, each alone; returns what became of them."""
        waiting, outcomes = list(assignments), list[Outcome]()
        for slot in self._slots:
            slot.end(sorted(slot.held))
        while len(outcomes) < len(assignments):
            for slot in self._slots:
                if slot.is_idle and waiting:
                    slot.train([waiting.pop(0)])
            slot, message = self._take(self._next_event())
            if message is None:
                lost = list(slot.training.values())
                status = self._bury(slot)
                waiting += lost
                if any(self._deaths[one.trial] >= MOST_CRASHES for one in lost):
                    what = f"a process of the sweep ended {MOST_CRASHES} times, the last time with status {status}"
                    fix = f"Its log says more. Mend the cause, and continue: {self._resume}"
                    raise HeadwayError(what, where=str(self._sweep.logs), fix=fix)
                continue
            if "outcome" in message:
                outcome = decode_outcome(message["outcome"])
                if outcome.kind == "stopped":
                    # Its machine leaves the sweep.
                    waiting.append(slot.training[outcome.trial])
                else:
                    outcomes.append(outcome)
                self._note(slot, outcome)
            slot.is_idle = slot.is_idle or "idle" in message
        return outcomes

    def measure(
        self, assignments: Sequence[Assignment], slots: int
    ) -> tuple[list[float], list[tuple[Assignment, TrialCosts]]]:
        """Measures what trials cost; returns core seconds until each process is ready, and what was found.

        Trials that fail are left out; some are measured twice if there are fewer than slots. After `MEASURE_S` no
        more are begun.

        Args:
            slots: how many slots will train. All of them measure at once, as they will share caches and a clock rate.
        """
        waiting = [one for one, _ in zip(cycle(assignments), range(max(len(assignments), slots)))]
        own, found, starts = dict[int, Assignment](), list[tuple[Assignment, TrialCosts]](), dict[int, float]()
        began = time.monotonic()
        while waiting or not all(slot.is_idle for slot in self._slots):
            for slot in self._slots[:slots]:
                if slot.is_idle and waiting:
                    own[slot.number] = waiting.pop(0)
                    slot.measure(own[slot.number])
            slot, message = self._take(self._next_event())
            if message is None:
                # Its next process starts anew.
                self._bury(slot)
                continue
            if "ready" in message:
                starts[slot.number] = message["core_s"]
            if "costs" in message:
                slot.is_idle = True
                if message["costs"] is not None:
                    found.append((own[slot.number], TrialCosts(**message["costs"])))
            if waiting and time.monotonic() - began > MEASURE_S:
                LOG.info(f"Measuring has taken {MEASURE_S:g} seconds, so no more trials are measured.")
                waiting.clear()
        return list(starts.values()), found

    @property
    def core_s(self) -> float:
        """Seconds of cores that all processes have taken so far."""
        return self._left_core_s + sum(slot.core_s for slot in self._slots) + self._feeders.core_s

    @property
    def slots(self) -> int:
        """Number of slots here and on other machines, as far as they are known."""
        return max(len(self._slots), self._settings.slots + self._machines.slots)

    def _next_event(self) -> Event:
        """Waits for an event of a slot; a worker that joins becomes one. Raises HeadwayError: no machine is left."""
        while (event := self._get_event()).slot < 0:
            self._machines.note(event)
            self._machines.expect_some(self._slots)
        if event.joined is not None:
            self._slots.append(Slot(event.slot, self._sweep.folder, (), None, self._events, event.joined))
            self._machines.note_join(event.joined.host)
        return event

    def _get_event(self) -> Event:
        return self._passed.popleft() if self._passed else self._events.get()

    def _take(self, event: Event) -> tuple[Slot, dict[str, Any] | None]:
        """Returns the slot and the message of an event; notes what the process says of itself."""
        slot, message = next(slot for slot in self._slots if slot.number == event.slot), event.message
        if message is not None and "core_s" in message:
            slot.note_core_s(message["core_s"])
        if message is not None and "unreachable" in message:
            # It may still train, until its lease ends.
            slot.is_idle = False
        return slot, message

    # Decisions.

    def _decide(self, journal: Journal) -> None:
        while decisions := decide(
            journal.state, TrialValues(self._space, self._settings.seed, journal.state), len(self._slots)
        ):
            # Before the journal has it, and before the parent goes on: a fork is a copy of its checkpoint.
            for one in decisions:
                if isinstance(one, Forked):
                    # It replaces a folder, in which a later coordinator's worker may train by now.
                    journal.guard()
                    self._fork(one, journal)
            journal.append(*decisions)
            stopped = [one.trial for one in decisions if isinstance(one, Stopped)]
            for slot in self._slots:
                slot.end(stopped)

    def _fork(self, fork: Forked, journal: Journal) -> None:
        trial, levels = journal.state.trials[fork.parent], journal.state.plan.find_bracket(fork.parent).levels
        parent = self._build(trial.number, trial.values, journal.state, levels[fork.rung - 1])
        origin = f"sweep: trial {fork.trial}, a fork of trial {fork.parent}"
        fork_run(parent.folder, parent.until, self._sweep.find_trial(fork.trial), fork.values, origin)

    def _find_waiting(self, state: State) -> list[Task]:
        """Returns the tasks that no slot works on."""
        busy = {trial for slot in self._slots for trial in slot.training} | {one.trial for one in self._crashes}
        return [task for task in list_tasks(state) if task.trial.number not in busy]

    # Work for slots.

    def _assign(self, journal: Journal) -> None:
        """Gives each idle slot its share of what waits: trials that read the same batches from the same position."""
        idle = [slot for slot in self._slots if slot.is_idle and not self._feeders.must_wait(slot.number)]
        chosen = dict[Slot, tuple[tuple[str, Any], list[Task]]]()
        for number, slot in enumerate(idle):
            # Its process has ended while it let go of trials.
            if not slot.is_idle:
                continue
            taken = {task.trial.number for _, tasks in chosen.values() for task in tasks}
            waiting = [task for task in self._find_waiting(journal.state) if task.trial.number not in taken]
            groups: dict[tuple[str, Any], list[Task]] = defaultdict(list)
            for task in waiting:
                if self._prepare(task, journal):
                    groups[self._keys[task.trial.number], task.start].append(task)
            if not groups:
                break
            # Trials in this slot's memory go on without being built again.
            name, group = max(groups.items(), key=lambda item: (self._count_held(slot, item[1]), len(item[1])))
            share = math.ceil(sum(map(len, groups.values())) / (len(idle) - number))
            own = self._choose(slot, group, min(share, self._settings.together))
            if own:
                chosen[slot] = (name, own)
        tickets = self._begin_feeds(chosen)
        for slot, (_, own) in chosen.items():
            assignments = [self._assignments[task.trial.number, task.rung] for task in own]
            # Not from the journal itself, which another machine may see with a delay.
            choices = None
            if self._settings.fuse == "auto":
                choices = list_fuse_choices(journal.state, (assignment.trial for assignment in assignments))
            slot.train(assignments, tickets.get(slot.number), choices)
        self._feeders.end_unused(
            {self._keys[task.trial.number] for task in list_tasks(journal.state) if task.trial.number in self._keys}
        )

    def _begin_feeds(self, chosen: Mapping[Slot, tuple[tuple[str, Any], Sequence[Task]]]) -> dict[int, Ticket]:
        """Begins a feed for each group that several slots train; returns the tickets of the slots."""
        tickets, groups = dict[int, Ticket](), defaultdict[tuple[str, Any], list[Slot]](list)
        for slot, (name, tasks) in chosen.items():
            # A trial whose process died is tried alone, in every way. Other machines do not share this one's memory.
            if slot.host is None and not any(self._deaths[task.trial.number] for task in tasks):
                groups[name].append(slot)
        for name, slots in groups.items():
            task = chosen[slots[0]][1][0]
            assignment = self._assignments[task.trial.number, task.rung]
            if self.feeds and len(slots) > 1 and can_be_fed(assignment.loaded.recipe):
                ends = {slot.number: self._find_end(chosen[slot][1]) for slot in slots}
                tickets |= self._feeders.begin(name[0], assignment, ends)
        return tickets

    def _find_end(self, tasks: Sequence[Task]) -> int:
        """Returns the step at which the last of these tasks ends."""
        return max(self._assignments[task.trial.number, task.rung].until for task in tasks)

    def _count_held(self, slot: Slot, tasks: Sequence[Task]) -> int:
        return sum(task.trial.number in slot.held for task in tasks)

    def _choose(self, slot: Slot, group: Sequence[Task], most: int) -> list[Task]:
        """Returns up to so many tasks of a group for a slot; takes them out of the memory of others."""
        holders = {trial: other for other in self._slots for trial in other.held if other is not slot}
        free = [task for task in group if (other := holders.get(task.trial.number)) is None or other.is_idle]
        # A trial whose process died may have ended it, so it is tried alone.
        if suspects := [task for task in free if self._deaths[task.trial.number]]:
            free, most = suspects, 1
        own = sorted(free, key=lambda task: (task.trial.number not in slot.held, task.trial.number in holders))[:most]
        for other in self._slots:
            taken = [task.trial.number for task in own if holders.get(task.trial.number) is other]
            if other.end(taken) and not self._wait_until_ended(other, taken):
                own = [task for task in own if task.trial.number not in taken]
        return own

    def _wait_until_ended(self, slot: Slot, trials: Sequence[int]) -> bool:
        """Waits until an idle slot has let go of trials. Returns False if its process has ended instead."""
        passed = list[Event]()
        while True:
            event = self._get_event()
            # Trials that were stopped before may be answered now too.
            if event.slot == slot.number and (event.message is None or event.message.get("ended") == trials):
                break
            passed.append(event)
        if has_died := event.message is None:
            passed.append(event)
            # On another machine it may be asleep, and still write: nobody gets its trials before its lease is ended,
            # which the event leads to.
            slot.held |= set(trials)
            slot.is_idle = False
        self._passed.extendleft(reversed(passed))
        return not has_died

    def _prepare(self, task: Task, journal: Journal) -> bool:
        """Builds the assignment of a task; returns False if the recipe refuses the trial's values."""
        trial = task.trial
        if (trial.number, task.rung) in self._assignments:
            return True
        try:
            assignment = self._build(trial.number, trial.values, journal.state, task.to)
        except RecipeError as error:
            self._fail(Outcome(trial=trial.number, step=0, failure=str(error), kind="crashed"), task.rung, journal)
            return False
        self._assignments[trial.number, task.rung] = assignment
        return True

    def _build(self, trial: int, values: Values, state: State, to: Fraction) -> Assignment:
        """Builds the training of a trial up to a level. Its recipe is built once, which takes milliseconds."""
        if (whole := self._whole.get(trial)) is None:
            folder, levels = self._sweep.find_trial(trial), state.plan.find_bracket(trial).levels
            whole = build_assignment(self._settings, self._loaded, trial, values, levels, folder)
            self._whole[trial] = whole
            self._keys[trial] = describe_shared_values(whole.loaded)
        return replace(whole, until=find_step(to, whole.until))

    # Answers of slots.

    def _handle(self, event: Event, journal: Journal) -> bool:
        """Handles an answer of a slot. Returns False if it only counted steps."""
        slot, message = self._take(event)
        if message is None:
            self._handle_death(slot, journal)
        elif event.joined is not None:
            # asha decides by the number of slots.
            self._decide(journal)
        elif "outcome" in message:
            self._handle_outcome(slot, decode_outcome(message["outcome"]), journal)
        elif "fused" in message:
            fused = message["fused"]
            journal.append(Fused(**fused | {"trials": tuple(fused["trials"])}))
            self._say(message["says"])
        elif "says" in message:
            self._say(message["says"])
        elif "idle" in message:
            slot.is_idle = True
            self._feeders.leave(slot.number)
        else:
            self.steps += message.get("steps", 0)
            return False
        return True

    def _say(self, text: str) -> None:
        """Shows what a worker says; other workers may say the same."""
        if text and text not in self._said:
            self._said.add(text)
            LOG.info(text)

    def _note(self, slot: Slot, outcome: Outcome) -> None:
        slot.training.pop(outcome.trial, None)
        if outcome.kind != "done":
            slot.held.discard(outcome.trial)

    def _handle_outcome(self, slot: Slot, outcome: Outcome, journal: Journal) -> None:
        self._note(slot, outcome)
        rung = journal.state.trials[outcome.trial].rung
        if outcome.kind == "stopped":
            return
        if outcome.kind == "machine":
            fix = f"Mend it, and continue: {self._resume}"
            raise HeadwayError(f"trial {outcome.trial} cannot train: {outcome.failure}", fix=fix)
        if outcome.kind != "done":
            self._fail(outcome, rung, journal)
            return
        if outcome.metrics is None:
            what = f"it has reached step {outcome.step}, and its metrics.jsonl lacks the evaluation of this rung"
            self._fail(replace(outcome, failure=what, kind="crashed"), rung, journal)
            return
        score = outcome.metrics[self._settings.objective]
        # This trial shows that the sweep works, so those that crashed before it did so by themselves.
        crashes, self._crashes = self._crashes, []
        self._record([*crashes, build_result(outcome.trial, rung, score)], journal)

    def _fail(self, outcome: Outcome, rung: int, journal: Journal) -> None:
        result = Result(outcome.trial, rung, None, outcome.failure.splitlines()[0] if outcome.failure else "it failed")
        LOG.warning(f"Trial {outcome.trial} failed at step {outcome.step}: {result.reason}")
        if outcome.kind == "diverged":
            self._record([result], journal)
            return
        self._crashes.append(result)
        if len(self._crashes) >= MOST_CRASHES:
            how = (outcome.trace or outcome.failure).rstrip()
            what = f"{MOST_CRASHES} trials crashed one after another, the last one with:\n{how}"
            fix = f"Mend the cause, and continue: {self._resume}"
            raise UserCodeError(what, fix=fix) if outcome.trace else HeadwayError(what, fix=fix)

    def _record(self, results: Sequence[Result], journal: Journal) -> None:
        for result in results:
            journal.append(result)
            self._decide(journal)

    def _handle_death(self, slot: Slot, journal: Journal) -> None:
        """A process has ended that should not have: what it trained is tried again, each trial alone."""
        lost = list(slot.training)
        status = self._bury(slot)
        for trial in lost:
            if len(lost) == 1 and self._deaths[trial] >= MOST_CRASHES:
                what = f"its process ended {MOST_CRASHES} times, the last time with status {status}"
                rung = journal.state.trials[trial].rung
                self._fail(Outcome(trial=trial, step=0, failure=what, kind="crashed"), rung, journal)

    def _bury(self, slot: Slot) -> int:
        """Counts the death of a slot's process for each trial that it trained; returns its exit status."""
        lost, status = list(slot.training.values()), slot.take_status()
        slot.training = {}
        self._feeders.leave(slot.number)
        for one in lost:
            # Only deaths at one place are the trial's fault: a long one may lose several machines on its way.
            paths = open_checkpoints(RunFolder(one.folder), one.loaded).paths()
            if (place := paths[0].name if paths else None) != self._places.get(one.trial):
                self._deaths[one.trial], self._places[one.trial] = 0, place
            self._deaths[one.trial] += 1
        # The reception has said so if a lease ended.
        if lost and status != EXPIRED_STATUS:
            who = "A process of the sweep" if slot.host is None else f"A worker on {slot.host}"
            LOG.warning(f"{who} ended with status {status}; what it trained goes on, each alone.")
        if slot.host is not None:
            # The next worker of that machine gets a slot of its own.
            self._slots.remove(slot)
            self._left_core_s += slot.core_s
            self._machines.expect_some(self._slots)
        return status
