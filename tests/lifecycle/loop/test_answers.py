"""How the networks of two rounds compare: gains with intervals, and what the gate lets pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import DataError
from headway.lifecycle.loop.answers import compare, compute_gain, read_answers, write_answers

ANSWERS = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


@given(ANSWERS)
def test_a_comparison_undone_changes_its_sign(pairs: list[tuple[bool, bool]]) -> None:
    before, after = np.array(pairs).T
    there, back = compare(before, after, drop=0, bound=None), compare(after, before, drop=0, bound=None)
    assert there.drop == pytest.approx(-back.drop)
    assert (there.won, there.lost) == (back.lost, back.won)
    assert there.drop == pytest.approx(100 * (before.mean() - after.mean()))
    # The bound holds what was seen, and more.
    assert there.bound >= there.drop - 1e-9
    assert there.passed == (there.lost <= there.won)
    assert compare(before, before, drop=0, bound=None).passed


def test_the_gate_may_also_ask_for_the_bound() -> None:
    before = np.zeros(50, np.bool_)
    after = before.copy()
    after[:2] = True
    assert compare(before, after, drop=0, bound=None).passed
    # Two of 50 won: with 50 images nobody can be sure that it is no worse by half a point.
    assert not compare(before, after, drop=0, bound=0.5).passed
    assert compare(np.tile(before, 100), np.tile(after, 100), drop=0, bound=0.5).passed


def test_a_gain_is_shown_where_there_is_one_and_not_where_there_is_none() -> None:
    generator = np.random.default_rng(1)
    hard = generator.random(400)
    members = [hard < share + generator.normal(0, 0.05, 400) for share in (0.7, 0.7, 0.7)]
    better = [hard < share + generator.normal(0, 0.05, 400) for share in (0.8, 0.8, 0.8)]
    gain = compute_gain(np.stack(members), np.stack(better))
    assert 0 < gain.low < gain.mean < gain.high
    assert gain == compute_gain(np.stack(members), np.stack(better)), "the draws have a seed"
    back = compute_gain(np.stack(better), np.stack(members))
    assert back.mean == pytest.approx(-gain.mean)
    none = compute_gain(np.stack(members), np.stack(members[::-1]))
    assert none.low < 0 < none.high


def test_answers_come_back_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "answers.safetensors"
    right = np.random.default_rng(0).random((3, 17)) < 0.5
    write_answers(path, right)
    assert (read_answers(path) == right).all()
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="answers"):
        read_answers(path)
