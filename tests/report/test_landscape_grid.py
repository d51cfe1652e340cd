"""Runs of a landscape over two recipe keys, and sharpness beside accuracy: chosen, arranged, correlated, drawn."""

from __future__ import annotations

import itertools
import logging
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.statistics import compute_rank_correlation
from headway.page.panel_data import check_panel
from headway.report.landscape_grid import (
    LEAST_RUNS,
    MEASURES,
    RunScore,
    SharpnessComparison,
    build_grid,
    choose_keys,
    correlate_sharpness,
    list_pairs,
    parse_keys,
)
from headway.report.landscape_grid_page import build_comparison_panels, describe_comparison

KEYS = ("batch", "optimizer.weight_decay")


def build_score(
    batch: int, decay: float, seed: int = 0, metric: float | None = 0.5, sharpness: float | None = 1.0
) -> RunScore:
    recipe = {"batch": batch, "optimizer.weight_decay": decay, "seed": seed, "optimizer.lr": 0.1}
    name = f"{batch}/{decay}/{seed}"
    return RunScore(name=name, recipe=recipe, metric=metric, sharpness=dict.fromkeys(MEASURES, sharpness))


def compare(scores: list[RunScore], over: tuple[str, str] | None = KEYS) -> SharpnessComparison:
    grid = None if over is None else build_grid(scores, over)
    found = correlate_sharpness(scores)
    return SharpnessComparison(metric="accuracy", which="evaluation", scores=scores, grid=grid, correlations=found)


def test_two_keys_that_differ_are_chosen_whatever_the_seed(caplog: pytest.LogCaptureFixture) -> None:
    recipes: list[dict[str, Any]] = [
        {"batch": batch, "optimizer.weight_decay": decay, "seed": seed, "optimizer.lr": 0.1}
        for batch, decay, seed in itertools.product((32, 64), (0.0, 0.1), (0, 1))
    ]
    assert choose_keys(recipes, None) == KEYS
    assert choose_keys(recipes, ("seed", "batch")) == ("seed", "batch")
    # Set by a sweep that compares its trials on the way.
    assert choose_keys([one | {"evaluate.at_steps": [one["batch"]]} for one in recipes], None) == KEYS
    assert choose_keys(recipes[:2], None) is None, "only the seed differs"
    with caplog.at_level(logging.INFO, "headway.report"):
        assert choose_keys([*recipes, recipes[0] | {"optimizer.lr": 0.2}], None) is None
    assert "in 3 keys (batch, optimizer.weight_decay, optimizer.lr)" in caplog.text
    assert "--over batch,optimizer.weight_decay" in caplog.text


def test_a_key_that_does_not_differ_is_refused_with_those_that_do() -> None:
    recipes = [{"batch": 32, "optimizer.lr": 0.1, "seed": seed} for seed in (1, 2)]
    for key, words in (
        ("batch", "batch has the same value in all runs. Keys that differ: seed."),
        ("sed", "sed has the same value in all runs. Did you mean 'seed'? Keys that differ: seed."),
    ):
        with pytest.raises(UsageError) as found:
            choose_keys(recipes, ("seed", key))
        assert str(found.value) == f"--over: {words}"
    with pytest.raises(UsageError, match=r"Their recipes are the same\."):
        choose_keys(recipes[:1] * 2, ("seed", "batch"))


@pytest.mark.parametrize("text", ["", "batch", "batch,", "batch,batch", "a,b,c"])
def test_two_keys_are_read(text: str) -> None:
    assert parse_keys("batch, optimizer.weight_decay") == KEYS
    assert parse_keys(None) is None
    with pytest.raises(UsageError, match=r"is not two keys\. Name two recipe keys with a comma"):
        parse_keys(text)


numbers = st.none() | st.floats(0.01, 100)
scores = st.lists(
    st.builds(
        build_score,
        st.sampled_from([256, 32, 64]),
        st.sampled_from([0.1, 0.0, 5e-4]),
        st.integers(0, 3),
        numbers,
        numbers,
    ),
    min_size=1,
    max_size=12,
)


@given(scores)
def test_every_run_is_in_one_cell_and_a_cell_has_the_means_of_its_runs(runs: list[RunScore]) -> None:
    grid = build_grid(runs, KEYS)
    assert sorted(name for cell in grid.cells for name in cell.runs) == sorted(one.name for one in runs)
    assert grid.columns == sorted({one.recipe["batch"] for one in runs})
    assert grid.rows == sorted({one.recipe["optimizer.weight_decay"] for one in runs})
    for column, row in itertools.product(grid.columns, grid.rows):
        here = [one for one in runs if (one.recipe["batch"], one.recipe["optimizer.weight_decay"]) == (column, row)]
        cell = grid.find(column, row)
        if not here:
            assert cell is None
            continue
        assert cell is not None
        known = [one.metric for one in here if one.metric is not None]
        assert cell.metric == (pytest.approx(statistics.fmean(known)) if known else None)


def test_values_that_are_no_numbers_come_last_and_in_the_order_of_their_texts() -> None:
    values: list[Any] = ["b", None, 10, True, [1, 2], 9.5, "a"]
    runs = [RunScore(name=str(n), recipe={"x": one, "y": 0}, metric=1, sharpness={}) for n, one in enumerate(values)]
    assert build_grid(runs, ("x", "y")).columns == [9.5, 10, [1, 2], "a", "b", True, None]


@given(scores)
def test_correlations_are_over_the_runs_that_have_both_numbers(runs: list[RunScore]) -> None:
    for found in correlate_sharpness(runs):
        pairs = list_pairs(runs, found.measure)
        assert found.runs == len(pairs) > 0
        if len(pairs) < LEAST_RUNS:
            assert found.rank_correlation is None
        else:
            assert found.rank_correlation == compute_rank_correlation(*zip(*pairs, strict=True))
    if len(runs) < LEAST_RUNS or all(one.metric is None for one in runs):
        assert correlate_sharpness(runs) == []


@given(scores)
def test_every_comparison_can_be_drawn(runs: list[RunScore]) -> None:
    comparison = compare(runs)
    made = build_comparison_panels(comparison, 602, section="S")
    assert [one.order for one in made] == list(range(602, 602 + len(made)))
    assert {one.section for one in made} == {"S"}
    for one in made:
        check_panel(one)
    assert all(isinstance(line, str) for line in describe_comparison(comparison))


def test_a_cell_says_accuracy_keskars_sharpness_and_eigenvalue() -> None:
    runs = [
        build_score(32, 0.0, 0, 0.8, 12.0),
        build_score(32, 0.0, 1, 0.9, 14.0),
        build_score(64, 0.1, 0, 0.95, 2.0),
        build_score(64, 0.0, 0, 0.7, None),
    ]
    made = {one.name: one for one in build_comparison_panels(compare(runs), 0)}
    metric, sharpness = made["landscape-grid-metric"], made["landscape-grid-sharpness"]
    assert metric.data["columns"] == ["32", "64"]
    assert metric.data["names"] == ["0.0", "0.1"]
    assert metric.data["values"] == [[pytest.approx(0.85), 0.7], [None, 0.95]]
    assert sharpness.data["values"] == [[13.0, None], [None, 2.0]]
    assert metric.data["texts"] == sharpness.data["texts"]
    assert metric.data["texts"][0] == [
        "85.00%\nK 13%\n\N{GREEK SMALL LETTER LAMDA} 13",
        "70.00%\nK -\n\N{GREEK SMALL LETTER LAMDA} -",
    ]
    assert metric.data["texts"][1][0] == "", "no run"
    assert "Means over up to 2 runs." in metric.note
    scatter = made["landscape-scatter-keskar"]
    assert "Spearman's rank correlation: -0.50 (3 runs)." in scatter.note
    assert [(one["name"], len(one["points"])) for one in scatter.data["series"]] == [("batch 32", 2), ("batch 64", 1)]
    said = "\n".join(describe_comparison(compare(runs)))
    assert "85.00%; K 13%; \N{GREEK SMALL LETTER LAMDA} 13" in said
    assert "Keskar's sharpness, %: -0.50 (3 runs)" in said


def test_without_sharpness_there_is_a_grid_of_the_metric_alone() -> None:
    runs = [build_score(batch, 0.0, 0, 0.5, None) for batch in (1, 2, 3)]
    (made,) = build_comparison_panels(compare(runs), 0)
    assert made.data["texts"] == [["50.00%"] * 3]
    assert build_comparison_panels(compare(runs, None), 0) == []
