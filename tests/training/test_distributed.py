"""Training by several processes from the command line, one of which is killed."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests._support import (
    Said,
    command,
    finished,
    headway,
    paced,
    packed_digits,
    records,
    refused,
    slowly,
    workers_of,
    write_recipe,
)

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.run_folder import RunFolder

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
    argv = command("train", recipe, "--run", run, "--procs", "3", "--json", paced(recipe.parent), *more)
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with said.open("w") as err, subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=err, env=environ) as process:
        for number in range(kills):
            with slowly(recipe.parent):
                while process.poll() is None and said.read_text().count(" joined") < number:
                    time.sleep(0.01)
                at = steps(run)
                while process.poll() is None and steps(run) < at + 3:
                    time.sleep(0.01)
                if process.poll() is None:
                    chance.choice(workers_of(process.pid)).kill()
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


@pytest.mark.check
def test_a_killed_process_does_not_end_the_training(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = killed(recipe, run, "epochs=60", "evaluate.every_epochs=60", "--no-respawn", kills=1)
    assert_whole(said, run, 60)
    assert " died" in said.err


@pytest.mark.check
def test_killed_processes_are_replaced(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = killed(recipe, run, "epochs=300", "evaluate.every_epochs=100", "checkpoint.every_steps=200", kills=2)
    assert_whole(said, run, 300)
    assert said.err.count(" died") == 2
    assert said.err.count(" joined") >= 1


def test_a_wrong_recipe_is_refused_before_anything_is_started(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert "no_such_key" in refused("train", recipe, "no_such_key=1", "--procs", "2", "--run", run, status=2)
    assert not run.exists()


def test_a_run_that_is_at_its_end_is_not_started_again(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    headway("train", recipe, "--run", run, "epochs=1")
    said = headway("train", "--resume", run, "--procs", "2")
    assert said.err == f"{run} is at its end, step 6 of 6: nothing is left to do.\n"
    assert said.out.startswith(f"Trained {run}:")


@pytest.mark.check
@pytest.mark.root
def test_a_full_disk_ends_all_processes_and_is_said_once(small_disk: Path, tmp_path: Path) -> None:
    packed_digits(tmp_path)
    changes = {"model": {"factory": "net.py:wide"}, "checkpoint": {"every_steps": 4}, "epochs": 9}
    recipe = write_recipe(tmp_path / "recipe.yaml", evaluate={"every_epochs": 1.5}, **changes)
    run = small_disk / "run"
    said = finished("train", recipe, "--run", run, "--procs", "2")
    assert said.status == 1
    how = f"Nothing before it is lost: make room. Then go on: headway train --resume {run} --procs 2."
    assert said.err.count("the disk is full") == said.err.count(how) == 1
    assert said.err.endswith(how + "\n")
    assert " died" not in said.err
    assert Checkpoints(run / "checkpoints").newest() is not None


@pytest.mark.check
def test_without_the_launcher_the_way_on_is_named(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    argv = ("train", recipe, paced(recipe.parent), "--run", run, "--procs", "2", "epochs=99")
    with (
        (tmp_path / "err").open("w+") as err,
        slowly(recipe.parent),
        subprocess.Popen(command(*argv), stderr=err) as process,
    ):
        while steps(run) < 2 and process.poll() is None:
            time.sleep(0.01)
        family = psutil.Process(process.pid).children()
        process.kill()
        assert psutil.wait_procs(family, timeout=60)[1] == []
        err.seek(0)
        last = err.read().splitlines()[-1]
    assert "launcher" in last
    assert last.endswith(f"The run has ended; go on with its last checkpoint: headway train --resume {run} --procs 2.")


@pytest.mark.check
def test_on_a_terminal_there_is_a_bar(recipe: Path, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    argv = command("train", recipe, "--run", tmp_path / "run", "--procs", "2", "epochs=20")
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=theirs, env={**os.environ, "TERM": "xterm"}) as done:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # as a terminal ends
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    assert done.returncode == 0, shown
    assert b"epoch 20.00/20" in shown
    assert b"\x1b[2K" in shown
    assert shown.rpartition(b"\x1b[?25")[2].startswith(b"h")  # the cursor is shown again


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
    assert RunFolder.open(run).read_summary()["finished"]


@pytest.mark.check
def test_a_python_program_can_start_it(recipe: Path, tmp_path: Path) -> None:
    """Without the command line: the launcher is a function."""
    program = (
        "import sys; from pathlib import Path; from headway.training.distributed import train_on_ranks; "
        "sys.exit(train_on_ranks(Path(sys.argv[1]), ['epochs=1'], Path(sys.argv[2]), None, procs=2, "
        "hosts='localhost:2', respawn=False, options=[]))"
    )
    run = tmp_path / "run"
    argv = [sys.executable, "-c", program, str(recipe), str(run)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert RunFolder.open(run).read_summary()["finished"]
