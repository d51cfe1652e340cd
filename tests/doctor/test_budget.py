"""Limits of wall time: what is left is shared, and a slow machine leaves out what it can do without."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import packed_digits, write_recipe

from headway.doctor.budget import FULL, QUICK, Budget, WallTime
from headway.doctor.examination import WANTING, examine_job
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.rank_examination import TRIES_S, split_wall_time
from headway.doctor.rank_exchange import TOGETHER_S
from headway.training.runs import load_recipe

PARTS = list(QUICK.list_parts())


def test_both_budgets_fit_into_what_is_promised() -> None:
    """With five seconds to start in, and one to write what was found."""
    for budget, promised in ((FULL, 120), (QUICK, 45)):
        assert sum(budget.list_parts().values()) + 5 <= budget.wall <= promised - 5


def test_ranks_keep_time_for_what_they_measure_together() -> None:
    """What each of them measures by itself has to be over by then, and what overruns shortens the rest."""
    for budget, tries_s in ((FULL, TRIES_S), (QUICK, 0.0)):
        mine, wall = split_wall_time(budget, perf_counter() - budget.wall / 2, tries_s=tries_s)
        kept = budget.wall - mine.wall
        assert 0 < kept < budget.wall / 3
        assert wall.allot("whole") == TOGETHER_S
        _, late = split_wall_time(budget, perf_counter() - mine.wall - kept / 2, tries_s=tries_s)
        assert late.allot("single") < budget.whole
        _, over = split_wall_time(budget, perf_counter() - budget.wall, tries_s=tries_s)
        assert over.allot("single") == over.allot("whole") == 0


@given(st.lists(st.floats(0.1, 4.0), min_size=len(PARTS), max_size=len(PARTS)))
def test_parts_that_take_longer_leave_less_to_those_behind_them(slower: list[float]) -> None:
    """However long each takes of what it was given, the shares of those to come never ask for more than is left."""
    now = 0.0
    wall = WallTime(QUICK.wall, QUICK.list_parts(), 0.0, lambda: now)
    for place, part in enumerate(PARTS):
        allotted = wall.allot(part)
        assert allotted <= QUICK.list_parts()[part] * (1 + 1e-9)
        rest = sum(wall.allot(other) for other in PARTS[place:])
        assert min(rest, wall.allot(part)) <= wall.left_s * (1 + 1e-9)
        now += slower[place] * allotted
    assert now <= QUICK.wall + 3.0 * max(QUICK.list_parts().values())


def test_a_part_that_overruns_takes_from_the_others_alike() -> None:
    now = 0.0
    wall = WallTime(10.0, {"one": 4.0, "two": 4.0, "three": 4.0}, 0.0, lambda: now)
    assert wall.allot("one") == pytest.approx(4 * 10 / 12)
    now = 8.0
    assert wall.allot("two") == wall.allot("three") / 2 == pytest.approx(1.0)
    now = 11.0
    assert wall.allot("three") == wall.left_s == 0


def test_what_fits_leaves_room_for_what_matters_more() -> None:
    wall = WallTime(10.0, {"one": 1.0}, 5.0, lambda: 8.0)
    assert wall.left_s == 7
    assert wall.fits(7.0)
    assert not wall.fits(7.1)
    assert wall.fits(3.0, keeps_s=4.0)
    assert not wall.fits(3.5, keeps_s=4.0)


@pytest.mark.check
def test_without_time_the_doctor_still_concludes(tmp_path: Path) -> None:
    """By a clock on which each look takes ten seconds."""
    packed_digits(tmp_path, per_class=30, mode="seekable")
    write_recipe(tmp_path / "plain.yaml")
    ticks = itertools.count(0, 10)
    budget = Budget(each=0.2, passes=0.1, side=0.1, whole=0.2, tries=0.2, wall=45.0)
    with closing(MeasurementJob.from_recipe(load_recipe(tmp_path / "plain.yaml", ("data.cache=none",)))) as job:
        found = examine_job(job, budget, quick=True, clock=lambda: float(next(ticks)))
    by_name = {one.name: one for one in found.runs}
    assert by_name["warm"].steps > 0
    assert found.measured is not None
    for name in ("synthetic", "replay", "cold"):
        assert (by_name[name].images_s, by_name[name].note) == (None, WANTING)
    assert any("no time left" in one for one in found.not_measured)
