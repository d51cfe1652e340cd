"""Trials that take forward and backward together train as each would alone, to rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from tests._support import collect_messages, packed_digits, write_recipe

from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.setup.recipe import TrainRecipe
from headway.sweep import fuse, fuse_choice
from headway.sweep.cohort import Assignment, Cohorts, Outcome
from headway.sweep.fuse import Fusing
from headway.sweep.fuse_choice import FuseChoice
from headway.training.progress import hide_progress

NET = """
from torch import nn

def net(num_classes):
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(80, num_classes),
    )

def drops(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, num_classes))
"""
TRIALS: dict[int, tuple[str, ...]] = {
    0: ("optimizer.lr=0.02",),
    1: ("optimizer.lr=0.1", "optimizer.weight_decay=0.01", "task.args={label_smoothing: 0.1}"),
    2: ("optimizer={name: adamw, lr: 0.01}", "model.ema={half_life_steps: 5}"),
    3: ("optimizer.lr=0.2", "optimizer.clip_norm=0.5"),
}
"""What each trial differs in: everything that may differ between trials of one group."""
PLACES = tuple(TRIALS)
STEPS, RUNG, NEXT = 100, 8, 16
EVERYTHING = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuse")
    packed_digits(folder)
    (folder / "nets.py").write_text(NET)
    changes: dict[str, Any] = {"model": {"factory": "nets.py:net"}, "augment": {"flip": True}}
    changes |= {"evaluate": {"every_epochs": 4, "at_steps": [RUNG]}, "checkpoint": {"every_epochs": 4, "keep": 9}}
    write_recipe(folder / "recipe.yaml", device="cpu", epochs=STEPS / 6, precision="fp32", **changes)
    return folder


def assign(folder: Path, name: str, trial: int, until: int = EVERYTHING, *more: str) -> Assignment:
    loaded = read_recipe(folder / "recipe.yaml", (*TRIALS[trial], *more), TrainRecipe)
    return Assignment(trial=trial, folder=folder / name / str(trial), loaded=loaded, until=until)


@contextmanager
def cohorts(fusing: Fusing | None = None, stopping: Callable[[], bool] = lambda: False) -> Iterator[Cohorts]:
    opened = Cohorts(stopping)
    opened.fusing = fusing
    try:
        with hide_progress(True):
            yield opened
    finally:
        opened.close()


def always(places: Sequence[int] = PLACES) -> Fusing:
    """The choice of a journal: these trials are fused."""
    return Fusing({trial: tuple(places) for trial in places}, {}, lambda choice: pytest.fail("it is chosen already"))


def train(opened: Cohorts, *assignments: Assignment) -> dict[int, Outcome]:
    return {outcome.trial: outcome for outcome in opened.train(assignments)}


def read_tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights, statistics and state of the optimizer in a checkpoint."""
    files = (run / f"checkpoints/step-{step:08d}").glob("*.safetensors")
    return {f"{path.stem} {name}": value for path in files for name, value in load_file(path).items()}


def is_same(run: Path, other: Path, step: int = NEXT) -> bool:
    weights, expected = read_tensors(run, step), read_tensors(other, step)
    return weights.keys() == expected.keys() and all(
        torch.equal(value, expected[name]) for name, value in weights.items()
    )


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The trials without fusing."""
    with cohorts() as opened:
        train(opened, *(assign(folder, "alone", trial, NEXT) for trial in TRIALS))
    return folder / "alone"


@pytest.fixture(scope="module")
def fused(folder: Path) -> Path:
    """The trials fused from their first step on."""
    calls = 0

    def count(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return real(*arguments)

    real = fuse.Group.compute
    with cohorts(always()) as opened, patch.object(fuse.Group, "compute", count):
        train(opened, *(assign(folder, "fused", trial, NEXT) for trial in TRIALS))
    # The first step of a run is its own.
    assert calls == len(TRIALS) * (NEXT - 1)
    return folder / "fused"


def expect_near(one: Path, other: Path, step: int, within: float = 1e-5) -> None:
    """Weights are near each other, and the records say nearly the same."""
    weights, expected = (read_tensors(run, step) for run in (one, other))
    assert weights.keys() == expected.keys()
    names = [name for name in expected if name.startswith("tensors-0 model")]
    for name in names:
        difference = (weights[name].double() - expected[name].double()).norm()
        assert difference <= within * expected[name].double().norm() + 1e-7, name
    assert len(names) > 5
    records = [RunFolder.open(run).read_metrics() for run in (one, other)]
    for row, as_expected in zip(*records, strict=True):
        assert row.keys() == as_expected.keys()
        assert row["step"] == as_expected["step"]
        assert row["loss"] == pytest.approx(as_expected["loss"], rel=max(1e-4, 10 * within))
        assert row.get("accuracy") == pytest.approx(as_expected.get("accuracy"), abs=0.02)


def test_fused_trials_are_the_trials_alone_to_rounding(fused: Path, alone: Path) -> None:
    """With rates, optimizers, losses, averages and clipping of their own."""
    for trial in map(str, TRIALS):
        expect_near(fused / trial, alone / trial, NEXT)


@pytest.mark.check
def test_fused_trials_stay_near_for_a_hundred_steps(folder: Path) -> None:
    for name, fusing in (("long", always()), ("long-alone", None)):
        with cohorts(fusing) as opened:
            train(opened, *(assign(folder, name, trial) for trial in TRIALS))
    for trial in map(str, TRIALS):
        # Steps amplify rounding, which depends on the processor: up to 1.2e-5 at these high rates, with two threads.
        expect_near(folder / "long" / trial, folder / "long-alone" / trial, STEPS, within=1e-4)


@pytest.mark.check
def test_bits_depend_on_the_places_alone(folder: Path, fused: Path) -> None:
    """Others may have diverged, may train in another process, or stop: each trial goes on with its bits."""
    with cohorts(always()) as opened:
        found = train(opened, *(assign(folder, "apart", trial, NEXT) for trial in (0, 3)))
        assert {one.kind for one in found.values()} == {"done"}
    with cohorts(always()) as opened:
        diverges = {1: ("optimizer.lr=1e30", "log_every_steps=4")}
        bad = (assign(folder, "bad", trial, NEXT, *diverges.get(trial, ())) for trial in (0, 1, 2))
        assert {trial: one.kind for trial, one in train(opened, *bad).items()} == {0: "done", 1: "diverged", 2: "done"}
    turns = iter(range(EVERYTHING))
    with cohorts(always(), lambda: next(turns) > RUNG) as opened:
        stopped = train(opened, *(assign(folder, "stopped", trial, NEXT) for trial in TRIALS))
        assert {one.kind for one in stopped.values()} == {"stopped"}
    with cohorts(always()) as opened:
        train(opened, *(assign(folder, "stopped", trial, NEXT) for trial in TRIALS))
    for name, trials in (("apart", (0, 3)), ("bad", (0, 2)), ("stopped", PLACES)):
        for trial in trials:
            assert is_same(folder / name / str(trial), fused / str(trial)), f"{name} {trial}"


def measure(gains: Mapping[int, float]) -> Callable[..., FuseChoice]:
    """A measurement with these gains by number of trials."""

    def found(trainers: Sequence[Any], batch: Any) -> FuseChoice:
        gain = gains[len(trainers)]
        at_once = 2 if gain > 1 else 0
        return FuseChoice(trials=(), at_once=at_once, gain=gain, network="", alone_s=gain, fused_s=1.0)

    return found


def test_what_gains_nothing_is_not_fused_and_keeps_its_bits(folder: Path, alone: Path) -> None:
    """The real measurement leaves every trial as it was; its result is told once, and holds for the next rung."""
    choices: list[FuseChoice] = []
    fusing = Fusing({}, {}, choices.append)
    measured: list[int] = []

    def slow(trainers: Sequence[Any], batch: Any) -> FuseChoice:
        measured.append(len(trainers))
        return replace(fuse_choice.measure_gain(trainers, batch), at_once=0)

    with cohorts(fusing) as opened, patch.object(fuse, "measure_gain", slow):
        train(opened, *(assign(folder, "slow", trial, RUNG) for trial in TRIALS))
        train(opened, *(assign(folder, "slow", trial, NEXT) for trial in TRIALS))
    groups = [choice.trials for choice in choices]
    assert groups == [PLACES] * 2
    assert measured == [4]
    assert choices[0].alone_s > 0 == choices[1].alone_s
    assert "not fused" in choices[0].describe()
    assert choices[1].describe() == ""
    assert all(is_same(folder / "slow" / str(trial), alone / str(trial)) for trial in TRIALS)


def test_a_choice_is_told_before_it_counts(folder: Path) -> None:
    choices: list[FuseChoice] = []
    with cohorts(Fusing({}, {}, choices.append)) as opened, patch.object(fuse, "measure_gain", measure({4: 1.5})):
        train(opened, *(assign(folder, "fast", trial, RUNG) for trial in TRIALS))
    (choice,) = choices
    record = choice.to_record()
    assert (record.trials, record.at_once) == (PLACES, 2)
    # Another process takes it from the journal.
    assert [record.find_places(trial) for trial in record.trials] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    fusing = Fusing({trial: record.find_places(trial) for trial in record.trials}, {}, choices.append)
    with cohorts(fusing) as opened:
        train(opened, *(assign(folder, "again", trial, RUNG) for trial in TRIALS))
    assert len(choices) == 1
    assert all(is_same(folder / "fast" / str(trial), folder / "again" / str(trial), RUNG) for trial in TRIALS)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("model.factory=nets.py:drops",), "dropout"),
        (("micro_batch=10",), "micro-batches"),
        (("precision=bf16",), "their precision is bf16"),
        (("observe.noise_scale=true",), "passes of their own"),
    ],
)
def test_what_cannot_be_fused_says_why_once(folder: Path, changes: tuple[str, ...], reason: str) -> None:
    name = changes[0].replace("/", "-")
    with collect_messages() as said, cohorts(Fusing({}, {}, lambda choice: pytest.fail("nothing to choose"))) as opened:
        found = train(opened, *(assign(folder, name, trial, 3, *changes) for trial in (0, 3)))
    assert {one.kind for one in found.values()} == {"done"}
    (sentence,) = [text for text in said if "not fused" in text]
    assert reason in sentence
