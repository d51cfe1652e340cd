from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.halving import decide, is_over
from headway.sweep.population import perturb_values
from headway.sweep.records import Created, Forked, Promoted, Record, Result, Stopped
from headway.sweep.state import State, fold, list_tasks

from ._sweeps import RANGES, Scores, Source, go_on, make_plan


def build_generation(scores: Sequence[float | None]) -> State:
    """A population after its first interval."""
    plan = make_plan("pbt", len(scores), smallest=4)
    state = fold(State(plan), [Created(number, Source().draw(number)) for number in range(len(scores))])
    return fold(state, [Result(number, 0, score) for number, score in enumerate(scores)])


def test_forks_of_the_best_fifth_replace_the_worst_fifth() -> None:
    state = build_generation([number / 10 for number in range(10)])
    decisions = decide(state, Source())
    forks = [one for one in decisions if isinstance(one, Forked)]
    assert [fork.trial for fork in forks] == [10, 11]
    assert {fork.parent for fork in forks} <= {8, 9}
    assert decisions[:2] == forks
    assert decisions[2:4] == [Stopped(0, 0), Stopped(1, 0)]
    assert decisions[4:] == [Promoted(number, 1) for number in range(2, 10)]
    for fork in forks:
        assert fork.values == Source().perturb(state.trials[fork.parent].values, fork.trial, 1)
    tasks = list_tasks(fold(state, decisions))
    # Forks begin first, while their parents' checkpoints are the last ones.
    assert [(task.trial.number, task.parent) for task in tasks[:2]] == [(fork.trial, fork.parent) for fork in forks]
    assert {(float(task.start), float(task.to)) for task in tasks} == {(0.25, 0.5)}


def test_all_that_failed_are_replaced_as_long_as_one_member_is_left() -> None:
    state = build_generation([None, 0.1, None, 0.3, None])
    decisions = decide(state, Source())
    assert [(one.trial, one.parent) for one in decisions if isinstance(one, Forked)] == [(5, 3), (6, 3), (7, 3)]
    assert [one for one in decisions if not isinstance(one, Forked)] == [Promoted(1, 1), Promoted(3, 1)]
    assert is_over(build_generation([None] * 3))
    assert decide(build_generation([0.5]), Source()) == [Promoted(0, 1)]


@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.0, 0.4]))
def test_a_population_keeps_its_size(members: int, intervals: int, seed: int, failing: float) -> None:
    plan = make_plan("pbt", members, smallest=intervals, seed=seed)
    sizes = list[int]()

    def count(state: State, decisions: Sequence[Record]) -> None:
        if decisions:
            sizes.append(len(list_tasks(fold(state, decisions))))

    records = go_on(plan, Scores(seed, failing), decided=count)
    if failing == 0:
        assert sizes == [members] * intervals
    assert set(sizes) == {members}
    stopped = {record.trial for record in records if isinstance(record, Stopped)}
    assert stopped.isdisjoint(record.parent for record in records if isinstance(record, Forked)) or len(sizes) > 1


@given(
    st.floats(1e-4, 1.0),
    st.integers(1, 64),
    st.integers(0, 2**40),
    st.integers(0, 1000),
    st.integers(1, 50),
)
def test_values_move_by_a_fifth_within_their_ranges(lr: float, width: int, seed: int, trial: int, rung: int) -> None:
    values = {"lr": lr, "width": width, "norm": "batch", "bias": True, "free": 3.0}
    moved = perturb_values(values, {**RANGES, "bias": (0, 1), "absent": (0, 1)}, seed, trial, rung)
    assert values["lr"] == lr
    assert moved.keys() == values.keys()
    assert {name: moved[name] for name in ("norm", "bias", "free")} == {"norm": "batch", "bias": True, "free": 3.0}
    assert moved["lr"] in (max(lr * 0.8, 1e-4), min(lr * 1.2, 1.0))
    assert moved["width"] in (max(math.floor(width * 4 / 5), 1), min(math.ceil(width * 6 / 5), 64))
    assert type(moved["width"]) is int
    assert moved == perturb_values(values, {**RANGES, "bias": (0, 1), "absent": (0, 1)}, seed, trial, rung)


def test_both_directions_are_drawn_equally_and_apart() -> None:
    values = {"a": 1.0, "b": 1.0}
    ranges = {"a": (0.0, 9.0), "b": (0.0, 9.0)}
    moved = [perturb_values(values, ranges, 1, trial, rung) for trial in range(50) for rung in range(1, 9)]
    pairs = [(one["a"], one["b"]) for one in moved]
    for pair in ((0.8, 0.8), (0.8, 1.2), (1.2, 0.8), (1.2, 1.2)):
        # A quarter of 400 each; 30 is more than three standard deviations.
        assert abs(pairs.count(pair) - 100) < 30
