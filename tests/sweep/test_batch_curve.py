"""`headway curve`: a curve of a real network, stopped and continued; and what it refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tests._support import finished, packed_digits, refused, running, write_recipe
from tests.conftest import ROOT

from headway.core.errors import HeadwayError
from headway.sweep import batch_curve, run_crew
from headway.sweep.batch_curve import CurveOptions, draw_curve, resume_curve
from headway.sweep.cohort import Assignment, Outcome

OPTIONS = CurveOptions(batches=(60, 30), target=0.8, seeds=1, slots=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curve")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", device="cpu", epochs=10)
    return folder


class KilledError(BaseException):
    pass


def fake_runs(monkeypatch: pytest.MonkeyPatch, done: list[str], fatal: int = -1) -> None:
    """Trains nothing: each run takes steps that its batch and its rate decide. It is killed in place of one run."""

    def train_missing(folder: Path, slots: Any, list_missing: Any, assign: Any, keep: Any) -> None:
        while missing := list_missing():
            # One at a time, as the rest may follow from it.
            run = missing[0]
            if len(done) == fatal:
                raise KilledError
            assignment: Assignment = assign(len(done), run)
            recipe = assignment.loaded.recipe
            assert (recipe.batch, recipe.optimizer.lr, recipe.seed) == (run.batch, run.lr, run.seed)
            # Messages and provenance name the command that has set them.
            assert {assignment.loaded.origins[key] for key in ("optimizer.lr", "seed")} == {"headway curve"}
            assert run.batch == 30 or assignment.loaded.origins["batch"] == "headway curve"
            assert recipe.stop_at == {"accuracy": 0.8}
            assert recipe.evaluate.every_epochs == 0.2
            steps = int(6000 / run.batch * (1 + abs(run.lr / (0.04 * run.batch / 30) - 1)) + run.seed)
            assignment.folder.mkdir(parents=True)
            end = min(steps, assignment.until)
            for step in [step for step in (steps // 2, steps) if step <= end]:
                record = {"kind": "evaluate", "position": 0, "step": step, "accuracy": step / steps}
                with (assignment.folder / "metrics.jsonl").open("a") as metrics:
                    metrics.write(json.dumps(record) + "\n")
            done.append(assignment.folder.name)
            keep(run, Outcome(trial=len(done), step=end))

    monkeypatch.setattr(batch_curve, "train_missing", train_missing)


def test_a_curve_that_is_killed_anywhere_goes_on_and_repeats_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list[str]()
    fake_runs(monkeypatch, whole)
    result = draw_curve(folder / "recipe.yaml", ("epochs=1000",), OPTIONS, tmp_path / "whole")
    told = result.to_json()
    # The best rate doubles with the batch, and the steps are halved.
    assert [row["lr"] for row in told["batches"]] == [0.04, 0.08]
    assert told["perfect_scaling_to"] == 60
    assert told["no_gain_from"] is None
    # A rate is given up after 1.5 times the steps of the best one so far.
    assert [[lr for lr, steps in row["steps_by_lr"] if steps is None] for row in told["batches"]] == [[0.08], [0.16]]
    assert json.loads((tmp_path / "whole/curve.json").read_text()) == json.loads(json.dumps(told))
    assert (tmp_path / "whole/curve.html").stat().st_size > 10_000
    for fatal in (0, 3, len(whole) - 1):
        done = list[str]()
        fake_runs(monkeypatch, done, fatal)
        with pytest.raises(KilledError):
            draw_curve(folder / "recipe.yaml", ("epochs=1000",), OPTIONS, tmp_path / str(fatal))
        fake_runs(monkeypatch, done)
        assert resume_curve(tmp_path / str(fatal)).to_json()["batches"] == told["batches"]
        assert done == whole


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--batches", "64"), "a curve needs two batches or more"),
        (("--batches", "64,128"), "there is no target to reach"),
        (("--batches", "64,128", "stop_at={loss: 0.3}"), "stop_at does not name accuracy"),
        (("--batches", "64,128", "--target", "90"), "accuracy lies between 0 and 1, so 90 is never reached"),
        (("--batches", "64,0", "--target", "0.9"), "a batch of 0 has no sample"),
        (("--target", "0.9"), "a curve needs a recipe and batches"),
        (("--batches", "64,128", "--target", "0.9", "data.eval=null"), "evaluation set"),
    ],
)
def test_wrong_usage_is_refused(folder: Path, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    assert said in refused("curve", folder / "recipe.yaml", "--out", tmp_path / "out", *more, status=2)


def test_a_folder_that_is_none_of_a_curve_is_refused(tmp_path: Path) -> None:
    assert "headway curve has not begun here" in refused("curve", "--resume", tmp_path, status=2)


def test_processes_that_die_again_and_again_end_it(tmp_path: Path) -> None:
    run_crew._expect_few_deaths(tmp_path, run_crew.MOST_DEATHS - 1, -9)
    with pytest.raises(HeadwayError, match="3 processes of the search have died, the last one with status -9"):
        run_crew._expect_few_deaths(tmp_path, run_crew.MOST_DEATHS, -9)


@pytest.mark.check
def test_ctrl_c_saves_the_runs_of_a_curve(folder: Path, tmp_path: Path) -> None:
    arguments = ("curve", folder / "recipe.yaml", "--batches", "30,60", "--target", "0.7", "--seeds", "1")
    with running(*arguments, "--slots", "1", "--out", tmp_path / "out") as process:
        assert process.stderr is not None
        next(line for line in process.stderr if line.startswith("Batch 30"))
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 1
    assert f"headway curve --resume {tmp_path / 'out'}" in said
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out/results").iterdir()}
    assert kept
    again = finished("curve", "--resume", tmp_path / "out", "--json")
    assert again.status == 0, again.err
    rows = again.json()["batches"]
    assert [row["batch"] for row in rows] == [30, 60]
    assert all(row["steps"] > 0 for row in rows)
    # What had ended is not trained again.
    assert all((tmp_path / "out/results" / name).stat().st_mtime_ns == at for name, at in kept.items())


def test_the_guide_has_the_kept_curves() -> None:
    """Results of `headway curve RECIPE ... --json` as the guide says, without the folder."""
    page = (ROOT / "docs/guides/batch-curve.md").read_text(encoding="utf-8")
    for line in (ROOT / "bench/results/batch_curves.jsonl").read_text(encoding="utf-8").splitlines():
        kept = json.loads(line)
        cells = []
        for one in kept["batches"]:
            seeds = one["steps_by_seed"]
            cells.append(f"{one['steps']:,.0f} ({min(seeds):.0f} to {max(seeds):.0f})")
        assert f"| `{kept['recipe']}` | {' | '.join(cells)} |\n" in page
