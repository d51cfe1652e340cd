"""Interrupted and resumed is uninterrupted, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import files, finished, headway, paced, packed_digits, records, running, slowly, write_recipe

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.run_folder import IDS_BYTES, RunFolder
from headway.data import opening
from headway.data.order import Order

EVERY, BATCH, EPOCHS, SAMPLES = 4, 6, 4, 180
STEPS = EPOCHS * SAMPLES // BATCH
EPOCH_STEPS = SAMPLES // BATCH

Moment = tuple[str, Callable[[subprocess.Popen[str], Path, random.Random], None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with everything that could come out differently: augmentation, dropout, batch norm, momentum."""
    folder = tmp_path_factory.mktemp("resume")
    packed_digits(folder)
    write_recipe(
        folder / "recipe.yaml",
        model={"factory": "net.py:dropout"},
        augment={"flip": True, "translate": 1},
        optimizer={"name": "nag", "lr": 0.01, "clip_norm": 5.0},
        schedule={"name": "cosine", "warmup_epochs": 1},
        batch=BATCH,
        epochs=EPOCHS,
        checkpoint={"every_steps": EVERY},
        log_every_steps=3,
        log_ids=True,
    )
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Callable[[str], Path]:
    """The uninterrupted run in each precision, made when it is first asked for."""

    def run(precision: str) -> Path:
        made = folder / f"whole-{precision}"
        if not made.exists():
            said = finished("train", folder / "recipe.yaml", "--run", made, f"precision={precision}")
            assert said.status == 0, said.err
        return made

    return run


def comparable(run: Path, kind: str) -> list[dict[str, Any]]:
    """Records without what depends on the clock."""
    clock = ("seconds", "images_s", "wait_share")
    return [{name: value for name, value in r.items() if name not in clock} for r in records(run, kind)]


def assert_same(run: Path, whole: Path, *, records_too: bool = True) -> None:
    assert (run / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    mine, theirs = (Checkpoints(folder / "checkpoints").newest() for folder in (run, whole))
    assert mine is not None
    assert theirs is not None
    assert mine.step == theirs.step == STEPS
    assert mine.tensors.keys() == theirs.tensors.keys()
    assert any(name.startswith("optimizer/") for name in mine.tensors)
    for name, value in mine.tensors.items():
        assert torch.equal(value, theirs.tensors[name]), name
    assert mine.scalars["best"] == theirs.scalars["best"]

    served = np.frombuffer((run / "ids.bin").read_bytes(), "<i8").reshape(-1, IDS_BYTES // 8)
    positions = np.arange(STEPS * BATCH)
    assert np.array_equal(served[:, 0], positions)
    assert np.array_equal(served[:, 1], Order(SAMPLES, 0)(positions)[1])
    assert np.array_equal(served[:, 1], served[:, 2])

    steps = [record["step"] for record in records(run, "train")]
    assert steps == sorted(set(steps))
    assert comparable(run, "evaluate") == comparable(whole, "evaluate")
    assert [record["step"] for record in records(run, "evaluate")] == [EPOCH_STEPS * n for n in range(1, EPOCHS + 1)]
    if records_too:
        assert comparable(run, "train") == comparable(whole, "train")
    assert (run / "panels" / "confusion.json").read_bytes() == (whole / "panels" / "confusion.json").read_bytes()


def logged(run: Path) -> int:
    """The last step of metrics.jsonl whose line has ended."""
    try:
        lines = (run / "metrics.jsonl").read_text().split("\n")[:-1]
    except FileNotFoundError:
        return 0
    return int(lines[-1].split('"step": ')[1].split(",")[0]) if lines else 0


def is_saving(run: Path, after: int) -> bool:
    try:
        names = os.listdir(run / "checkpoints")
    except FileNotFoundError:
        return False
    return f"step-{after:08d}" in names and any(name.startswith(".step-") for name in names)


def until(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while process.poll() is None and not condition():
        time.sleep(0.002)


def kill_in_start_up(process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    first = chance.choice((".", "recipe.yaml", "provenance.json", "metrics.jsonl"))
    until(process, (run / first).exists)
    time.sleep(chance.uniform(0, 0.02))


def kill_in_a_step(process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    step = chance.randrange(STEPS - 30)
    until(process, lambda: logged(run) >= step)
    time.sleep(chance.uniform(0, 0.01))


def kill_in_a_checkpoint(process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    after = EVERY * chance.randrange(1, STEPS // EVERY - 4)
    until(process, lambda: is_saving(run, after) or logged(run) > after + 2 * EVERY)
    time.sleep(chance.choice((0, 0, 0.001, 0.003)))


def kill_in_an_evaluation(process: subprocess.Popen[str], run: Path, chance: random.Random) -> None:
    step = EPOCH_STEPS * chance.randrange(1, EPOCHS)
    until(process, lambda: logged(run) >= step)  # written just before the evaluation begins
    time.sleep(chance.uniform(0, 0.02))


def kill(arguments: tuple[str | Path, ...], run: Path, moment: Callable[..., None], chance: random.Random) -> str:
    """Starts a command and kills it at a moment; says where it was."""
    with running(*arguments) as process:
        moment(process, run, chance)
        process.kill()
        process.wait()
    return f"{moment.__name__}: status {process.returncode} after step {logged(run)}"


def go_on(folder: Path, run: Path, precision: str) -> None:
    """What a user does: resume the run, or start it again where it was killed before it was one."""
    arguments: tuple[str | Path, ...] = ("train", "--resume", run)
    if not (run / "recipe.yaml").exists():
        arguments = ("train", folder / "recipe.yaml", "--run", run, f"precision={precision}")
    said = finished(*arguments)
    assert said.status == 0, said.err


def moments(chance: random.Random, count: int) -> Iterator[Callable[..., None]]:
    kinds = [kill_in_start_up, kill_in_a_step, kill_in_a_checkpoint, kill_in_an_evaluation]
    for number in range(count):
        yield kinds[number % len(kinds)]


@pytest.mark.check
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("precision", "kills"), [("fp32", 8), ("bf16", 4)])
def test_killed_at_random_moments(folder: Path, whole: Callable[[str], Path], precision: str, kills: int) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    expected, killed = whole(precision), 0
    for number, moment in enumerate(moments(chance, kills)):
        run = folder / f"killed-{precision}-{number}"
        begin = ("train", folder / "recipe.yaml", "--run", run, f"precision={precision}")
        said = kill(begin, run, moment, chance)
        print(said)
        killed += "status -9" in said
        go_on(folder, run, precision)
        assert_same(run, expected)
    assert killed  # the others had ended before they were killed


@pytest.mark.check
def test_killed_twice(folder: Path, whole: Callable[[str], Path]) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance, run = random.Random(seed), folder / "killed-twice"
    print(kill(("train", folder / "recipe.yaml", "--run", run), run, kill_in_a_checkpoint, chance))
    print(kill(("train", "--resume", run), run, kill_in_an_evaluation, chance))
    go_on(folder, run, "fp32")
    assert_same(run, whole("fp32"))


def test_sigterm_and_ctrl_c_save_and_say_how_to_go_on(folder: Path, whole: Callable[[str], Path]) -> None:
    run = folder / "signalled"
    arguments: tuple[str | Path, ...] = ("train", folder / "recipe.yaml", "--run", run, paced(folder))
    for number, step in ((signal.SIGTERM, 10), (signal.SIGINT, 40)):
        with running(*arguments) as process:
            with slowly(folder):
                until(process, partial(lambda step: logged(run) >= step, step))
                process.send_signal(number)
            out, err = process.communicate()
        assert process.returncode == 1, err
        stopped = Checkpoints(run / "checkpoints").newest()
        assert stopped is not None
        assert step <= stopped.step < STEPS
        expected = f"Stopped at step {stopped.step} of {STEPS}; resume with: headway train --resume {run}\n"
        assert out == expected
        assert "Traceback" not in err
        assert logged(run) == stopped.step
        arguments = ("train", "--resume", run)
    said = headway(*arguments)
    assert f"Resumed at step {stopped.step} of {STEPS} from {stopped.path.name}.\n" in said.err
    assert_same(run, whole("fp32"), records_too=False)  # a stop writes a record of its own
    assert [one["ranks"] for one in RunFolder.open(run).read_provenance()["resumes"]] == [1, 1]
    headway("report", run)
    shown = RunFolder.open(run).report_path.read_text()
    assert all(text in shown for text in ("started again", "2 times", f"from step {stopped.step}, by 1 process"))


def test_a_finished_run_is_left_as_it_is(folder: Path, whole: Callable[[str], Path]) -> None:
    run = whole("fp32")
    before = files(run)
    said = headway("train", "--resume", run)
    assert f"Resumed at step {STEPS} of {STEPS}" in said.err
    assert said.out.startswith(f"Trained {run}:")
    assert files(run) == before


@pytest.mark.check
def test_a_run_without_a_checkpoint_begins_anew(folder: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """Killed in its first steps: there is a recipe, some logs, and nothing to go on from."""
    run = folder / "no-checkpoint"
    headway("train", folder / "recipe.yaml", "--run", run)
    for path in (run / "checkpoints").rglob("*"):
        path.unlink() if path.is_file() else None
    for path in (run / "checkpoints").iterdir():
        path.rmdir()
    (run / "weights.safetensors").unlink()
    said = headway("train", "--resume", run)
    assert "This run has no checkpoint yet: it starts from the beginning." in said.err
    assert_same(run, whole("fp32"))


def test_a_run_killed_before_its_recipe_was_written_can_be_started_again(folder: Path) -> None:
    run = folder / "unborn"
    (run / "panels").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    (run / "provenance.json").write_text("{}")
    (run / ".recipe.yaml.123").write_text("tor")
    said = headway("train", "--resume", run, status=2)
    assert "it has no recipe.yaml" in said.err
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=0.1", "schedule={name: constant}")
    assert (run / "summary.json").exists()


def test_other_data_is_refused(folder: Path, tmp_path: Path) -> None:
    run = folder / "other-data"
    headway("train", folder / "recipe.yaml", "--run", run, "epochs=0.5", "schedule={name: constant}")
    (folder / "digits.packed").rename(folder / "kept")
    try:
        packed_digits(tmp_path, per_class=12)
        (tmp_path / "digits.packed").rename(folder / "digits.packed")
        assert len(opening.open(folder / "digits.packed/train")) == 90
        said = headway("train", "--resume", run, status=1)
        assert "the data, the seed or the decoder is not what this run began with" in said.err
        (folder / "digits.packed").rename(tmp_path / "other")
    finally:
        (folder / "kept").rename(folder / "digits.packed")
    headway("train", "--resume", run)


def test_two_processes_cannot_train_in_one_folder(folder: Path) -> None:
    run = folder / "twice"
    with running("train", folder / "recipe.yaml", "--run", run, "epochs=1000") as process:
        until(process, lambda: logged(run) >= 12)
        said = headway("train", "--resume", run, status=2)
        assert "another process trains in this run folder. Wait for it, or stop it." in said.err
        assert process.poll() is None
        process.kill()  # a lock goes with its process
        process.wait()
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("epochs: 1000.0", "epochs: 1.0"))
    assert "Resumed at step" in headway("train", "--resume", run).err


def test_resume_takes_a_run_and_nothing_else(folder: Path) -> None:
    for more in (("recipe.yaml",), ("--run", folder / "x"), ("--repeat", "2")):
        said = headway("train", "--resume", folder / "x", *more, status=2)
        assert "a recipe, --run and --repeat cannot be combined with --resume" in said.err
    assert "there is no such run folder" in headway("train", "--resume", folder / "x", status=2).err
