"""Trials that share one Loader, against trials with a Loader each: CPU seconds per step of all trials.

The recipe reads 250 ImageNet photographs from a seekable pack, RandomResizedCrop to 64 pixels and flip, batches of 64.
Trials differ in their learning rates. `Cohorts` of `headway sweep` trains them in turns; a trial alone is what
`headway train` does. Both run in this process with one thread of torch and one that decodes, round by round in turn.

CPU seconds are those of all threads, read after each step, between the first steps and the last one. So the figures
have neither the set-up nor the end of a run, and batches that a Loader has made ahead cancel out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import nn

import headway
from bench._common import Claim, median, table
from bench._data import images
from headway.core.messages import mute_messages
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.core.run_folder import RunFolder
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.sweep.cohort import Assignment, Cohorts
from headway.training.progress import SilentDisplay, hide_progress
from headway.training.run_steps import start_run
from headway.training.trainer import Trainer

BATCH, SIDE, IMAGES = 64, 64, 250


def build_network(num_classes: int, in_channels: int, *, width: int) -> nn.Module:
    """Builds two convolutions of stride 2 and a linear layer; at width 16 a step takes less than decoding."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, num_classes),
    )


@dataclass(frozen=True)
class Arm:
    """A network of the table, its width, and the numbers of trials that it is measured with."""

    name: str
    width: int
    trials: tuple[int, ...]


ARMS = (Arm("small", 16, (4, 8)), Arm("step as long as decoding", 24, (4,)))


@dataclass(frozen=True)
class Length:
    """How much is measured: rounds, and steps of a run before and within the measured part."""

    rounds: int
    first: int
    steps: int


FULL, QUICK = Length(5, 6, 20), Length(1, 2, 3)


@dataclass(frozen=True, kw_only=True)
class Found:
    """CPU seconds of one arm.

    Attributes:
        decode_s: of a batch from a Loader alone.
        step_s: of a step on a kept batch.
        own_s, shared_s: of one step of all trials by the number of trials, in each round.
    """

    arm: Arm
    decode_s: float
    step_s: float
    own_s: dict[int, list[float]]
    shared_s: dict[int, list[float]]

    def predict(self, trials: int) -> float:
        """Returns k (d + s) / (d + k s), from decoding and step alone."""
        return trials * (self.decode_s + self.step_s) / (self.decode_s + trials * self.step_s)

    def measure_gain(self, trials: int) -> tuple[float, float, float]:
        """Returns the median of the gains of all rounds, and its interval."""
        return median([own / one for own, one in zip(self.own_s[trials], self.shared_s[trials], strict=True)])


def compare_loaders(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures all arms, prints the table, and returns `share_gain_k4`, `share_gain_k8` and `share_predicted`."""
    source = images(folder / "images")
    if source is None:
        return []
    headway.pack(source, folder / "pack", mode="seekable", threads=1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with mute_messages(), hide_progress(True):
            length, arms = (QUICK, (replace(ARMS[0], trials=(4,)),)) if options.quick else (FULL, ARMS)
            found = [measure(folder / str(arm.width), arm, length) for arm in arms]
    finally:
        torch.set_num_threads(before)
    table(build_rows(found))
    return build_claims(found[0], length)


def read_trial(folder: Path, arm: Arm, trial: int, length: Length) -> LoadedRecipe[TrainRecipe]:
    """Reads the recipe of a trial."""
    tree: dict[str, Any] = {
        "data": {
            "train": "../pack",
            "size": SIDE,
            "crop": "random",
            "threads": 1,
        },
        "augment": {"flip": True},
        "model": {"factory": f"{__name__}:build_network", "args": {"width": arm.width}},
        "optimizer": {"name": "sgd", "lr": 0.01 * (1 + trial), "momentum": 0.9},
        "schedule": "cosine",
        "batch": BATCH,
        # Whole steps: the photographs are read again and again.
        "epochs": (length.first + length.steps) * BATCH / IMAGES,
        "device": "cpu",
        "precision": "fp32",
        "seed": 1,
    }
    path = folder / f"{trial}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return read_recipe(path, (), TrainRecipe)


def measure(folder: Path, arm: Arm, length: Length) -> Found:
    """Measures one arm: decoding and step alone before all rounds, then trials alone and together in turn."""
    most = max(arm.trials)
    recipes = [read_trial(folder, arm, trial, length) for trial in range(most)]
    decode_s, step_s = (one(recipes[0], folder, length) for one in (measure_decoding, measure_steps))
    own_s: dict[int, list[float]] = {trials: [] for trials in arm.trials}
    shared_s: dict[int, list[float]] = {trials: [] for trials in arm.trials}
    for number in range(length.rounds):
        place = folder / str(number)
        # Every second round begins with the trials together.
        for is_shared in (False, True) if number % 2 == 0 else (True, False):
            if is_shared:
                for trials in arm.trials:
                    shared_s[trials].append(train_together(recipes[:trials], place / f"together-{trials}", length))
            else:
                seconds = [train_alone(one, place / f"alone-{trial}", length) for trial, one in enumerate(recipes)]
                for trials in arm.trials:
                    own_s[trials].append(sum(seconds[:trials]))
        for trials in arm.trials:
            for trial in range(trials):
                expect_same(place / f"alone-{trial}", place / f"together-{trials}" / str(trial))
    return Found(arm=arm, decode_s=decode_s, step_s=step_s, own_s=own_s, shared_s=shared_s)


def measure_decoding(loaded: LoadedRecipe[TrainRecipe], folder: Path, length: Length) -> float:
    """Measures CPU seconds of a batch from a Loader alone, as the recipe's run builds it."""
    setup = build_setup(loaded)
    with closing(setup.inputs):
        batches = iter(setup.inputs.build_batches(setup.recipe, setup.plan, 0))
        return measure_turns(batches, length)


def measure_steps(loaded: LoadedRecipe[TrainRecipe], folder: Path, length: Length) -> float:
    """Measures CPU seconds of a step without its input: every step has the same batch."""
    setup = build_setup(loaded)
    with closing(setup.inputs):
        batches = iter(setup.inputs.build_batches(setup.recipe, setup.plan, 0))
        kept = next(batches)
        kept.images, kept.labels = kept.images.clone(), kept.labels.clone()
        batches.close()
        setup.inputs.batch_source = lambda plan, position: itertools.repeat(kept)
        with closing(Trainer(setup, RunFolder.create(folder / "steps"), SilentDisplay())) as trainer:
            return measure_turns(trainer.iterate(), length)


def measure_turns(turns: Iterator[Any], length: Length) -> float:
    """Measures CPU seconds of one turn, after the first ones."""
    for _ in range(length.first):
        next(turns)
    began = time.process_time()
    for _ in range(length.steps):
        next(turns)
    return (time.process_time() - began) / length.steps


def train_alone(loaded: LoadedRecipe[TrainRecipe], folder: Path, length: Length) -> float:
    """Trains a trial by itself as `headway train` does; returns CPU seconds of a step."""
    steps = start_run(loaded, folder, warns=False)
    # The run yields before its first step too.
    next(steps)
    seconds = measure_turns(steps, length)
    for _ in steps:
        pass
    return seconds


def train_together(recipes: Sequence[LoadedRecipe[TrainRecipe]], folder: Path, length: Length) -> float:
    """Trains trials in turns as a worker of a sweep does; returns CPU seconds of one step of all."""
    stamps: list[float] = []

    def stop() -> bool:
        # The cohort asks before each step of all trials.
        stamps.append(time.process_time())
        return False

    until = length.first + length.steps
    assignments = [
        Assignment(trial=trial, folder=folder / str(trial), loaded=one, until=until)
        for trial, one in enumerate(recipes)
    ]
    with closing(Cohorts(stop)) as cohorts:
        assert all(outcome.kind == "done" for outcome in cohorts.train(assignments))
    # The first ones were asked for before each trial was built, and the last step has the ends of the runs.
    turns = stamps[len(recipes) :]
    return (turns[until - 1] - turns[length.first]) / (length.steps - 1)


def expect_same(one: Path, other: Path) -> None:
    """Asserts that two runs ended with the same weights, bit for bit."""
    weights, expected = (load_file(run / "weights.safetensors") for run in (one, other))
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), f"{name} of {one} and {other}"


def build_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """Builds the table; its times are CPU milliseconds."""
    rows = [("network", "trials", "decoding", "step", "own loaders", "one loader", "beyond both", "gain", "predicted")]
    for one in found:
        for trials in one.arm.trials:
            middle, low, high = one.measure_gain(trials)
            own, shared = (statistics.median(taken[trials]) for taken in (one.own_s, one.shared_s))
            beyond = shared - one.decode_s - trials * one.step_s
            times = [f"{1e3 * value:.1f}" for value in (one.decode_s, one.step_s, own, shared, beyond)]
            gain = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            rows.append((one.arm.name, str(trials), *times, gain, f"{one.predict(trials):.2f}"))
    return rows


def build_claims(small: Found, length: Length) -> list[Claim]:
    """Builds the claims of the small network."""
    claims = []
    for trials in small.arm.trials:
        middle, low, high = small.measure_gain(trials)
        how = f"{trials} trials, {length.rounds} rounds of {length.steps} steps; 95 % [{low:.3f}, {high:.3f}]"
        claims.append(Claim(f"share_gain_k{trials}", middle, "", how))
    gain = small.predict(4)
    how = f"predicted {gain:.2f}: decoding {1e3 * small.decode_s:.1f} ms, step {1e3 * small.step_s:.1f} ms"
    claims.append(Claim("share_predicted", gain / small.measure_gain(4)[0], "", f"{how}; weights equal in all runs"))
    return claims
