"""The state of a sweep: a fold over the records of its journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import itemgetter
from typing import Any, final

from headway.sweep.budget import Plan
from headway.sweep.records import Created, Forked, Fused, Planned, Promoted, Record, Result, Stopped, Values
from headway.sweep.rungs import Bracket


@final
class RecordError(ValueError):
    """A record does not fit those before it, for example a result of a trial that does not train."""


@final
@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial: a recipe with values of its own, and a run folder.

    Attributes:
        parent: the trial that it is a fork of.
        first_rung: the first rung that it trains to; above 0 for a fork.
        rung: the rung that it trains to, or has reached.
        scores: one for each rung reached, from `first_rung` on; None if it failed on the way there.
        reason: why it failed.
        is_stopped: True if it was decided that it does not go on.
        together: trials that take a pass together up to its rung, in their places; none: it trains by itself; None:
            that is not decided.
    """

    number: int
    values: Values
    parent: int | None = None
    first_rung: int = 0
    rung: int = 0
    scores: tuple[float | None, ...] = ()
    reason: str = ""
    is_stopped: bool = False
    together: tuple[int, ...] | None = None

    @property
    def is_training(self) -> bool:
        """True from the decision that it trains to a rung until the result there."""
        return len(self.scores) <= self.rung - self.first_rung

    @property
    def has_failed(self) -> bool:
        """True if it has not reached its rung and never will."""
        return not self.is_training and self.scores[-1] is None

    def has_result(self, rung: int) -> bool:
        """Returns True if there is a result for a rung, also of a failure on the way there."""
        return 0 <= rung - self.first_rung < len(self.scores)

    def get_score(self, rung: int) -> float | None:
        """Returns the score at a rung; None if the trial failed on the way there."""
        return self.scores[rung - self.first_rung]


@final
@dataclass(frozen=True)
class Task:
    """Training to do: resume a trial, or start or fork it, and train until a fraction of a full training.

    Attributes:
        trial: the trial to train.
        rung: its result is to be recorded for this rung.
        start, to: fractions of a full training; `start` is 0 for a new trial.
        parent: the trial whose checkpoint at `start` it forks; None for all others.
    """

    trial: Trial
    rung: int
    start: Fraction
    to: Fraction
    parent: int | None


@final
@dataclass(frozen=True)
class State:
    """Everything that was decided and found out; `trials` are in the order of their numbers.

    Attributes:
        gains: number of trials that are fused at once, and the gain, for each network that was measured.
    """

    plan: Plan
    trials: tuple[Trial, ...] = ()
    gains: Mapping[str, tuple[int, float]] = field(default_factory=dict)


def fold(state: State, records: Iterable[Record]) -> State:
    """Returns the state after more records; before the first decision it is `State(plan)`.

    Raises:
        RecordError: a record does not fit those before it.
    """
    trials, gains = list(state.trials), dict(state.gains)
    for record in records:
        if isinstance(record, Planned):
            raise RecordError("the sweep was planned before")
        if isinstance(record, Created | Forked):
            trials.append(_begin(record, state.plan, trials))
            continue
        if isinstance(record, Fused):
            gains[record.network] = record.at_once, record.gain
            for number in record.trials:
                _expect(number < len(trials) and trials[number].is_training, f"trial {number} does not train")
                trials[number] = replace(trials[number], together=record.find_places(number))
            continue
        _expect(record.trial < len(trials), f"there is no trial {record.trial}")
        trials[record.trial] = _change(trials[record.trial], record, state.plan)
    return State(state.plan, tuple(trials), gains)


def list_tasks(state: State) -> list[Task]:
    """Returns all training that was decided and has no result yet, in the order in which it should begin.

    After a restart these are the trials to resume; some of them may have run before.
    """
    tasks = [_build_task(trial, state.plan.find_bracket(trial.number)) for trial in state.trials if trial.is_training]
    # A fork needs its parent's checkpoint, which the parent may remove once it goes on.
    return sorted(tasks, key=lambda task: task.parent is None)


def list_fuse_choices(state: State, trials: Iterable[int]) -> dict[str, Any]:
    """Returns as a JSON object what is decided on fusing these trials, and every gain that was measured."""
    places = ((trial, state.trials[trial].together) for trial in trials)
    return {"chosen": [one for one in places if one[1] is not None], "measured": dict(state.gains)}


def list_scores(state: State, trial: Trial) -> list[tuple[Fraction, float]]:
    """Lists the levels that a trial has reached itself, and its scores there."""
    levels = state.plan.find_bracket(trial.number).levels
    scores = enumerate(trial.scores, trial.first_rung)
    return [(levels[rung], score) for rung, score in scores if score is not None]


def rank_trials(state: State) -> list[int]:
    """Returns the numbers of all trials that reached a rung, the best first.

    Those that trained longest come first; among equals the score decides, then the lower number.
    """
    sign = -1 if state.plan.higher_is_better else 1
    newest = [(trial.number, list_scores(state, trial)[-1:]) for trial in state.trials]
    ranked = [(-level, sign * score, number) for number, points in newest for level, score in points]
    return [number for _, _, number in sorted(ranked)]


def select_best(trials: Iterable[Trial], rung: int, places: int, plan: Plan) -> list[Trial]:
    """Returns the best trials by their score at a rung, the best first; the lower number among equals.

    Failed trials are never among them, so there may be fewer than `places`.
    """
    sign = -1 if plan.higher_is_better else 1
    scores = [(sign * score, trial.number, trial) for trial in trials if (score := trial.get_score(rung)) is not None]
    return [trial for _, _, trial in sorted(scores, key=itemgetter(0, 1))[:places]]


def _build_task(trial: Trial, bracket: Bracket) -> Task:
    start = bracket.levels[trial.rung - 1] if trial.rung else Fraction(0)
    parent = trial.parent if trial.rung == trial.first_rung else None
    return Task(trial, trial.rung, start, bracket.levels[trial.rung], parent)


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise RecordError(otherwise)


def _begin(record: Created | Forked, plan: Plan, trials: Sequence[Trial]) -> Trial:
    number = record.trial
    _expect(number == len(trials), f"trial {number} is new, and {len(trials)} would be the next number")
    if isinstance(record, Created):
        return Trial(number=number, values=record.values)
    rung, parent = record.rung, record.parent
    _expect(parent < number, f"trial {number} is a fork of trial {parent}, which does not exist")
    has_reached = trials[parent].has_result(rung - 1) and trials[parent].get_score(rung - 1) is not None
    _expect(has_reached, f"trial {number} is a fork of trial {parent}, which has not reached rung {rung - 1}")
    _expect(rung < len(plan.find_bracket(number).levels), f"trial {number} is a fork after the last rung")
    return Trial(number=number, values=record.values, parent=parent, first_rung=rung, rung=rung)


def _change(trial: Trial, record: Promoted | Stopped | Result, plan: Plan) -> Trial:
    number, rung = trial.number, record.rung
    if isinstance(record, Result):
        _expect(trial.is_training and trial.rung == rung, f"trial {number} does not train to rung {rung}")
        return replace(trial, scores=(*trial.scores, record.score), reason=record.reason)
    waits = not (trial.is_training or trial.has_failed or trial.is_stopped)
    _expect(waits, f"trial {number} trains, has failed or is stopped, so it cannot go on or stop")
    if isinstance(record, Stopped):
        _expect(trial.rung == rung, f"trial {number} is not at rung {rung}")
        return replace(trial, is_stopped=True)
    is_next = trial.rung + 1 == rung < len(plan.find_bracket(number).levels)
    _expect(is_next, f"trial {number} does not go on to rung {rung}")
    return replace(trial, rung=rung, together=None)
