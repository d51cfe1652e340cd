"""Two processes of two trials each that read from a feeder, against the same that decode for themselves.

The recipe is that of `sharing.py`: ImageNet photographs in a seekable pack, RandomResizedCrop to 64 pixels and flip,
batches of 64, a small network. Core seconds are those of all processes of the sweep, without their starts: of a process
that trains, what it has taken when it is ready; a feeder imports the same, and counts the same. The measurement before
the first trial does not count. The weights of all trials have to be equal, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

import headway
from bench._common import Claim, median, table
from bench._data import images
from bench._sweep.coordinator import note_starts
from bench._sweep.sharing import ARMS, BATCH, Length, expect_same, read_trial
from headway.core.messages import mute_messages
from headway.core.recipe_override import collect_given_values
from headway.sweep import sweep

SLOTS, TOGETHER, ROUNDS = 2, 2, 3
TRAINED = 225
"""Photographs that are left to train on; the others judge."""
LENGTH = Length(ROUNDS, 0, 211)
SPACE = {"parameters": {"optimizer.lr": {"log": [0.01, 0.1]}}}


@dataclass(frozen=True)
class Taken:
    """Core seconds of one sweep.

    Attributes:
        core_s: of all processes.
        start_s: of the start of one process, on average.
        predicted_gain: predicted core seconds without the feeder over those with it, from the costs that it measured.
    """

    core_s: float
    start_s: float
    predicted_gain: float


def compare_feeding(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures sweeps with and without a feeder in turn, prints the table, and returns `feeder_gain`."""
    source = images(folder / "images")
    if source is None:
        return []
    # Each photograph has a class of its own, so that none could be split off: ten classes of 25 in their place.
    for number, path in enumerate(sorted(source.rglob("*.JPEG"))):
        (folder / "classes" / str(number % 10)).mkdir(parents=True, exist_ok=True)
        path.rename(folder / "classes" / str(number % 10) / path.name)
    headway.pack(folder / "classes", folder / "pack", mode="seekable", threads=1, split=0.1)
    length = replace(LENGTH, rounds=1, steps=6) if options.quick else LENGTH
    loaded = read_trial(folder / "recipes", ARMS[0], 0, length)
    tree = collect_given_values(loaded)
    tree["epochs"] = length.steps * BATCH / TRAINED
    # Evaluations cost the same in both, so there is one at the end.
    tree["data"] |= {"train": str(folder / "pack/train"), "eval": str(folder / "pack/eval")}
    tree |= {"evaluate": {"every_epochs": tree["epochs"]}, "checkpoint": {"every_epochs": tree["epochs"]}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree), encoding="utf-8")
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    rows = [("round", "own, core s", "with a feeder", "gain", "predicted")]
    gains, predicted = list[float](), list[float]()
    for number in range(length.rounds):
        place = folder / str(number)
        # Every second round begins with the feeder.
        taken = {
            feeds: run_one(folder, place, feeds) for feeds in ((False, True) if number % 2 == 0 else (True, False))
        }
        for trial in range(SLOTS * TOGETHER):
            expect_same(*(place / name / "trials" / str(trial) for name in ("own", "fed")))
        own, fed = (taken[feeds].core_s - (SLOTS + feeds) * taken[feeds].start_s for feeds in (False, True))
        gains.append(own / fed)
        predicted.append(taken[True].predicted_gain)
        rows.append((str(number), f"{own:.1f}", f"{fed:.1f}", f"{own / fed:.2f}", f"{predicted[-1]:.2f}"))
        print(", ".join(rows[-1]), file=sys.stderr)
    table(rows)
    middle, low, high = median(gains)
    how = f"{SLOTS} slots of {TOGETHER} trials, {length.steps} steps, {length.rounds} rounds; 95 %"
    how += f" [{low:.3f}, {high:.3f}]; predicted {median(predicted)[0]:.2f}; weights equal in all runs"
    return [Claim("feeder_gain", middle, "", how)]


def run_one(folder: Path, place: Path, feeds: bool) -> Taken:
    """Runs a sweep; returns what it took."""
    gains = list[float]()
    options = sweep.SweepOptions(
        budget=Fraction(SLOTS * TOGETHER), method="random", slots=SLOTS, together=TOGETHER, seeds=0
    )
    with mute_messages(), note_starts() as starts, force_feeding(feeds, gains):
        place.mkdir(exist_ok=True)
        out = place / ("fed" if feeds else "own")
        result = sweep.run_sweep(folder / "recipe.yaml", (), folder / "space.yaml", options, out)
    return Taken(result.core_s, sum(starts.values()) / len(starts), gains[0])


@contextmanager
def force_feeding(feeds: bool, gains: list[float]) -> Iterator[None]:
    """Uses a feeder in the block, or none, whatever its prediction; notes the gain that it predicts."""

    def choose(*arguments: Any, **more: Any) -> Any:
        own, fed = (sweep.predict_sweep(*arguments, **more, feeds=one) for one in (False, True))
        starts = [(SLOTS + one) * more["start_s"] for one in (0, 1)]
        gains.append((own.core_s - starts[0]) / (fed.core_s - starts[1]))
        return fed if feeds else own

    with patch.object(sweep, "choose_feeding", choose):
        yield
