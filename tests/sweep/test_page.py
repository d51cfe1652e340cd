from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests._support import headway

from headway.core.errors import UsageError
from headway.page.panel import Panel
from headway.sweep.budget import METHODS, Method
from headway.sweep.journal import read_journal
from headway.sweep.page import SAME_BATCHES, build_panels, write_page
from headway.sweep.state import Task, rank_trials
from headway.sweep.sweep_summary import SweepSummary, summarise_sweep

from ._folders import PARAMETERS, score_by_rate, write_sweep

MOST_BYTES = 3_000_000


def summarise(folder: Path, *arguments: Any, **more: Any) -> SweepSummary:
    write_sweep(folder, *arguments, **more)
    return summarise_sweep(folder)


def index(summary: SweepSummary) -> dict[str, Panel]:
    return {panel.name: panel for panel in build_panels(summary)}


def test_what_has_arrived_in_an_asha_sweep_waits_until_the_end(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "s", "asha", 6, smallest=Fraction(1, 9), results=2)
    assert "waiting" in {trial.state for trial in summary.trials}


@pytest.mark.parametrize("method", METHODS)
def test_every_number_is_that_of_the_journal(tmp_path: Path, method: Method) -> None:
    summary = summarise(tmp_path / "s", method, 6, smallest=Fraction(1, 9))
    state = read_journal(tmp_path / "s")
    assert [trial.trial for trial in sorted(summary.trials, key=lambda one: one.rank or math.inf) if trial.rank] == (
        rank_trials(state)
    )
    # Nothing is counted twice: the rungs and the trials cost the same, and no more than the budget.
    work = sum(trial.work for trial in summary.trials)
    assert work == sum(rung.work for rung in summary.rungs) <= state.plan.budget
    assert sum(rung.failed for rung in summary.rungs) == sum(trial.state == "failed" for trial in summary.trials)
    assert summary.winner is not None
    assert summary.winner.state == "winner"
    # It is over, so nothing waits to go on.
    assert {trial.state for trial in summary.trials} <= {"winner", "finished", "stopped", "failed"}
    panels = index(summary)
    axes = {axis["label"]: axis for axis in panels["parallel"].data["axes"]}
    assert list(axes)[: len(PARAMETERS)] == list(summary.settings.space.parameters)
    for trial, x, y in zip(
        summary.trials, panels["rungs"].data["x"][0]["values"], panels["rungs"].data["y"]["values"], strict=True
    ):
        assert list(zip(x, y, strict=True)) == [
            (float(level), pytest.approx(score, rel=1e-5)) for level, score in trial.points
        ]
        assert (axes["optimizer.momentum"]["values"][trial.trial] is None) == ("optimizer.momentum" not in trial.values)
        if trial.parent is not None:
            # Its line begins at its parent's score, which is not its own.
            assert trial.points[0] in summary.trials[trial.parent].points
            assert trial.get_score(trial.points[0][0]) is None
        assert trial.get_score(trial.level) == trial.score
    # The values of forks are no random draws.
    assert len(summary.progress.random) <= sum(trial.parent is None for trial in summary.trials)
    json.dumps(summary.to_json(), allow_nan=False)
    assert write_page(summary).stat().st_size < MOST_BYTES


def test_the_best_so_far_ends_with_the_best_and_random_search_does_not_know_the_order(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "s", "random", 12)
    scores = [trial.score for trial in summary.trials if trial.score is not None]
    progress = summary.progress
    assert not progress.is_estimated
    assert progress.best[-1] == (12, max(scores))
    assert [y for _, y in progress.best] == sorted(y for _, y in progress.best)
    assert progress.random == progress.random_low
    assert [x for x, _ in progress.random] == list(range(1, 13))
    assert progress.random[-1][1] == pytest.approx(max(scores))


def test_seconds_are_those_of_the_run_folders_and_count_once_for_a_trial_that_goes_on(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "s", has_runs=True)
    done = [trial for trial in summary.trials if trial.score is not None]
    assert [trial.seconds for trial in done] == [pytest.approx(10 * float(trial.level)) for trial in done]
    assert summary.progress.unit == "seconds"
    assert summary.progress.best[-1][0] == pytest.approx(sum(10 * float(trial.level) for trial in done))


@pytest.mark.parametrize("results", [0, 1, 20])
def test_a_sweep_that_runs_has_a_page(tmp_path: Path, results: int) -> None:
    summary = summarise(tmp_path / "s", results=results)
    assert sum(len(trial.points) for trial in summary.trials) + sum(one.failed for one in summary.rungs) == results
    assert "not finished" in write_page(summary).read_text()
    cards = index(summary)["result"].data["cards"]
    assert any("so far" in card["note"] for card in cards) == (results > 0)


def test_failures_are_listed_by_their_reason(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "s", score=lambda task: math.nan)
    assert summary.reasons == [("the score is nan", len(summary.trials))]
    panels = index(summary)
    assert panels["failures"].data["rows"][0][1] == str(len(summary.trials))
    assert "winner" not in panels
    assert set(panels["parallel"].data["ranks"]) == {None}
    write_page(summary)


def test_scores_over_powers_of_ten_have_logarithmic_axes(tmp_path: Path) -> None:
    def score(task: Task) -> float:
        return float(10 ** (8 * (1 - score_by_rate(task))))

    panels = index(summarise(tmp_path / "s", score=score, objective="loss", higher_is_better=False))
    assert panels["best-so-far"].data["log_y"]
    axis = panels["slices"].data["y"]
    assert (axis["scale"], axis["missing_is_high"]) == ("log", True)
    assert "logarithms" in panels["importance"].note


def test_the_forest_finds_what_decides(tmp_path: Path) -> None:
    importance = summarise(tmp_path / "s").importance
    assert importance is not None
    shares = dict(zip(importance.parameters, importance.found.shares, strict=True))
    assert shares["optimizer.lr"] > 0.8
    assert f"R² = {importance.found.r2:.2f}" in index(summarise_sweep(tmp_path / "s"))["importance"].note


def test_shares_that_mean_nothing_are_not_drawn(tmp_path: Path) -> None:
    def score(task: Task) -> float:
        return Random(f"{task.trial.number}/{task.rung}").random()

    summary = summarise(tmp_path / "s", score=score)
    found = summary.importance
    assert found is not None
    shown = index(summary)["importance"]
    # Scores by chance: the forest may be a little better than the mean on some, and is worse on most.
    assert (shown.kind == "bars") == (found.found.r2 > 0)
    assert found.found.r2 <= 0
    assert "no better than their mean" in shown.data["text"]
    assert "1/" in shown.title


def test_the_page_says_whether_trials_saw_the_same_batches(tmp_path: Path) -> None:
    alike = index(summarise(tmp_path / "s"))["result"]
    assert alike.note == SAME_BATCHES
    rate = {"optimizer.lr": {"log": [0.001, 1.0]}}
    differing = index(summarise(tmp_path / "d", parameters=rate | {"batch": {"choice": [8, 16]}}))["result"]
    assert differing.note.startswith("Trials differ in batch,")


@pytest.mark.check
def test_a_thousand_trials_fit_a_page(tmp_path: Path) -> None:
    summary = summarise(tmp_path / "s", budget=120, max_trials=1000, has_runs=True)
    assert len(summary.trials) == 1000
    page = write_page(summary)
    assert page.stat().st_size < MOST_BYTES
    assert "<b>bold" not in page.read_text()


def test_report_writes_the_page_of_a_sweep(tmp_path: Path) -> None:
    write_sweep(tmp_path / "s")
    told = json.loads(headway("report", tmp_path / "s", "--json").out)
    assert told["report"] == str(tmp_path / "s" / "sweep.html")
    assert len(told["trials"]) == len(read_journal(tmp_path / "s").trials)
    with pytest.raises(UsageError, match="not the folder of a sweep"):
        summarise_sweep(tmp_path)
