"""Training by several processes from the command line, one of which is killed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests._support import Said, command, finished, packed_digits, records, refused, write_recipe

from headway.core.run import Run
from headway.train.checkpoint import Checkpoints

SAMPLES, BATCH = 180, 30


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distributed")
    packed_digits(folder)
    return write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, log_every_steps=5)


def steps(run: Path) -> int:
    """Steps that are logged so far."""
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except FileNotFoundError:
        return 0


def killed(recipe: Path, run: Path, *more: str, kills: int) -> Said:
    """Trains by three processes, of which so many are killed, each once the one before has been replaced."""
    chance, said = random.Random(0), run.with_suffix(".err")
    argv = command("train", recipe, "--run", run, "--procs", "3", "--json", *more)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("w") as err, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=err, env=environ) as process:
        for number in range(kills):
            at = steps(run)
            while process.poll() is None and (steps(run) < at + 3 or said.read_text().count(" joined") < number):
                time.sleep(0.01)
            if process.poll() is None:
                chance.choice(psutil.Process(process.pid).children()).kill()
        try:
            out, _ = process.communicate(timeout=200)
        finally:
            process.kill()
    return Said(process.returncode, out.decode(), said.read_text())


def assert_whole(said: Said, run: Path, epochs: int) -> None:
    assert said.status == 0, said.err
    summary = said.json()
    assert summary["finished"]
    assert summary["run"] == str(run)
    assert summary["step"] == epochs * SAMPLES // BATCH
    logged = [record["step"] for record in records(run, "train")]
    assert logged == sorted(set(logged))
    newest = Checkpoints(run / "checkpoints").newest()
    assert newest is not None
    assert newest.step == summary["step"]
    assert json.loads((run / "summary.json").read_text())["step"] == summary["step"]


def test_a_killed_process_does_not_end_the_training(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = killed(recipe, run, "epochs=60", "evaluate.every_epochs=60", "--no-respawn", kills=1)
    assert_whole(said, run, 60)
    assert " died" in said.err


@pytest.mark.check
def test_killed_processes_are_replaced(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = killed(recipe, run, "epochs=600", "evaluate.every_epochs=100", "checkpoint.every_steps=200", kills=4)
    assert_whole(said, run, 600)
    assert said.err.count(" died") >= 2
    assert said.err.count(" joined") >= 2


def test_a_wrong_recipe_is_refused_before_anything_is_started(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "no_such_key" in refused("train", recipe, "no_such_key=1", "--procs", "2", "--run", run, status=2)
    assert not run.exists()


@pytest.mark.check
def test_what_is_wrong_with_the_data_is_said_once(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = finished("train", recipe, "data.train=nowhere", "--procs", "2", "--run", run)
    assert said.status == 2
    assert said.err.count("there is no such file or folder") == 1
    assert said.err.count("\n") == 1
    assert not run.exists()


@pytest.mark.check
def test_a_run_that_exists_is_gone_on_with(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert finished("train", recipe, "--run", run, "epochs=1", "--procs", "1").status == 0
    said = finished("train", recipe, "--run", run, "--procs", "2")
    assert said.status == 2
    assert "this run folder exists" in said.err
    said = finished("train", "--resume", run, "--procs", "2", "--json")
    assert said.status == 0, said.err
    assert said.json()["run"] == str(run)
    assert Run.open(run).summary()["finished"]


@pytest.mark.check
def test_a_python_program_can_start_it(recipe: Path, tmp_path: Path) -> None:
    """Without the command line: the launcher is a function."""
    program = (
        "import sys; from pathlib import Path; from headway.train.distributed import train; "
        "sys.exit(train(Path(sys.argv[1]), ['epochs=1'], Path(sys.argv[2]), None, procs=2, hosts='localhost:2', "
        "respawn=False, options=[]))"
    )
    run = tmp_path / "run"
    argv = [sys.executable, "-c", program, str(recipe), str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Run.open(run).summary()["finished"]
