"""Decisions of population based training (PBT, arXiv 1711.09846): forks of the best replace the worst."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headway.core.random_keys import draw_integers, draw_uniform, make_keys
from headway.sweep.records import Created, Decision, Forked, Promoted, Stopped, Values
from headway.sweep.state import State, Trial, select_best

# One member of five is replaced after each interval, as in the paper.
REPLACED_SHARE = 5

# Views of the random keys: other numbers than those of the first values, which have view 0.
_PARENT_VIEW, _VALUE_VIEW = 1, 2


def decide_population(state: State) -> Iterator[Decision]:
    """Yields the decisions of a population: forks, then who stops, then who goes on.

    Forks come first because they need their parent's checkpoint at the end of the interval, before it goes on.
    """
    population = state.plan.brackets[0].sizes[0]
    known = len(state.trials)
    yield from (Created(number, {}) for number in range(known, population))
    members = list(range(population)) if known >= population else []
    next_number = population
    for rung in range(len(state.plan.brackets[0].levels) - 1):
        # Where a crash has cut the journal between two forks, members before them do not train yet either.
        if not members or not all(state.trials[one].has_result(rung) for one in members):
            return
        trials = [state.trials[one] for one in members]
        best, replaced = _select(trials, rung, state)
        forks = list(range(next_number, next_number + len(replaced))) if best else []
        next_number += len(forks)
        for fork in forks:
            if fork >= known:
                yield Forked(fork, _draw_parent(best, fork, rung, state.plan.seed), rung + 1, {})
        leaving = {trial.number for trial in replaced}
        for trial in sorted(trials, key=lambda trial: (trial.number not in leaving, trial.number)):
            if trial.rung > rung or trial.is_stopped or trial.has_failed:
                continue
            yield Stopped(trial.number, rung) if trial.number in leaving else Promoted(trial.number, rung + 1)
        members = [one for one in members if one not in leaving] + forks


def perturb_values(
    values: Values, ranges: Mapping[str, tuple[float, float]], seed: int, trial: int, rung: int
) -> dict[str, Any]:
    """Returns values of which the numeric ones are multiplied by 0.8 or 1.2 and clipped to their ranges.

    Whole numbers stay whole and are rounded away from the old value, so that small ones change too.

    Args:
        ranges: least and greatest value, both finite, of each key to perturb; all others stay as they are.
        seed, trial, rung: what the choice depends on.
    """
    changed = dict(values)
    key = make_keys(seed, rung, [trial], _VALUE_VIEW)
    # The stream is the place among all names: a value that this trial does not have moves no other choice.
    for stream, name in enumerate(sorted(ranges)):
        value, (low, high) = values.get(name), ranges[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        grows = draw_uniform(key, stream)[0] >= 0.5
        if isinstance(value, float):
            changed[name] = float(min(max(value * (1.2 if grows else 0.8), low), high))
        else:
            # Integer arithmetic: 35 * 1.2 is 42 exactly.
            whole = -(-value * 6 // 5) if grows else value * 4 // 5
            changed[name] = min(max(whole, math.ceil(low)), math.floor(high))
    return changed


def _select(trials: list[Trial], rung: int, state: State) -> tuple[list[Trial], list[Trial]]:
    """Returns possible parents, and the members to replace: the worst, and all that failed."""
    ranked = select_best(trials, rung, len(trials), state.plan)
    failed = [trial for trial in trials if trial.get_score(rung) is None]
    share = max(1, len(trials) // REPLACED_SHARE)
    best = ranked[:share]
    # A parent is never replaced: with two members or fewer successes there may be nobody else.
    spare = ranked[len(best) :]
    worst = spare[max(0, len(spare) - max(0, share - len(failed))) :]
    return best, sorted(failed + worst, key=lambda trial: trial.number)


def _draw_parent(best: list[Trial], fork: int, rung: int, seed: int) -> int:
    key = make_keys(seed, rung, [fork], _PARENT_VIEW)
    return best[int(draw_integers(key, 0, 0, len(best))[0])].number
