from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.untrusted_json import JsonError
from headway.sweep.budget import METHODS, Method
from headway.sweep.records import (
    Created,
    Forked,
    Planned,
    Promoted,
    Record,
    Result,
    Stopped,
    UnknownRecordError,
    build_result,
    decode_record,
    encode_record,
)
from headway.sweep.state import RecordError, State, fold, list_tasks

from ._sweeps import Scores, go_on, make_plan

PLAN = make_plan("halving", 4, 3, 9)
# Trials 0 and 1 have a result, 2 trains, 3 has failed, 4 has been stopped, and 5 trains to rung 1.
BEFORE: list[Record] = [
    *(Created(number, {}) for number in range(6)),
    Result(0, 0, 0.5),
    Result(1, 0, 0.5),
    Result(3, 0, None, "out of memory"),
    Result(4, 0, 0.1),
    Result(5, 0, 0.9),
    Stopped(4, 0),
    Promoted(5, 1),
]


def test_the_state_says_who_trains() -> None:
    state = fold(State(PLAN), BEFORE)
    assert [(task.trial.number, task.rung) for task in list_tasks(state)] == [(2, 0), (5, 1)]
    assert [trial.is_training for trial in state.trials] == [False, False, True, False, False, True]
    assert [trial.has_failed for trial in state.trials] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Planned(PLAN), "the sweep was planned before"),
        (Created(5, {}), "trial 5 is new, and 6 would be the next number"),
        (Created(7, {}), "trial 7 is new, and 6 would be the next number"),
        (Result(6, 0, 0.1), "there is no trial 6"),
        (Result(0, 0, 0.5), "trial 0 does not train to rung 0"),
        (Result(2, 1, 0.5), "trial 2 does not train to rung 1"),
        (Result(3, 0, 0.5), "trial 3 does not train to rung 0"),
        (Result(4, 1, 0.5), "trial 4 does not train to rung 1"),
        (Promoted(0, 2), "trial 0 does not go on to rung 2"),
        (Promoted(0, 0), "trial 0 does not go on to rung 0"),
        (Promoted(2, 1), "trial 2 trains, has failed or is stopped"),
        (Promoted(3, 1), "trial 3 trains, has failed or is stopped"),
        (Promoted(4, 1), "trial 4 trains, has failed or is stopped"),
        (Promoted(5, 2), "trial 5 trains, has failed or is stopped"),
        (Stopped(0, 1), "trial 0 is not at rung 1"),
        (Stopped(4, 0), "trial 4 trains, has failed or is stopped"),
        (Forked(6, 7, 1, {}), "trial 6 is a fork of trial 7, which does not exist"),
        (Forked(6, 6, 1, {}), "trial 6 is a fork of trial 6, which does not exist"),
        (Forked(6, 2, 1, {}), "trial 6 is a fork of trial 2, which has not reached rung 0"),
        (Forked(6, 3, 1, {}), "trial 6 is a fork of trial 3, which has not reached rung 0"),
        (Forked(6, 0, 0, {}), "trial 6 is a fork of trial 0, which has not reached rung -1"),
        (Forked(6, 0, 2, {}), "trial 6 is a fork of trial 0, which has not reached rung 1"),
    ],
)
def test_a_record_that_does_not_fit_is_refused(record: Record, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        fold(State(PLAN), [*BEFORE, record])


def test_nothing_goes_beyond_the_last_rung() -> None:
    after = [*BEFORE, Result(5, 1, 0.9), Promoted(5, 2), Result(5, 2, 0.9)]
    assert fold(State(PLAN), after).trials[5].scores == (0.9, 0.9, 0.9)
    for record in (Promoted(5, 3), Forked(6, 5, 3, {})):
        with pytest.raises(RecordError):
            fold(State(PLAN), [*after, record])


@given(st.sampled_from(METHODS), st.integers(0, 99), st.data())
def test_the_state_of_a_whole_is_that_of_its_parts(method: Method, seed: int, data: st.DataObject) -> None:
    records = go_on(make_plan(method, 4, 2, 4, seed=seed), Scores(seed))
    cut = data.draw(st.integers(0, len(records)))
    state = State(make_plan(method, 4, 2, 4, seed=seed))
    before = fold(state, records[:cut])
    assert fold(before, records[cut:]) == fold(state, records)
    assert before == fold(state, records[:cut])


@given(st.sampled_from(METHODS), st.integers(0, 99))
def test_every_record_survives_json(method: Method, seed: int) -> None:
    plan = make_plan(method, 4, 2, 4, seed=seed, higher_is_better=bool(seed % 2))
    for record in (Planned(plan), *go_on(plan, Scores(seed))):
        assert decode_record(encode_record(record)) == record


def test_a_score_that_is_not_finite_is_a_failure() -> None:
    assert build_result(1, 2, float("nan")) == Result(1, 2, None, "the score is nan")
    assert build_result(1, 2, float("-inf")) == Result(1, 2, None, "the score is -inf")
    assert build_result(1, 2, 1) == Result(1, 2, 1.0)


RESULT = {"kind": "result", "trial": 0, "rung": 0, "score": 0.5, "reason": ""}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (RESULT | {"trial": -1}, "it has -1 as trial, not a whole number"),
        (RESULT | {"rung": True}, "it has a truth value as rung, not a whole number"),
        (RESULT | {"score": float("inf")}, "it has inf as score, not a finite number or null"),
        (RESULT | {"score": "0.5"}, "it has '0.5' as score"),
        (RESULT | {"more": 1}, "it has the unknown entry 'more'"),
        ({"kind": "result", "trial": 0}, "it lacks rung"),
        ({"kind": "created", "trial": 0, "values": []}, "it has a list as values, not an object"),
        (encode_record(Planned(PLAN)) | {"budget": "1e99"}, "it has '1e99' as budget, not a fraction above 0"),
        (encode_record(Planned(PLAN)) | {"budget": "1/0"}, "it has '1/0' as budget"),
        (encode_record(Planned(PLAN)) | {"method": "grid"}, "it has 'grid' as method, not one of random, halving"),
        (encode_record(Planned(PLAN)) | {"eta": 1}, "it has 1 as eta, not a whole number of at least 2"),
        (encode_record(Planned(PLAN)) | {"method": []}, "it has a list as method"),
        (encode_record(Planned(PLAN)) | {"brackets": []}, "it has a list as brackets"),
        (
            encode_record(Planned(PLAN)) | {"brackets": [{"first_trial": 0, "levels": ["1"], "sizes": [1, 2]}]},
            "a bracket needs as many levels as sizes",
        ),
    ],
)
def test_a_damaged_record_is_refused(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(JsonError, match=message):
        decode_record(tree)


@pytest.mark.parametrize("tree", [RESULT | {"kind": "paused"}, RESULT | {"kind": []}, {}])
def test_an_unknown_kind_is_refused(tree: dict[str, Any]) -> None:
    with pytest.raises(UnknownRecordError, match="which this version of Headway does not know"):
        decode_record(tree)
    with pytest.raises(UnknownRecordError, match="another version of Headway wrote it"):
        decode_record(encode_record(Planned(PLAN)) | {"version": 2})
