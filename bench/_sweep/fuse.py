"""Fused trials against trials in turns: CPU seconds of whole steps through the cohort of a sweep's worker.

Five networks, 4 trials with learning rates of their own on the same batches, one thread of torch; the two with short
steps also 8 trials. Four are the harder case: the measurement costs as many steps, and fewer trials gain by it. In each
round two cohorts train at once and alternate step by step: one in turns, the other with `--fuse auto`, which measures
in its second step and then chooses. Which of them is built first changes from round to round. CPU seconds are those of
all threads, between the first step and the last one: without the set-up and the end of the runs. `gain` has the
measurement; `rest` is that of the median step of the second half.

`fuse_difference` has the difference that two threads make in place of one beside it: steps amplify any rounding, most
of all where an activation is near zero.

The images are made, not read: decoding is the same in both, and is left out of the comparison.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from torch import nn

from bench._common import Claim, median, table
from bench._sweep.networks import two_convolutions
from headway.core.messages import mute_messages
from headway.core.recipe import LoadedRecipe, read_recipe
from headway.setup.recipe import TrainRecipe
from headway.sweep.cohort import Assignment, Cohorts
from headway.sweep.fuse import Fusing
from headway.sweep.fuse_choice import FuseChoice
from headway.training.progress import hide_progress

CLASSES = 10

Interval = tuple[float, float, float]
"""A median, and the ends of its interval."""


def build_perceptron(num_classes: int) -> nn.Module:
    """Builds three linear layers for 64 pixels."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, num_classes)
    )


def build_wide(num_classes: int, in_channels: int) -> nn.Module:
    """Builds the two convolutions of `two_convolutions` for 28 pixels."""
    body = two_convolutions(num_classes, in_channels)
    assert isinstance(body, nn.Sequential)
    return nn.Sequential(*body[:-1], nn.Linear(32 * 14 * 14, num_classes))


@dataclass(frozen=True)
class Arm:
    """A network of the table, with its images and its batch."""

    name: str
    factory: str
    side: int
    channels: int
    batch: int
    steps: int
    depth: int | None = None


CLAIMED = "2 convolutions, 8 pixels"
ARMS = (
    Arm("perceptron", f"{__name__}:build_perceptron", 8, 1, 64, 400),
    Arm(CLAIMED, "bench._sweep.networks:two_convolutions", 8, 1, 64, 400),
    Arm(f"{CLAIMED}, batch 256", "bench._sweep.networks:two_convolutions", 8, 1, 256, 300),
    Arm("2 convolutions, 28 pixels", f"{__name__}:build_wide", 28, 1, 64, 300),
    Arm("ResNet-8, 32 pixels", "headway.model:cifar_resnet", 32, 3, 64, 300, 8),
)


@dataclass(frozen=True)
class Taken:
    """CPU seconds of one step of all trials: the mean, and the median of the second half."""

    mean_s: float
    rest_s: float
    choice: FuseChoice | None = None


def compare_fusing(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures all networks, prints the table, and returns `fuse_gain_k8`, `fuse_auto_worst` and `fuse_difference`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    # Even, so that each worker is built first as often: the one that is has other places in memory.
    rounds, arms = (1, ARMS[1:2]) if options.quick else (4, ARMS)
    try:
        with mute_messages(), hide_progress(True):
            found = {
                (arm, trials): measure(folder / f"{number}-{trials}", arm, trials, rounds, quick=options.quick)
                for number, arm in enumerate(arms)
                for trials in ((8,) if options.quick else (4, 8) if arm.side == 8 and arm.batch == 64 else (4,))
            }
            differences = measure_differences(folder / "difference", ARMS[1], steps=10 if options.quick else 100)
    finally:
        torch.set_num_threads(before)
    rows = [("network", "batch", "trials", "in turns, ms", "auto, ms", "gain", "rest", "fused by", "measured")]
    gains, rests = dict[tuple[Arm, int], Interval](), dict[tuple[Arm, int], Interval]()
    for (arm, trials), pairs in found.items():
        key = arm, trials
        gains[key] = median([alone.mean_s / auto.mean_s for alone, auto in pairs])
        rests[key] = median([alone.rest_s / auto.rest_s for alone, auto in pairs])
        times = [f"{1e3 * statistics.median(taken.mean_s for taken in own):.2f}" for own in zip(*pairs, strict=True)]
        choices = [auto.choice for _, auto in pairs if auto.choice is not None]
        fused_by, measured = ([f"{getattr(one, name):.3g}" for one in choices] for name in ("at_once", "gain"))
        row = (arm.name, str(arm.batch), str(trials), *times, _show(gains[key]), _show(rests[key]))
        rows.append((*row, ", ".join(fused_by), ", ".join(measured)))
    table(rows)
    middle, low, high = next(one for (arm, trials), one in rests.items() if arm.name == CLAIMED and trials == 8)
    worst, worst_low, worst_high = min(gains.values())
    how = f"CPU seconds of whole steps, {rounds} rounds; 95 %"
    return [
        Claim("fuse_gain_k8", middle, "", f"{CLAIMED}, 8 trials, {how} [{low:.2f}, {high:.2f}]"),
        Claim("fuse_auto_worst", worst, "", f"with the measurement, {how} [{worst_low:.2f}, {worst_high:.2f}]"),
        Claim("fuse_difference", max(differences["fused"]), "", describe_differences(differences)),
    ]


def _show(gain: Interval) -> str:
    middle, low, high = gain
    return f"{middle:.2f} [{low:.2f}, {high:.2f}]"


def read_trial(folder: Path, arm: Arm, trial: int, steps: int) -> LoadedRecipe[TrainRecipe]:
    """Reads the recipe of a trial."""
    samples = 4 * arm.batch
    tree = {
        "data": {
            "train": "synthetic",
            "synthetic": {
                "samples": samples,
                "size": [arm.side, arm.side],
                "channels": arm.channels,
                "classes": CLASSES,
            },
        },
        "model": {"factory": arm.factory, "args": {} if arm.depth is None else {"depth": arm.depth}},
        "optimizer": {"name": "sgd", "lr": 0.005 * (1 + trial), "momentum": 0.9},
        "schedule": "cosine",
        "batch": arm.batch,
        "epochs": steps * arm.batch / samples,
        "device": "cpu",
        "precision": "fp32",
        "seed": 1,
        "observe": {"on_divergence": "ignore"},
    }
    path = folder / f"{trial}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return read_recipe(path, (), TrainRecipe)


def measure(folder: Path, arm: Arm, trials: int, rounds: int, *, quick: bool) -> list[tuple[Taken, Taken]]:
    """Measures trials in turns and with `auto`; returns both of each round."""
    steps = 30 if quick else arm.steps
    recipes = [read_trial(folder, arm, trial, steps) for trial in range(trials)]
    return [train_both(recipes, folder / str(number), steps, number % 2) for number in range(rounds)]


def train_both(
    recipes: Sequence[LoadedRecipe[TrainRecipe]], folder: Path, steps: int, fusing: int
) -> tuple[Taken, Taken]:
    """Trains trials as two workers of a sweep do, in turns and with `auto`; the workers alternate step by step.

    Args:
        fusing: the worker with `auto`, 0 or 1; worker 0 is built first.
    """
    place = threading.Condition()
    times: tuple[list[float], list[float]] = ([], [])
    choices: list[FuseChoice] = []
    ended: set[int] = set()
    turn = 0

    def work(own: int) -> None:
        nonlocal turn
        torch.set_num_threads(1)
        began = 0.0

        def stop() -> bool:
            # The cohort asks before each trial is built, and before each step of all trials.
            nonlocal began, turn
            times[own].append(time.process_time() - began)
            with place:
                turn = own if ended else 1 - own
                place.notify_all()
                place.wait_for(lambda: turn == own)
            began = time.process_time()
            return False

        try:
            with place:
                place.wait_for(lambda: turn == own)
            assignments = [
                Assignment(trial=trial, folder=folder / str(own) / str(trial), loaded=one, until=steps)
                for trial, one in enumerate(recipes)
            ]
            with closing(Cohorts(stop)) as cohorts:
                cohorts.fusing = Fusing({}, {}, choices.append) if own == fusing else None
                assert all(outcome.kind == "done" for outcome in cohorts.train(assignments))
        finally:
            with place:
                ended.add(own)
                turn = 1 - own
                place.notify_all()

    with ThreadPoolExecutor(2) as pool:
        for worker in [pool.submit(work, own) for own in (0, 1)]:
            worker.result()
    # Without the first step, and without the last one, which has the ends of the runs.
    own_times = [taken[len(recipes) + 2 : len(recipes) + steps] for taken in times]
    found = [Taken(statistics.mean(one), statistics.median(one[len(one) // 2 :])) for one in own_times]
    alone, auto = found[1 - fusing], found[fusing]
    return alone, replace(auto, choice=next(iter(choices), None))


def measure_differences(folder: Path, arm: Arm, trials: int = 8, steps: int = 100) -> dict[str, list[float]]:
    """Returns the relative differences of all tensors of weights from those of trials in turns.

    Of trials that are `fused`, and of trials in turns with two threads (`threads`).
    """
    recipes = [read_trial(folder, arm, trial, steps) for trial in range(trials)]
    together = Fusing(dict.fromkeys(range(trials), tuple(range(trials))), {}, print)
    for name, fusing, threads in (("turns", None, 1), ("fused", together, 1), ("threads", None, 2)):
        torch.set_num_threads(threads)
        with closing(Cohorts(lambda: False)) as cohorts:
            cohorts.fusing = fusing
            assignments = [
                Assignment(trial=trial, folder=folder / name / str(trial), loaded=one, until=steps)
                for trial, one in enumerate(recipes)
            ]
            assert all(outcome.kind == "done" for outcome in cohorts.train(assignments))
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {"fused": [], "threads": []}
    for trial in map(str, range(trials)):
        expected = load_file(folder / "turns" / trial / "weights.safetensors")
        for kind, differences in found.items():
            weights = load_file(folder / kind / trial / "weights.safetensors")
            differences += [
                ((weights[name].double() - value.double()).norm() / value.double().norm()).item()
                for name, value in expected.items()
            ]
    return found


def describe_differences(differences: Mapping[str, Sequence[float]]) -> str:
    """Describes the differences of `measure_differences`."""
    middle = statistics.median(differences["fused"])
    near = sum(one <= 1e-5 for one in differences["fused"]) / len(differences["fused"])
    return (
        f"weights of 8 trials after 100 steps, largest of all tensors; median {middle:.1e}, {near:.0%} within 1e-5; two"
        f" threads in place of one: {max(differences['threads']):.1e}"
    )
