"""Trials that take turns in one process train exactly as each would alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests._support import packed_digits, write_recipe

from headway.core.recipe import read_recipe
from headway.setup.recipe import TrainRecipe
from headway.setup.seeding import GeneratorStates
from headway.sweep.cohort import Assignment, Cohorts, Outcome
from headway.training import runs
from headway.training.progress import hide_progress

DROPOUT = """
import random
import numpy as np
import torch
from torch import nn


class Noisy(nn.Module):
    '''Draws from each of the global generators in every step.'''

    def __init__(self, num_classes):
        super().__init__()
        self.first, self.head = nn.Linear(64, 32), nn.Linear(32, num_classes)

    def forward(self, x):
        x = nn.functional.dropout(self.first(x.flatten(1)).relu(), 0.2, self.training)
        return self.head(x * (1 + 0.1 * random.random() * np.random.rand() if self.training else x))


def noisy(num_classes):
    return Noisy(num_classes)
"""
RATES = {0: 0.02, 1: 0.1, 2: 0.3}
RUNG, STEPS = 5, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cohort")
    packed_digits(folder)
    (folder / "noisy.py").write_text(DROPOUT)
    changes = {"model": {"factory": "noisy.py:noisy"}, "augment": {"flip": True}, "evaluate": {"at_steps": [RUNG]}}
    write_recipe(folder / "recipe.yaml", device="cpu", **changes)
    return folder


def assign(folder: Path, name: str, trial: int, until: int = 1 << 30, *more: str) -> Assignment:
    overrides = (f"optimizer.lr={RATES[trial]}", *more)
    loaded = read_recipe(folder / "recipe.yaml", overrides, TrainRecipe)
    return Assignment(trial=trial, folder=folder / name / str(trial), loaded=loaded, until=until)


@contextmanager
def cohorts() -> Iterator[Cohorts]:
    opened = Cohorts(lambda: False)
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The same trials, each trained by itself."""
    with hide_progress(True):
        for trial in RATES:
            runs.train_recipe(assign(folder, "alone", trial).loaded, folder / "alone" / str(trial))
    return folder / "alone"


def expect_same(run: Path, other: Path) -> None:
    """Weights, optimizer, generators and evaluations of two runs are equal bit for bit."""
    newest = [sorted((one / "checkpoints").glob("step-*"))[-1] for one in (run, other)]
    assert newest[0].name == newest[1].name
    tensors, expected = ({path.name: load_file(path) for path in one.glob("*.safetensors")} for one in newest)
    assert tensors.keys() == expected.keys()
    for name, parts in tensors.items():
        assert parts.keys() == expected[name].keys()
        for key, value in parts.items():
            assert torch.equal(value, expected[name][key]), f"{name} {key}"
    assert (
        list(runs.RunFolder.open(run).read_metrics())[-1]["loss"]
        == (list(runs.RunFolder.open(other).read_metrics())[-1]["loss"])
    )
    weights = [load_file(one / "weights.safetensors") for one in (run, other)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def train(opened: Cohorts, *assignments: Assignment) -> dict[int, Outcome]:
    outcomes = {outcome.trial: outcome for outcome in opened.train(assignments)}
    assert outcomes.keys() == {one.trial for one in assignments}
    return outcomes


def test_trials_that_take_turns_are_the_trials_alone_bit_for_bit(folder: Path, alone: Path) -> None:
    """Also those that pause at a rung, in memory or out of it, and whose cohort changes meanwhile."""
    with cohorts() as opened:
        paused = train(opened, *(assign(folder, "together", trial, RUNG) for trial in RATES))
        assert {outcome.step for outcome in paused.values()} == {RUNG}
        assert all(outcome.metrics for outcome in paused.values())
        # Trial 2 leaves the memory; 0 and 1 go on without it.
        opened.end([2])
        assert opened.trials == [0, 1]
        ended = train(opened, *(assign(folder, "together", trial) for trial in (0, 1)))
    with cohorts() as opened:
        ended |= train(opened, assign(folder, "together", 2))
    for trial in RATES:
        assert ended[trial].kind == "done"
        expect_same(folder / "together" / str(trial), alone / str(trial))


def test_a_trial_that_trains_alone_copies_no_states(folder: Path, alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("states were copied")

    with monkeypatch.context() as patched, cohorts() as opened:
        patched.setattr(GeneratorStates, "read", refuse)
        patched.setattr(GeneratorStates, "restore", refuse)
        for until in (RUNG, STEPS):
            assert train(opened, assign(folder, "lone", 1, until))[1].step == until
    expect_same(folder / "lone" / "1", alone / "1")


def test_each_batch_is_decoded_once(folder: Path) -> None:
    with cohorts() as opened:
        train(opened, *(assign(folder, "once", trial, RUNG) for trial in RATES))
        (shared,) = opened._shared.values()
        assert shared.reads == RUNG
        train(opened, *(assign(folder, "once", trial, RUNG + 2) for trial in RATES))
        assert shared.reads == RUNG + 2


def test_trials_that_read_other_batches_share_nothing(folder: Path, alone: Path) -> None:
    with cohorts() as opened:
        train(opened, assign(folder, "apart", 0), assign(folder, "apart", 1, 4, "seed=7"), assign(folder, "apart", 2))
        assert len(opened._shared) == 1
    expect_same(folder / "apart" / "0", alone / "0")
    expect_same(folder / "apart" / "2", alone / "2")


def test_a_finished_trial_gives_its_result_again(folder: Path) -> None:
    """The coordinator was killed before it had written the result down, or the end of the journal was removed."""
    with cohorts() as opened:
        first = [train(opened, assign(folder, "again", 0, until))[0] for until in (RUNG, STEPS)]
    with cohorts() as opened:
        again = [train(opened, assign(folder, "again", 0, until))[0] for until in (RUNG, STEPS)]
    assert [one.step for one in first + again] == [RUNG, STEPS, STEPS, STEPS]
    for one, other in zip(first, again, strict=True):
        assert one.metrics
        assert other.metrics
        assert {name: other.metrics[name] for name in one.metrics} == one.metrics


def test_a_trial_that_diverges_or_crashes_leaves_the_others_as_they_are(folder: Path, alone: Path) -> None:
    with cohorts() as opened:
        found = train(
            opened,
            assign(folder, "bad", 0),
            assign(folder, "bad", 1, 1 << 30, "optimizer.lr=1e30"),
            assign(folder, "bad", 2, 1 << 30, "task.loss=no_such_module:loss"),
        )
        assert found[0].kind == "done"
        assert found[1].kind == "diverged"
        assert "not finite" in found[1].failure
        assert found[2].kind == "crashed"
        assert opened.trials == []
    expect_same(folder / "bad" / "0", alone / "0")


def test_a_stopped_cohort_saves_every_trial(folder: Path, alone: Path) -> None:
    turns = iter(range(1000))
    opened = Cohorts(lambda: next(turns) > 6)
    found = train(opened, *(assign(folder, "stopped", trial) for trial in RATES))
    opened.close()
    assert {outcome.kind for outcome in found.values()} == {"stopped"}
    with cohorts() as later:
        found = train(later, *(assign(folder, "stopped", trial) for trial in RATES))
    assert {outcome.kind for outcome in found.values()} == {"done"}
    for trial in RATES:
        expect_same(folder / "stopped" / str(trial), alone / str(trial))
