"""The slowest rank, by what the ranks' clocks would say of steps in which they wait for each other."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.observe.stragglers import (
    COLUMNS,
    COMPUTE_STAGES,
    ROW_FILE_KIND,
    describe_stragglers,
    find_slowest_rank,
)
from headway.page import renderer
from headway.report.straggler_panels import build_panels

Seconds = NDArray[np.float64]


def steps(own: Seconds, *, sums: float = 0.002) -> Seconds:
    """[..., ranks, COLUMNS] of steps of which each rank's own stages take `own` [..., ranks, stages]: who is done early
    waits in `reduce` until the last one comes, and then all take `sums`."""
    busy = own.sum(axis=-1)
    reduce = busy.max(axis=-1, keepdims=True) - busy + sums
    exchange, log = np.zeros_like(reduce), np.full_like(reduce, 1e-4)
    return np.concatenate([own, np.stack([exchange, reduce, log], axis=-1)], axis=-1)


def of(*stages: dict[str, float]) -> Seconds:
    """Own seconds of each rank: of some stages, all others the same everywhere."""
    usual = dict(zip(COMPUTE_STAGES, (0.001, 0.002, 0.01, 0.001, 0.02, 0.003), strict=True))
    return np.array([[{**usual, **rank}[stage] for stage in COMPUTE_STAGES] for rank in stages])


def test_one_slow_rank_is_found_with_its_stage() -> None:
    found = find_slowest_rank(steps(of({}, {}, {"wait": 0.021}, {})))
    assert found is not None
    assert (found.rank, found.stage) == (2, "wait")
    assert found.seconds == pytest.approx(0.02)
    assert found.share == pytest.approx(0.02 / (0.037 + 0.02 + 0.002 + 0.0001))


@given(
    st.lists(st.floats(0.001, 0.1), min_size=2, max_size=6),
    st.sampled_from(COMPUTE_STAGES),
    st.floats(0.001, 0.01),
)
def test_the_others_wait_as_long_as_it_computes(more: list[float], stage: str, sums: float) -> None:
    """Where ranks wait for each other, what the slowest takes longer is what the others wait longer."""
    seconds = steps(of(*({stage: value} for value in more)), sums=sums)
    found = find_slowest_rank(seconds)
    assert found is not None
    assert more[found.rank] == pytest.approx(max(more))
    step = seconds.sum(axis=1)[0]
    assert found.share * step == pytest.approx(found.seconds, abs=1e-9)
    others = [value for rank, value in enumerate(more) if rank != found.rank]
    assert found.seconds == pytest.approx(max(more) - np.median(others))
    assert found.stage == (stage if found.seconds > 1e-9 else found.stage)


def test_a_stage_is_named_only_where_it_explains_the_rest() -> None:
    both = find_slowest_rank(steps(of({}, {"wait": 0.011, "forward": 0.02}, {})))
    assert both is not None
    assert (both.rank, both.stage) == (1, None)
    mostly = find_slowest_rank(steps(of({}, {"wait": 0.011, "forward": 0.012}, {})))
    assert mostly is not None
    assert (mostly.rank, mostly.stage) == (1, "wait")


def test_waiting_in_itself_makes_nobody_slow() -> None:
    """On a GPU the host of a rank that is behind shows it where it reads the losses: only its own stages count."""
    seconds = steps(of({}, {}, {}))
    seconds[1, COLUMNS.index("log")] = 1.0
    found = find_slowest_rank(seconds)
    assert found is not None
    assert found.seconds == 0
    assert found.stage is None


def test_what_is_not_known_is_no_verdict() -> None:
    assert find_slowest_rank(steps(of({}))) is None
    holey = steps(of({}, {}, {"wait": 1.0}))
    holey[0, 0] = np.nan
    assert find_slowest_rank(holey) is None
    still = find_slowest_rank(np.zeros((2, len(COLUMNS))))
    assert still is not None
    assert (still.seconds, still.share, still.stage) == (0, 0, None)


def intervals(slow: list[int | None], ranks: int, by: float = 0.02, noise: float = 0.0) -> Seconds:
    chance = np.random.default_rng(0)
    own = [of(*({"wait": 0.001 + by * (rank == one)} for rank in range(ranks))) for one in slow]
    return steps(np.array(own) + noise * chance.random((len(slow), ranks, len(COMPUTE_STAGES))))


def test_the_sentence_tells_a_slow_host_from_a_slow_everything() -> None:
    same = describe_stragglers(intervals([3] * 20, 4))
    assert same.startswith("Rank 3 is the slowest in 100% of 20 intervals")
    assert "Look at its host. It loses time in wait." in same
    moving = describe_stragglers(intervals([0, 1, 2, 3] * 5, 4))
    assert moving.startswith("The slowest rank changes")
    assert "No single host is slow" in moving
    assert "Too few intervals to tell" in describe_stragglers(intervals([1, 1], 2))
    assert describe_stragglers(intervals([None] * 20, 4)).startswith("No rank delays the others")


def test_noise_is_no_straggler() -> None:
    for ranks in (2, 4, 16):
        assert describe_stragglers(intervals([None] * 200, ranks, noise=1e-4)).startswith("No rank delays the others")


def a_run(folder: Path, seconds: Seconds) -> RunFolder:
    run = RunFolder.create(folder)
    run.write_json("provenance", {"samples": 100})
    names = [str(rank) for rank in range(seconds.shape[1])]
    for place, values in enumerate(seconds.astype(np.float32), 1):
        row_file.append_row(run.rows_path(ROW_FILE_KIND), names, COLUMNS, 50 * place, place, values)
    return run


def test_the_panels_show_each_rank(tmp_path: Path) -> None:
    seconds = intervals([1] * 12, 3)
    bars, grid = build_panels(a_run(tmp_path / "run", seconds))
    assert bars.data["names"] == ["rank 0", "rank 1", "rank 2"]
    stacks = {stack["name"]: stack["values"] for stack in bars.data["stacks"]}
    # Data parallel ranks exchange nothing inside the network.
    assert stacks.keys() == {*COLUMNS} - {"exchange"}
    assert stacks["wait"] == pytest.approx([1, 21, 1], rel=1e-3)
    assert stacks["reduce"] == pytest.approx([22, 2, 22], rel=1e-3)
    assert bars.note.startswith("Rank 1 is the slowest in 100% of 12 intervals")
    assert grid.data["x"] == [place / 2 for place in range(1, 13)]
    assert [row[0] for row in grid.data["values"]] == pytest.approx([37, 57, 37], rel=1e-3)
    renderer.render([bars, grid], title="t", subtitle="s")


@pytest.mark.check
def test_many_ranks_over_many_intervals_stay_a_picture(tmp_path: Path) -> None:
    """Of the ranks the slowest are drawn; an interval that was written twice is drawn once."""
    seconds = intervals([90] * 500, 100)
    run = a_run(tmp_path / "run", seconds)
    row_file.append_row(
        run.rows_path(ROW_FILE_KIND), [str(n) for n in range(100)], COLUMNS, 25_000, 500, seconds[-1].astype(np.float32)
    )
    bars, grid = build_panels(run)
    assert len(bars.data["names"]) == 64
    assert "rank 90" in bars.data["names"]
    assert "Of 100 ranks these are the 64 slowest." in bars.note
    assert len(grid.data["x"]) == 240
    assert len(json.dumps(grid.data)) < 200_000
    renderer.render([bars, grid], title="t", subtitle="s")


def test_a_run_of_one_rank_has_no_panels(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    assert build_panels(run) == []
    row_file.append_row(run.rows_path(ROW_FILE_KIND), ["0", "1"], ["other"], 1, 1, np.zeros((2, 1), np.float32))
    assert build_panels(run) == []
