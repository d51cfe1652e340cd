"""Callbacks by import path, and early stopping: what they see, log and stop; no resume is broken unnoticed."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests._support import (
    finished,
    headway,
    paced,
    packed_digits,
    read_newest,
    records,
    running,
    slowly,
    write_recipe,
)

from headway.checkpoint.checkpoints import Checkpoints
from headway.core.recipe import read_recipe
from headway.setup.recipe import TrainRecipe
from headway.training import runs
from headway.training.callback_state import decode_state, encode_state

USER = '''
import os, signal
from pathlib import Path
import numpy as np
import torch

class Seen:
    """Notes every hook, and logs."""
    def __init__(self, every=4):
        self.every, self.notes, self.mean = every, [], torch.zeros(2)
    def note(self, hook, run):
        self.notes.append((hook, run.step))
    def on_start(self, run):
        self.note("start", run)
    def on_step(self, run):
        self.note("step", run)
        self.mean = 0.9 * self.mean + 0.1 * torch.rand(2)
        run.log(mean=self.mean[0], loss_of_part=run.losses.mean())
        if run.step == 5 and Path(__file__).with_name("interrupt").exists():
            Path(__file__).with_name("interrupt").unlink()
            os.kill(os.getpid(), signal.SIGTERM)
    def on_evaluate(self, run):
        self.note("evaluate", run)
        run.log(accuracy_now=run.metrics["accuracy"])
        run.log_table("classes", ["class", "count"], [["0", 3], ["1", 0.25]])
        with run.evaluation_mode() as model:
            assert not model.training
            assert not model(torch.zeros(1, 1, 8, 8)).requires_grad
    def on_epoch(self, run):
        self.note("epoch", run)
        run.log_images("first", [np.zeros((8, 8), np.uint8)], ["black"])
    def on_end(self, run):
        self.note("end", run)
        Path(__file__).with_name("notes").write_text(repr((self.notes, self.mean.tolist())))
    def state_dict(self):
        return {"notes": self.notes, "mean": self.mean}
    def load_state_dict(self, state):
        self.notes, self.mean = state["notes"], state["mean"]

class Stops:
    def __init__(self, step):
        self.step = step
    def on_step(self, run):
        if run.step == self.step:
            run.stop("enough")

class Forgets:
    def __init__(self):
        self.count = 0
    def on_step(self, run):
        self.count += 1

class Remembers(Forgets):
    unsaved = ("count",)

def failing(hook, code):
    """An object with one hook."""
    return type("Failing", (), {hook: lambda self, run: exec(code, {"run": run, "torch": torch, "np": np})})()

class Doubles:
    changes_training = True
    def on_epoch(self, run):
        with torch.no_grad():
            run.model[1].weight.mul_(2)

class Reads:
    def on_step(self, run):
        run.losses.mean().item()

class Leads:
    def on_step(self, run):
        with open(Path(__file__).with_name("lead"), "a") as file:
            print(os.getpid(), run.step, file=file)
    def state_dict(self):
        return {}
    def load_state_dict(self, state): ...

class Hooks:
    def on_train_batch_end(self, run): ...

class Nothing:
    pass

ready = Remembers()
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callbacks")
    packed_digits(folder)
    write_recipe(folder / "recipe.yaml", model={"factory": "net.py:dropout"}, log_every_steps=4)
    (folder / "user.py").write_text(USER)
    return folder


def train(folder: Path, run: Path, *callbacks: Any, status: int = 0, more: tuple[str, ...] = ()) -> str:
    text = json.dumps([one if isinstance(one, dict) else f"user.py:{one}" for one in callbacks])
    return headway("train", folder / "recipe.yaml", "--run", run, f"callbacks={text}", *more, status=status).err


def weights(run: Path) -> bytes:
    return (run / "weights.safetensors").read_bytes()


def test_interrupted_and_resumed_is_uninterrupted(folder: Path, tmp_path: Path) -> None:
    headway("train", folder / "recipe.yaml", "--run", tmp_path / "plain")
    train(folder, tmp_path / "whole", "Seen")
    whole = (folder / "notes").read_text()
    # 180 samples in batches of 30: six steps an epoch.
    steps = [("step", step) for step in range(1, 13)]
    ends = {6: [("evaluate", 6), ("epoch", 6)], 12: [("evaluate", 12), ("epoch", 12)]}
    expected = [("start", 0)] + [note for step in steps for note in (step, *ends.get(step[1], []))] + [("end", 12)]
    assert eval(whole)[0] == expected
    # Its draws and its look at the network have not touched the training.
    assert weights(tmp_path / "whole") == weights(tmp_path / "plain")

    (folder / "interrupt").touch()
    train(folder, tmp_path / "cut", "Seen", status=1)
    headway("train", "--resume", tmp_path / "cut")
    notes, mean = eval((folder / "notes").read_text())
    # on_end of the interrupted process came after its checkpoint, so it is no part of the state.
    assert notes == [*expected[:6], ("start", 5), *expected[6:]]
    assert mean == eval(whole)[1]
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")
    logged, again = (
        [{key: value for key, value in record.items() if key != "seconds"} for record in records(run, "callback")]
        for run in (tmp_path / "whole", tmp_path / "cut")
    )
    assert [record["step"] for record in logged] == [*range(1, 7), 6, *range(7, 13), 12]
    assert logged == again
    panels = tmp_path / "whole" / "panels"
    assert "Logged by user.py:Seen at step 12." in (panels / "callback-classes.json").read_text()
    assert "data:image/png" in (panels / "callback-first.json").read_text()
    headway("report", tmp_path / "whole")
    assert "loss_of_part" in (tmp_path / "whole" / "report.html").read_text()


def test_a_callback_ends_the_run(folder: Path, tmp_path: Path) -> None:
    said = train(folder, tmp_path / "run", {"factory": "user.py:Stops", "args": {"step": 8}})
    assert "user.py:Stops: enough" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["finished"], summary["step"], summary["ended"]) == (True, 8, "user.py:Stops: enough")
    assert [record["step"] for record in records(tmp_path / "run", "evaluate")] == [6, 8]
    assert "It is at its end" in headway("train", "--resume", tmp_path / "run").err
    # At the end of an epoch the evaluation is not made twice.
    train(folder, tmp_path / "epoch", {"factory": "user.py:Stops", "args": {"step": 6}})
    assert [record["step"] for record in records(tmp_path / "epoch", "evaluate")] == [6]


@pytest.mark.check
def test_all_ranks_end_in_the_same_step(folder: Path, tmp_path: Path) -> None:
    for name, option, step in (
        ("callback", "callbacks=[{factory: 'user.py:Stops', args: {step: 3}}]", 4),
        ("early", "early_stopping={metric: loss, patience_epochs: 1, min_delta: 50}", 12),
    ):
        run = tmp_path / name
        said = finished("train", folder / "recipe.yaml", "--procs", "2", "--run", run, option, "epochs=4")
        assert said.status == 0, said.err
        summary = json.loads((run / "summary.json").read_text())
        assert (summary["finished"], summary["step"]) == (True, step)
        newest = read_newest(Checkpoints(run / "checkpoints"))
        assert newest is not None
        assert newest.step == step
        assert "It is at its end" in finished("train", "--resume", run).err


def test_early_stopping(folder: Path, tmp_path: Path) -> None:
    # No accuracy improves by more than 1, so the first evaluation is the best one.
    patient = "early_stopping={patience_epochs: 2, min_delta: 1}"
    said = train(folder, tmp_path / "whole", more=(patient, "epochs=9"))
    assert "early_stopping: accuracy has not improved by more than 1 since epoch 1" in said
    assert [record["epoch"] for record in records(tmp_path / "whole", "evaluate")] == [1, 2, 3]
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["finished"]
    # A resumed run counts the epochs before.
    (folder / "interrupt").touch()
    train(folder, tmp_path / "cut", "Seen", more=(patient, "epochs=9", "evaluate.every_epochs=0.5"), status=1)
    headway("train", "--resume", tmp_path / "cut")
    assert records(tmp_path / "cut", "evaluate")[-1]["epoch"] == 2.5


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("early_stopping={patience_epochs: 3, metric: acuracy}", "Did you mean 'accuracy'?"),
        ("early_stopping={patience_epochs: 0.5}", "evaluate.every_epochs 1: set it to at least that"),
        ("callbacks=[user.py:Hooks]", "no run calls the method 'on_train_batch_end'"),
        ("callbacks=[user.py:Nothing]", "has no method of a callback"),
        ("callbacks=[{factory: 'user.py:Seen', args: {evry: 4}}]", "cannot be called"),
        ("callbacks=[user.py:Sean]", "Did you mean 'Seen'?"),
    ],
)
def test_bad_recipes(folder: Path, tmp_path: Path, option: str, said: str) -> None:
    assert said in headway("train", folder / "recipe.yaml", "--run", tmp_path / "run", option, status=2).err


@pytest.mark.parametrize(
    ("hook", "code", "said"),
    [
        ("on_step", "torch.zeros(3)[7]", "on_step of the callback 'user.py:failing' failed: IndexError"),
        ("on_evaluate", "run.log(step=3)", "run.log cannot write 'step'"),
        ("on_step", "run.model[0].weight.data.mul_(2)", "changes '0.weight' of the network"),
        ("on_step", "run.model[1].running_mean.add_(1)", "changes '1.running_mean' of the network"),
        ("on_step", "run.model.eval()", "switches modules between training and evaluation mode"),
        ("on_step", "run.optimizer.param_groups[0]['lr'] = 1.0", "changes lr or another option"),
        ("on_epoch", "run.model[0].weight.grad = torch.zeros(6, 1, 3, 3)", "sets gradients"),
        ("on_start", "run.model[0].weight.requires_grad_(False)", "freezes or unfreezes parameters"),
    ],
)
def test_a_callback_that_fails_or_changes_the_training(
    folder: Path, tmp_path: Path, hook: str, code: str, said: str
) -> None:
    callback = {"factory": "user.py:failing", "args": {"hook": hook, "code": code}}
    err = train(folder, tmp_path / "run", callback, status=1)
    assert said in err
    assert f"{folder / 'user.py'}:" in err
    assert "Traceback" in err or "changes" in said or "sets" in said or "freezes" in said or "switches" in said


def test_a_state_that_no_checkpoint_holds(folder: Path, tmp_path: Path) -> None:
    said = train(folder, tmp_path / "run", "Forgets", status=1)
    assert "changes its attribute 'count', which no checkpoint would hold" in said
    train(folder, tmp_path / "other", "Remembers", "ready")


def test_weights_that_may_change_are_in_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", "Doubles", more=("model.factory=net.py:linear",))
    train(folder, tmp_path / "plain", more=("model.factory=net.py:linear",))
    assert weights(tmp_path / "run") != weights(tmp_path / "plain")


def test_reads_in_on_step_are_counted_and_named(folder: Path, tmp_path: Path) -> None:
    train(folder, tmp_path / "run", "Reads", more=("epochs=6",))
    reads = json.loads((tmp_path / "run" / "summary.json").read_text())["host_syncs"]
    line = next(number for number, text in enumerate(USER.splitlines(), 1) if "losses.mean().item()" in text)
    assert [place["place"] for place in reads["places"]] == [f"user.py:{line}"]


def test_objects_of_a_python_program(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Counts:
        def __init__(self) -> None:
            self.steps = 0

        def on_step(self, run: Any) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.steps = state["steps"]

    counts = Counts()
    loaded = read_recipe(folder / "recipe.yaml", (), TrainRecipe)
    runs.train_recipe(loaded, tmp_path / "run", [counts])
    assert counts.steps == 12
    again = Counts()
    runs.resume(tmp_path / "run", [again])
    assert again.steps == 12
    with caplog.at_level("WARNING"):
        runs.resume(tmp_path / "run")
    assert "goes on without the callback 'python:" in caplog.text


def test_states_come_back_equal() -> None:
    state = {
        "numbers": [1, 2.5, True, None, "text", float("inf")],
        "pair": (1, (2, "x")),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
    }
    found = decode_state(json.loads(json.dumps(encode_state(state))))
    assert found["numbers"] == state["numbers"]
    assert found["pair"] == state["pair"]
    assert np.array_equal(found["array"], state["array"])
    for name in ("empty", "half", "scalar"):
        assert torch.equal(found[name], state[name])
        assert found[name].dtype == state[name].dtype
    for wrong in ({1: 2}, {"x": {1, 2}}, {"x": random.Random()}):
        with pytest.raises(TypeError, match="state"):
            encode_state(wrong)


@pytest.mark.parametrize("more", [("model.ema={half_life_steps: 4}",), ("precision=bf16", "half_weights=true")])
def test_a_look_at_averages_and_16_bit_weights_changes_nothing(
    folder: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    train(folder, tmp_path / "run", "Seen", more=more)
    train(folder, tmp_path / "plain", more=more)
    assert weights(tmp_path / "run") == weights(tmp_path / "plain")


@pytest.mark.check
def test_the_next_lead_goes_on_with_the_callbacks(folder: Path, tmp_path: Path) -> None:
    run, notes = tmp_path / "run", folder / "lead"
    options = ("callbacks=[user.py:Leads]", "epochs=6", paced(folder))
    with slowly(folder), running("train", folder / "recipe.yaml", "--run", run, "--procs", "2", *options) as process:
        wait_until(lambda: notes.exists() and len(notes.read_text().splitlines()) >= 4)
        first = int(notes.read_text().splitlines()[-1].split()[0])
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: int(notes.read_text().splitlines()[-1].split()[0]) != first)
        (folder / "slowly").unlink()
        _, err = process.communicate(timeout=120)
        (folder / "slowly").touch()
    assert process.returncode == 0, err
    assert (
        "The callback 'user.py:Leads' goes on here with its state of step 0: what it saw on the lost rank is gone"
        in err
    )
    steps = [int(line.split()[1]) for line in notes.read_text().splitlines()]
    # No step is left out, none is seen twice: at most the one in which the lead was lost is missing.
    assert steps == sorted(set(steps))
    assert len(steps) >= 35
    assert json.loads((run / "summary.json").read_text())["finished"]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
