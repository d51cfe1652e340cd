"""A run that goes on with another recipe: what may change, what is refused, and what the run folder says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests._support import finished, headway, packed_digits, records, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extension")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, optimizer={"name": "nag", "lr": 0.02})
    headway("train", folder / "recipe.yaml", "--run", folder / "short")
    return folder


def copy(folder: Path, name: str = "short") -> Path:
    """A copy of a run, so that each test extends its own."""
    made = folder / f"copy-{len(list(folder.glob('copy-*')))}"
    for path in sorted((folder / name).rglob("*")):
        target = made / path.relative_to(folder / name)
        if path.is_dir():
            target.mkdir(parents=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return made


def test_an_extended_run_is_the_longer_run(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "long", "epochs=4")
    run = copy(folder)
    said = headway("train", "--resume", run, "epochs=4", "log_every_steps=2")
    assert "The run goes on to step 24 in place of 12; it stands at step 12." in said.err
    assert "The learning rate goes on as it was: 0.02." in said.err
    assert (run / "weights.safetensors").read_bytes() == (tmp_path / "long" / "weights.safetensors").read_bytes()
    metrics = [[r["accuracy"] for r in records(one, "evaluate")] for one in (run, tmp_path / "long")]
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == 4
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["step"], summary["steps"]) == (True, 24, 24)
    about = json.loads((run / "provenance.json").read_text())
    assert about["origins"]["epochs"] == "--resume at step 12, was 2.0"
    assert about["changes"][0]["keys"] == {"epochs": [2.0, 4.0], "log_every_steps": [1, 2]}
    headway("report", run)
    assert "--resume at step 12, was 2.0" in (run / "report.html").read_text()
    # The same again changes nothing.
    assert "nothing is left to do" in headway("train", "--resume", run, "epochs=4").err


def test_a_schedule_over_the_whole_run_says_its_jump(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", "schedule=cosine")
    said = headway("train", "--resume", tmp_path / "run", "epochs=4").err
    assert "The schedule cosine now spans the longer run: the learning rate jumps from 0.000341 at step 12 to" in said
    rates = [record["lr"] for record in records(tmp_path / "run", "train")]
    assert rates[11] == pytest.approx(0.000341, rel=1e-2)
    assert rates[12] == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lr=0.1", "cannot change optimizer.lr, because the checkpoint holds the state of this optimizer"),
        ("batch=20", "cannot change batch, because the step at which the run stands would begin at another sample"),
        ("seed=3", "cannot change seed, because the order of the samples"),
        ("precision=bf16", "cannot change precision, because the steps before and after"),
        ("checkpoint.folder=other", "cannot change checkpoint.folder, because the checkpoints of the run lie there"),
        ("epochs=1", "the run stands at epoch 2, and epochs=1 would end it before that"),
        ("epoch=4", "Did you mean 'epochs'?"),
    ],
)
def test_changes_that_are_refused(folder: Path, override: str, said: str) -> None:
    before = (folder / "short" / "recipe.yaml").read_bytes()
    assert said in headway("train", "--resume", folder / "short", override, status=2).err
    assert (folder / "short" / "recipe.yaml").read_bytes() == before
    assert (folder / "short" / "summary.json").exists()


def test_a_run_goes_on_past_what_ended_it(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    stopping = "early_stopping={patience_epochs: 1, min_delta: 1}"
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=3", stopping)
    assert json.loads((run / "summary.json").read_text())["step"] == 12
    headway("train", "--resume", run, "early_stopping=null")
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["step"], "ended" in summary) == (18, False)
    goal = copy(folder)
    headway("train", "--resume", goal, "epochs=6", "stop_at={accuracy: 0.1}")
    assert json.loads((goal / "summary.json").read_text())["step"] == 18
    headway("train", "--resume", goal, "stop_at={loss: -1}")
    assert json.loads((goal / "summary.json").read_text())["step"] == 36


@pytest.mark.check
def test_ranks_extend_a_run(folder: Path) -> None:
    run = copy(folder)
    said = finished("train", "--resume", run, "epochs=3", "--procs", "2")
    assert said.status == 0, said.err
    assert json.loads((run / "summary.json").read_text())["step"] == 18
