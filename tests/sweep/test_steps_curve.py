"""The curve of steps by batch: what follows from kept runs, and which are missing."""

from __future__ import annotations

import math
import random as random_numbers

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.curve_panels import build_panels, list_rows
from headway.sweep.steps_curve import (
    PATIENCE,
    CurveRun,
    StepsCurve,
    compute_steps_to,
    extend_grid,
    find_regimes,
    is_at_edge,
)

GRIDS = {batch: [0.1, 0.2, 0.4, 0.8] for batch in (32, 64, 128, 256)}


def test_steps_to_a_target_lie_between_two_evaluations() -> None:
    evaluations = [(10, 0.2), (20, 0.5), (30, 0.7), (40, 0.5)]
    assert compute_steps_to(evaluations, 0.6) == pytest.approx(25)
    assert compute_steps_to(evaluations, 0.9) is None
    # The start is chance, or unknown.
    assert compute_steps_to(evaluations, 0.15, start=0.1) == pytest.approx(5)
    assert compute_steps_to(evaluations, 0.15) == 10
    falling = [(step, 1 - value) for step, value in evaluations]
    assert compute_steps_to(falling, 0.4, higher_is_better=False) == pytest.approx(25)


METRICS = st.floats(-2, 2, allow_subnormal=False) | st.sampled_from([math.nan, math.inf, -math.inf, None])


@given(st.lists(METRICS, max_size=12), st.booleans(), st.booleans())
def test_an_evaluation_that_is_not_finite_counts_as_not_made(
    values: list[float | None], rises: bool, knows_start: bool
) -> None:
    start = (-3.0 if rises else 3.0) if knows_start else None
    evaluations = [(10 * number, value) for number, value in enumerate(values, 1)]
    finite = [(step, value) for step, value in evaluations if value is not None and math.isfinite(value)]
    found = compute_steps_to(evaluations, 0.5, start=start, higher_is_better=rises)
    assert found == compute_steps_to(finite, 0.5, start=start, higher_is_better=rises)
    reached = [step for step, value in finite if (value >= 0.5 if rises else value <= 0.5)]
    assert (found is None) == (not reached)
    if found is not None:
        before = [step for step, _ in finite if step < reached[0]]
        assert (before[-1] if before else 0) <= found <= reached[0]


def test_three_regimes() -> None:
    steps = [1000, 500, 260, 160, 110, 101, 98]
    batches = [2**place for place in range(len(steps))]
    names = ["perfect", "perfect", "perfect", "diminishing", "diminishing", "none", "none"]
    assert find_regimes(batches, steps) == names
    assert find_regimes([1, 2, 4], [8, 4, 2]) == ["perfect"] * 3
    assert find_regimes([1, 2, 4], [8, 8, 8]) == ["perfect", "none", "none"]
    assert find_regimes([1], [8]) == ["perfect"]
    # A factor of four is two doublings.
    assert find_regimes([1, 4, 16], [64, 16, 15]) == ["perfect", "perfect", "none"]


def test_a_search_is_extended_until_its_best_is_inside() -> None:
    grid, scores = [0.1, 0.2, 0.4, 0.8], dict[float, float]()
    while (asked := extend_grid(scores, grid))[0]:
        scores |= {lr: 1 - abs(lr - 1.6) / 10 for lr in asked[0]}
    assert asked[1] == 1.6
    assert sorted(scores) == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    scores = {}
    while (asked := extend_grid(scores, grid))[0]:
        scores |= {lr: -lr for lr in asked[0]}
    # No further than four times.
    assert asked[1] == pytest.approx(0.1 / 16)
    assert is_at_edge(scores)
    assert not is_at_edge({0.1: 0.5, 0.2: 0.6, 0.4: 0.5})
    assert extend_grid(dict.fromkeys(grid, -math.inf), grid) == ([], None)


@given(st.floats(0.01, 10), st.floats(0.5, 1), st.integers(1, 3))
def test_a_curve_finds_the_best_rate_of_every_batch(best: float, exponent: float, seeds: int) -> None:
    kept = dict[CurveRun, float]()

    def build() -> StepsCurve:
        return StepsCurve(GRIDS, tuning_seed=0, seeds=range(1, 1 + seeds), steps=kept)

    while missing := build().list_missing():
        for run in missing:
            assert run not in kept
            kept[run] = 1e5 * run.batch**-exponent * (1 + abs(math.log(run.lr / best))) + run.seed
    curve = build()
    points = curve.list_points()
    assert [point.batch for point in points] == list(GRIDS)
    for point in points:
        tuned = curve.list_tuned(point.batch)
        lr = curve.search(point.batch)[1]
        assert tuned[lr] == min(tuned.values())
        assert point.steps == pytest.approx(tuned[lr] + (seeds + 1) / 2)
    assert list_rows(curve, 1000)[1][0] == "32"
    chart, table = build_panels(curve, "steps", "Steps", list_rows(curve, 1000))
    assert next(one["name"] for one in chart.data["series"]) == "if steps fell as the batch grows"
    assert len(table.data["rows"]) == len(GRIDS)


@given(st.randoms(use_true_random=False), st.lists(st.floats(1, 1e4), min_size=12, max_size=12))
def test_giving_up_a_rate_changes_no_point(random: random_numbers.Random, taken: list[float]) -> None:
    """Each rate of a search takes some steps; the searches end in the same rate whether slow ones go on or not."""
    rates = [0.1 * 2.0**place for place in range(-4, 8)]

    def run_all(gives_up: bool) -> StepsCurve:
        kept = dict[CurveRun, float]()
        curve = StepsCurve({32: GRIDS[32]}, tuning_seed=0, seeds=[1], steps=kept)
        while missing := curve.list_missing():
            run = random.choice(missing)
            steps = taken[min(range(len(rates)), key=lambda place: abs(math.log(rates[place] / run.lr)))]
            limit = curve.limit_steps(run) if gives_up else math.inf
            assert run.seed == 0 or limit == math.inf
            kept[run] = steps if steps <= limit else math.inf
        return curve

    whole, short = run_all(False), run_all(True)
    assert short.search(32) == whole.search(32)
    assert short.list_points() == whole.list_points()
    found, fewest = short.list_tuned(32), min(short.list_tuned(32).values())
    assert found == {lr: steps if found[lr] < math.inf else math.inf for lr, steps in whole.list_tuned(32).items()}
    assert all(steps > PATIENCE * fewest for lr, steps in whole.list_tuned(32).items() if found[lr] == math.inf)
    assert list_rows(short, 1000)[1][-1].count("-") == list(found.values()).count(math.inf)


def test_a_curve_without_a_run_has_its_table_alone() -> None:
    curve = StepsCurve(GRIDS, tuning_seed=0, seeds=[1], steps={})
    assert curve.find_perfect_scaling().how == "runs are missing"
    (table,) = build_panels(curve, "steps", "Steps", list_rows(curve, 1000))
    assert table.kind == "table"
    never = {CurveRun(batch, lr, 0): math.inf for batch, grid in GRIDS.items() for lr in grid}
    curve = StepsCurve(GRIDS, tuning_seed=0, seeds=[1], steps=never)
    assert not curve.list_missing()
    assert curve.find_perfect_scaling().how == "batch 32 does not reach the target"
