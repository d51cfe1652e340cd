"""The live view of a sweep."""

from __future__ import annotations

import io
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from tests._support import collect_messages

from headway.sweep import display
from headway.sweep.budget import Method, plan_brackets
from headway.sweep.display import SweepDisplay
from headway.sweep.halving import decide
from headway.sweep.records import Result, build_result
from headway.sweep.state import State, fold, list_tasks


class Rates:
    """Values of trials that need no space."""

    def draw(self, trial: int) -> dict[str, float]:
        return {"optimizer.lr": 0.1 + trial}

    def perturb(self, values: object, trial: int, rung: int) -> dict[str, float]:
        return self.draw(trial)


def run_states(*, higher_is_better: bool) -> list[State]:
    """The states of a sweep of nine trials, of which the first fails and the later ones are better."""
    state, states = State(plan_brackets(3, 3, Fraction(1, 9), "halving", higher_is_better=higher_is_better)), []
    while decisions := decide(state, Rates()):
        state = fold(state, decisions)
        for task in list_tasks(state):
            number = task.trial.number
            score = float(number + task.rung) * (1 if higher_is_better else -1)
            result = build_result(number, task.rung, score) if number else Result(number, task.rung, None, "it failed")
            state = fold(state, [result])
            states.append(state)
    return states


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_each_rung_is_told_once_with_its_best_trial(higher_is_better: bool) -> None:
    states = run_states(higher_is_better=higher_is_better)
    last = len(states[-1].trials) - 1
    sign = "" if higher_is_better else "-"
    with collect_messages() as said, SweepDisplay("accuracy", None, Console(file=io.StringIO())) as shown:
        for state in [*states, states[-1]]:
            shown.update(state, 7)
    assert [line.split(":")[0] for line in said] == [
        f"{len(states[-1].trials)} trials trained to 1/9 of a training",
        f"{states[-1].plan.brackets[0].sizes[1]} trials trained to 1/3 of a training",
        "1 trial trained to its end",
    ]
    assert f"best accuracy {sign}{last}.0000 (trial {last}), 1 failed." in said[0]
    assert f"best accuracy {sign}{last + 2}.0000 (trial {last})." in said[2]


def test_a_terminal_shows_the_best_trials_and_the_predicted_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "REFRESH_S", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with SweepDisplay("accuracy", 90.0, console) as shown:
        shown.update(run_states(higher_is_better=True)[-1], 1234)
    text = out.getvalue()
    assert "1,234 steps" in text
    assert "of about 1m30s" in text
    last = len(run_states(higher_is_better=True)[-1].trials) - 1
    assert f"optimizer.lr={0.1 + last}" in text


def run_asha(scores: list[float], *, higher_is_better: bool = True) -> list[State]:
    """The states of a sweep by asha whose trials have these scores in the order of their numbers, at every rung."""
    plan = plan_brackets(3, 3, Fraction(1, 9), "asha", max_trials=len(scores), higher_is_better=higher_is_better)
    state, states = State(plan), []
    while decisions := decide(state, Rates()):
        state = fold(state, decisions)
        (task,) = list_tasks(state)
        state = fold(state, [build_result(task.trial.number, task.rung, scores[task.trial.number])])
        states.append(state)
    return states


def tell(states: list[State]) -> list[str]:
    with collect_messages() as said, SweepDisplay("accuracy", None, Console(file=io.StringIO())) as shown:
        for state in states:
            shown.update(state, 7)
    return said


@given(st.lists(st.integers(0, 9), min_size=9, max_size=27), st.booleans())
@example([*range(27)], True)
def test_asha_tells_the_first_and_each_better_trial_of_the_highest_rung(scores: list[int], rises: bool) -> None:
    states = run_asha([float(score) for score in scores], higher_is_better=rises)
    said = [line for line in tell(states) if line.startswith("Trial ")]
    levels = [line.split("trained to ")[1].split(",")[0] for line in said]
    # The highest rung never falls.
    assert levels == sorted(levels, key=["1/9 of a training", "1/3 of a training", "its end"].index)
    for level in set(levels):
        found = [line for line in said if f"trained to {level}," in line]
        assert ["the first one" in line for line in found] == [True] + [False] * (len(found) - 1)
        told = [float(line.split("accuracy ")[1].rstrip(".")) for line in found]
        # An equal one with a lower number may take the place.
        assert told == sorted(told, reverse=not rises)
    # A continued sweep tells where it is, and no more.
    assert len([line for line in tell(states[-1:]) if line.startswith("Trial ")]) == 1


@pytest.mark.parametrize("method", ["halving", "asha"])
@given(tied=st.integers(0, 27))
def test_many_ties_at_the_first_rung_are_warned_of_once(method: Method, tied: int) -> None:
    scores = [0.1] * tied + [1.0 + number for number in range(27 - tied)]
    if method == "asha":
        states = run_asha(scores)
    else:
        state = State(plan_brackets(8, 3, Fraction(1, 9), "halving", max_trials=27))
        assert state.plan.trials == 27
        state = fold(state, decide(state, Rates()))
        states = [fold(state, [build_result(number, 0, score) for number, score in enumerate(scores)])]
    said = [line for line in tell([*states, states[-1]]) if "tied" in line]
    if method == "halving":
        assert said == [f"{tied} of 27 trials are tied at 1/9 of a training: raise --smallest."] * (tied >= 14)
    else:
        # It counts while its trials come.
        assert len(said) == (tied >= 5)
