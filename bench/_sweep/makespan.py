"""Core seconds of whole sweeps, predicted before their first trial, against those that they took.

Nine sweeps cross three data sets, three methods and three networks, so that each pair of values occurs once (a
Graeco-Latin square):

    data set                                        square 0               square 1               square 2
    digits: 898 images of 8 pixels, in memory       halving, plain         random, residual       hyperband, perceptron
    photos: 200 ImageNet JPEGs, 64-pixel crops      random, perceptron     hyperband, plain       halving, residual
    cifar: 2,000 images of 32 pixels, JPEG          hyperband, residual    halving, perceptron    random, plain

In sweeps with hyperband the networks differ in width. Square 0 was looked at while the prediction was corrected.
`JUDGED` is the square that the claim is made of: its sweeps ran for the first time when the code of the prediction was
final, once each. A square that has been used to mend the prediction is no judge any more, and the next one takes over.

The sweep itself makes the prediction: it measures some trials (`headway.sweep.costs`), and `prediction.py` sums up.
Measured are the core seconds of all its processes, as `SweepResult.core_s` has them: without those of the measurement,
and with the winner's new seeds. The table has the wall time beside them; other programs change it, and the core seconds
a little too: two processes share caches and a clock rate.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

from bench._accuracy import cifar
from bench._accuracy.results import FOLDER, Results, commit, made_by
from bench._common import Claim, count_children_s, table
from bench._data import images
from bench._sweep.recurrent import pack_digits
from headway.core.messages import mute_messages
from headway.data.pack import pack
from headway.sweep.budget import Method
from headway.sweep.sweep import SweepOptions, run_sweep

DATA: tuple[str, ...] = ("digits", "photos", "cifar")
METHODS: tuple[Method, ...] = ("halving", "random", "hyperband")
NETWORKS = ("plain", "residual", "perceptron")
SQUARES, JUDGED = range(3), 1
RETRAININGS = 2
GROUPS = 10
"""Classes of the photos. Files that follow each other by WordNet number show similar things."""


@dataclass(frozen=True)
class Kind:
    """How trials train on a data set.

    Attributes:
        recipe: keys of the recipe.
        budget: full trainings of a sweep.
    """

    recipe: Mapping[str, Any]
    budget: int


KINDS = {
    "digits": Kind({"batch": 64, "epochs": 27}, 12),
    "photos": Kind({"data": {"size": 64, "crop": "random"}, "augment": {"flip": True}, "batch": 32, "epochs": 18}, 9),
    "cifar": Kind({"augment": {"flip": True}, "batch": 100, "epochs": 9}, 9),
}


@dataclass(frozen=True)
class Case:
    """One sweep of the table above."""

    square: int
    data: str
    method: Method
    network: str

    @property
    def name(self) -> str:
        """The name of the sweep."""
        return f"{self.data}, {self.method}, {self.network}"


def list_cases(square: int) -> list[Case]:
    """Lists the sweeps of a square."""
    return [
        Case(square, data, METHODS[(row + square) % 3], NETWORKS[(2 * row + square) % 3])
        for row, data in enumerate(DATA)
    ]


def pack_photos(folder: Path) -> Path | None:
    """Packs the photographs in ten groups, every fifth of them for evaluation. Returns None if there are none here."""
    source = images(folder / "photos")
    if source is None:
        return None
    files = sorted(source.rglob("*.JPEG"))
    for number, path in enumerate(files):
        target = folder / "split" / ("val" if number % 5 == 4 else "train") / str(number * GROUPS // len(files))
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)
    pack(folder / "split", folder / "photos.packed", mode="seekable", threads=1)
    return folder / "photos.packed"


def pack_data(folder: Path, data: str) -> Path | None:
    """Packs a data set. Returns None, and says it, if it is not here."""
    target = folder / data
    target.mkdir(parents=True, exist_ok=True)
    if data == "digits":
        return pack_digits(target, 0.5)
    if data == "photos":
        return pack_photos(target)
    return cifar.part(target, 200, 50, mode="keep")


def build_recipe(case: Case, packed: Path, epochs: float | None = None) -> dict[str, Any]:
    """Builds the recipe that the trials of a sweep share."""
    own = dict(KINDS[case.data].recipe)
    if epochs is not None:
        own["epochs"] = epochs
    return own | {
        "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1, **own.get("data", {})},
        "model": {"factory": f"bench._sweep.networks:{case.network}"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": "cosine",
        "seed": 1,
        "device": "cpu",
        "precision": "fp32",
        "observe": {"on_divergence": "ignore"},
    }


def build_space(case: Case) -> dict[str, Any]:
    """Builds the space of a sweep."""
    space: dict[str, Any] = {
        "optimizer.lr": {"log": [0.001, 0.3]},
        "optimizer.weight_decay": {"log": [1e-6, 0.01]},
    }
    if case.method == "hyperband":
        space["model.args.width"] = {"choice": [8, 16, 32]}
    return {"parameters": space}


def measure(folder: Path, packed: Path, case: Case, *, budget: int | None = None, **more: Any) -> dict[str, Any]:
    """Runs a sweep; returns predicted and measured seconds.

    Args:
        folder: for its recipe and results; it is there.
        budget: another one than that of the table.
        more: options of the sweep.
    """
    epochs = more.pop("epochs", None)
    recipe, space = folder / "recipe.yaml", folder / "space.yaml"
    recipe.write_text(yaml.safe_dump(build_recipe(case, packed, epochs)), encoding="utf-8")
    space.write_text(yaml.safe_dump(build_space(case)), encoding="utf-8")
    options = {"smallest": Fraction(1, 9), "seeds": RETRAININGS} | more
    load, before = os.getloadavg()[0], count_children_s()
    with mute_messages():
        result = run_sweep(
            recipe,
            (),
            space,
            SweepOptions(budget=Fraction(budget or KINDS[case.data].budget), method=case.method, **options),
            folder / "sweep",
        )
    assert result.prediction is not None, "the first trials could not be measured"
    return {
        "square": case.square,
        "name": case.name,
        "trials": len(result.state.trials),
        "predicted_s": result.prediction.core_s,
        "measured_s": result.core_s,
        "predicted_wall_s": result.prediction.wall_s,
        "wall_s": result.seconds,
        # With measurement and ends of the processes, which the sweep does not count.
        "children_s": count_children_s() - before,
        "load": load,
    }


def compare_predictions(folder: Path, options: argparse.Namespace, results: Results | None = None) -> list[Claim]:
    """Runs the missing sweeps of the judged square, prints all kept ones, and returns `makespan_error`.

    Args:
        folder: an empty folder.
        options: `quick` makes one tiny sweep of digits; `minutes`: no sweep begins later.
        results: kept sweeps; by default bench/results/makespan.jsonl.
    """
    if options.quick:
        return build_claims([measure_tiny(folder)])
    minutes, began, code = getattr(options, "minutes", None), time.monotonic(), commit()
    results = results or Results(FOLDER / "makespan.jsonl")
    for case in list_cases(JUDGED):
        key = {"square": case.square, "name": case.name}
        if results.where(**key) or (minutes is not None and time.monotonic() - began >= 60 * minutes):
            continue
        own = folder / case.data
        if (packed := pack_data(own, case.data)) is None:
            continue
        found = measure(own, packed, case)
        shutil.rmtree(own)
        results.add({**found, "commit": code})
        print(f"{case.name}: {found['predicted_s']:.1f} s, {found['measured_s']:.1f} s", file=sys.stderr)
    kept = results.all()
    table(build_rows(kept))
    judged = [one for one in kept if one["square"] == JUDGED]
    print(f"{made_by(one['commit'] for one in judged)}\n")
    return build_claims(judged)


def measure_tiny(folder: Path) -> dict[str, Any]:
    """Measures the shortest sweep there is: it shows that the bench works."""
    case = Case(JUDGED, "digits", "random", "plain")
    packed = pack_data(folder / "data", "digits")
    assert packed is not None
    return measure(folder, packed, case, budget=1, seeds=0, slots=1, epochs=0.25)


def compute_error(one: Mapping[str, Any]) -> float:
    """Computes by which share of the measured core seconds a prediction is too high."""
    return float(one["predicted_s"] / one["measured_s"] - 1)


def build_rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Builds the table of all kept sweeps."""
    rows: list[tuple[str, ...]] = [
        ("square", "sweep", "trials", "core s predicted", "measured", "error", "wall s predicted", "measured", "load")
    ]
    for one in sorted(kept, key=lambda one: one["square"]):
        seconds = [f"{one[name]:.1f}" for name in ("predicted_s", "measured_s", "predicted_wall_s", "wall_s", "load")]
        cells = [str(one["square"]), one["name"], str(one["trials"]), *seconds[:2], f"{compute_error(one):+.1%}"]
        rows.append((*cells, *seconds[2:]))
    return rows


def build_claims(judged: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Returns the claim `makespan_error`, if there are sweeps."""
    if not judged:
        return []
    errors = [compute_error(one) for one in judged]
    how = "; ".join(
        f"{one['name']}: {error:+.1%} of {one['measured_s']:.1f} core s, wall {one['predicted_wall_s']:.1f} predicted"
        f" and {one['wall_s']:.1f} s measured"
        for one, error in zip(judged, errors, strict=True)
    )
    return [Claim("makespan_error", statistics.fmean(map(abs, errors)), "", how)]
