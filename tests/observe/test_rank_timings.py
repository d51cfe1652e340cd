"""What ranks write on a board is read whole, of one interval, and once; nobody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.comm._ranks import Rank, run_ranks
from torch.distributed import HashStore

from headway.observe.rank_timings import RankTimings


def boards(size: int) -> list[RankTimings]:
    store = HashStore()
    return [RankTimings(store, rank, size) for rank in range(size)]


def test_nothing_is_read_before_all_have_written() -> None:
    one, two, three = boards(3)
    one.write(5, [1.0])
    two.write(5, [2.0])
    assert one.read() is None
    three.write(5, [3.0])
    found = one.read()
    assert found is not None
    assert found[0] == 5
    assert found[1].tolist() == [[1.0], [2.0], [3.0]]


def test_an_interval_is_read_once() -> None:
    one, two = boards(2)
    for board in (one, two):
        board.write(5, [1.0, 2.0])
    assert one.read() is not None
    assert one.read() is None
    one.write(10, [1.0, 2.0])
    assert one.read() is None  # the other has not written it yet
    two.write(10, [3.0, 4.0])
    found = one.read()
    assert found is not None
    assert found[0] == 10
    assert found[1].tolist() == [[1.0, 2.0], [3.0, 4.0]]


@given(st.integers(2, 5), st.data())
def test_numbers_of_two_intervals_are_never_mixed(size: int, data: st.DataObject) -> None:
    """Ranks are at most one interval apart, as they meet in between; whoever reads sees each interval as it was."""
    made = boards(size)
    behind: list[int] = []
    told = 0
    for step in range(1, 8):
        for rank in behind:
            made[rank].write(step - 1, [step - 1, rank])
        behind = data.draw(st.lists(st.integers(1, size - 1), unique=True))
        for rank in set(range(size)) - set(behind):
            made[rank].write(step, [step, rank])
        newest, found = step - bool(behind), made[0].read()
        if newest == told:  # read before, or none yet
            assert found is None
        else:
            assert found is not None
            assert found[0] == newest
            assert found[1].tolist() == [[newest, rank] for rank in range(size)]
        told = newest


def test_a_world_of_one_and_a_store_that_is_gone() -> None:
    alone = RankTimings(None, 0, 1)
    alone.write(5, [1.0])
    assert alone.read() is None

    class Gone:
        def set(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe")

        def check(self, *_: Any) -> bool:
            raise RuntimeError("Broken pipe")

        multi_get: Any = check

    board = RankTimings(Gone(), 0, 2)
    board.write(5, [1.0])
    assert board.read() is None


def written(rank: Rank) -> list[Any]:
    board, out = RankTimings(rank.world.store, rank.rank, rank.size), []
    for step in (3, 6, 9):
        board.write(step, [float(rank.rank), step / 10])
        rank.world.control.barrier()
        if rank.rank == 0:
            out.append(board.read())
    return out


def test_by_way_of_the_store_of_a_generation() -> None:
    """A write is sent and not waited for, so the newest interval may come a moment after the meeting."""
    found, *others = run_ranks(3, written)
    assert others == [[], []]
    seen = [one for one in found if one is not None]
    assert seen
    for step, numbers in seen:
        assert step in (3, 6, 9)
        assert numbers == pytest.approx(np.array([[rank, step / 10] for rank in range(3)]))
