"""Decisions of a sweep: which trials start, go on, are forked or stop. Pure functions of the state.

The coordinator appends a result to the journal, calls `decide`, appends the decisions, and runs what `list_tasks` has
that does not run yet. Calling `decide` after each result makes decisions a function of the order of results alone,
so they are the same after a restart, wherever the journal ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Protocol

from headway.sweep.population import decide_population
from headway.sweep.records import Created, Decision, Forked, Promoted, Stopped, Values
from headway.sweep.rungs import Bracket
from headway.sweep.state import State, fold, list_tasks, select_best


class ValueSource(Protocol):
    """The space of values, as far as decisions need it. Both are pure functions."""

    def draw(self, trial: int) -> Values:
        """Returns the values of a new trial."""

    def perturb(self, values: Values, trial: int, rung: int) -> Values:
        """Returns the values of a fork, given its parent's; see `perturb_values`."""


def decide(state: State, source: ValueSource, slots: int = 1) -> list[Decision]:
    """Returns all decisions that can be made now. None of them is possible again once they are in the state.

    Args:
        source: the values of new trials and forks.
        slots: trials that train at once. Only `asha` depends on it: the other methods decide on whole rungs.
    """
    return [_fill(decision, state, source) for decision in _choose(state, slots)]


def is_over(state: State) -> bool:
    """Returns True if nothing trains and nothing more can be decided."""
    return not list_tasks(state) and not _choose(state, 1)


def _fill(decision: Decision, state: State, source: ValueSource) -> Decision:
    if isinstance(decision, Created):
        return replace(decision, values=source.draw(decision.trial))
    if isinstance(decision, Forked):
        values = source.perturb(state.trials[decision.parent].values, decision.trial, decision.rung)
        return replace(decision, values=values)
    return decision


def _choose(state: State, slots: int) -> list[Decision]:
    """Returns the decisions, without values."""
    if state.plan.method == "asha":
        return list(_decide_asha(state, slots))
    if state.plan.method == "pbt":
        return list(decide_population(state))
    return [decision for bracket in state.plan.brackets for decision in _decide_bracket(state, bracket)]


def _decide_bracket(state: State, bracket: Bracket) -> Iterator[Decision]:
    """Yields the decisions of synchronous halving; of `random` too, whose bracket has one rung."""
    first, size = bracket.first_trial, bracket.sizes[0]
    # Missing trials, and not only all or none: a crash may have cut the journal between two of them.
    known = len(state.trials)
    yield from (Created(number, {}) for number in range(max(first, known), first + size))
    entrants = state.trials[first : first + size]
    if len(entrants) < size:
        return
    for rung, places in enumerate(bracket.sizes[1:]):
        if not all(trial.has_result(rung) for trial in entrants):
            return
        # Failed trials take no place, and their places stay empty.
        chosen = {trial.number for trial in select_best(entrants, rung, places, state.plan)}
        for trial in entrants:
            if trial.rung > rung or trial.is_stopped or trial.has_failed:
                continue
            yield Promoted(trial.number, rung + 1) if trial.number in chosen else Stopped(trial.number, rung)
        entrants = tuple(trial for trial in entrants if trial.number in chosen)


def _decide_asha(state: State, slots: int) -> Iterator[Decision]:
    """Yields one decision for each free slot (ASHA by promotion, arXiv 1810.05934, algorithm 2)."""
    free = slots - sum(trial.is_training for trial in state.trials)
    while free > 0 and (decision := _find_promotion(state)) is not None:
        yield decision
        state, free = fold(state, [decision]), free - 1


def _find_promotion(state: State) -> Promoted | Created | None:
    """Returns what a free worker does: the highest promotion that the budget pays, else a new trial, else nothing."""
    plan, bracket = state.plan, state.plan.brackets[0]
    levels, rungs = bracket.levels, Counter(trial.rung for trial in state.trials)
    # Trials that still train, and those that failed, are counted in full, so the budget is never exceeded.
    left = plan.budget - sum((count * levels[rung] for rung, count in rungs.items()), Fraction(0))
    for rung in range(len(levels) - 2, -1, -1):
        arrived = [trial for trial in state.trials if trial.has_result(rung)]
        if len(arrived) < plan.eta or levels[rung + 1] - levels[rung] > left:
            continue
        for trial in select_best(arrived, rung, len(arrived) // plan.eta, plan):
            if trial.rung == rung:
                return Promoted(trial.number, rung + 1)
    if len(state.trials) < bracket.sizes[0] and levels[0] <= left:
        return Created(len(state.trials), {})
    return None
