"""Halving at a budget of 8 full trainings against random search at 24, by `run_sweep`, on scikit-learn's digits.

Half of the 1,797 digits train a small convolutional network for eight epochs, and the other half judge it: 898 images,
so that few trials tie. Each seed of a sweep draws its own trials; the winner is trained again with three new seeds, by
the sweep itself, and their mean error counts. The winner's own score does not: it is the best of many.

Errors do not depend on the machine: each finished sweep is kept in bench/results/halving.jsonl, and a later call does
the missing ones. A pair of sweeps takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import yaml
from torch import nn

from bench._accuracy.results import FOLDER, Results, commit, digest, made_by
from bench._common import Claim, table
from bench._sweep.recurrent import pack_digits
from headway.core.cpu_count import list_usable_cpus
from headway.core.messages import mute_messages
from headway.core.statistics import compute_interval
from headway.sweep.sweep import SweepOptions, run_sweep

Method = Literal["halving", "random"]
BUDGETS: dict[Method, int] = {"halving": 8, "random": 24}
SEEDS, EPOCHS, BATCH, RETRAININGS = range(10), 8, 64, 3
SLOTS = len(list_usable_cpus())
"""One worker a core, as the command line does. A worker with several threads of torch burns CPU time in barriers."""
SPACE: dict[str, Any] = {
    "parameters": {
        "optimizer.lr": {"log": [0.0003, 3.0]},
        "optimizer.momentum": {"linear": [0.0, 0.98]},
        "optimizer.weight_decay": {"log": [1e-6, 0.1]},
        "model.args.width": {"choice": [4, 8, 16]},
    }
}


def build_network(num_classes: int, in_channels: int, *, width: int = 8) -> nn.Module:
    """Builds a plain network for 8 x 8 pixels, whose steps take about two milliseconds."""
    return nn.Sequential(
        nn.Conv2d(in_channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * width, num_classes),
    )


def build_recipe(packed: str, epochs: float) -> dict[str, Any]:
    """Builds the recipe that the trials share."""
    return {
        "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1},
        "model": {"factory": f"{__name__}:build_network"},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": "cosine",
        "batch": BATCH,
        "epochs": epochs,
        "seed": 1,
        "device": "cpu",
        "precision": "fp32",
        "evaluate": {"every_epochs": epochs, "batch": 450},
        "checkpoint": {"every_epochs": epochs},
        # A trial that diverges is one of the trials; the search for the reason would cost time only.
        "observe": {"on_divergence": "ignore"},
    }


SETTINGS = digest([build_recipe("packed", EPOCHS), SPACE, BUDGETS, RETRAININGS])
"""The code version of a kept sweep's settings."""


def run_one(
    folder: Path,
    packed: str,
    method: Method,
    seed: int,
    *,
    epochs: float,
    budget: int,
    retrainings: int,
    slots: int = SLOTS,
) -> dict[str, Any]:
    """Runs a sweep; returns its errors, and the CPU seconds of its processes."""
    recipe, space = folder / "recipe.yaml", folder / "space.yaml"
    recipe.write_text(yaml.safe_dump(build_recipe(packed, epochs)), encoding="utf-8")
    space.write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    options = SweepOptions(budget=Fraction(budget), method=method, seed=seed, slots=slots, seeds=retrainings)
    with mute_messages():
        result = run_sweep(recipe, (), space, options, folder / f"{method}-{seed}")
    return {
        "method": method,
        "seed": seed,
        "trials": len(result.state.trials),
        "own_error": 1 - result.score,
        "errors": [1 - score for score in result.retrained],
        "trials_s": result.core_s,
    }


def compare_halving(folder: Path, options: argparse.Namespace, results: Results | None = None) -> list[Claim]:
    """Does the missing sweeps, prints the table, and returns `halving_vs_random`.

    Args:
        folder: an empty folder for data and sweeps.
        options: `quick` makes one tiny sweep; `minutes`: no sweep begins later.
        results: kept sweeps; by default bench/results/halving.jsonl.
    """
    minutes = getattr(options, "minutes", None)
    packed, code, began = str(pack_digits(folder, 0.5)), commit(), time.monotonic()
    if options.quick:
        # Each worker imports torch, so there is one.
        run_one(folder, packed, "halving", 0, epochs=0.25, budget=2, retrainings=1, slots=1)
        return []
    results = results or Results(FOLDER / "halving.jsonl")
    for seed in SEEDS:
        for method, budget in BUDGETS.items():
            key = {"method": method, "seed": seed, "settings": SETTINGS}
            if results.where(**key) or (minutes is not None and time.monotonic() - began >= 60 * minutes):
                continue
            found = run_one(folder, packed, method, seed, epochs=EPOCHS, budget=budget, retrainings=RETRAININGS)
            results.add({**found, **key, "commit": code})
            print(f"{method}, seed {seed}: error {statistics.fmean(found['errors']):.2%}", file=sys.stderr)
    kept = results.where(settings=SETTINGS)
    table(build_rows(kept))
    print(f"{made_by(one['commit'] for one in kept)}\n")
    return claim_errors(kept)


def pair_sweeps(kept: Sequence[Mapping[str, Any]]) -> dict[int, dict[Method, float]]:
    """Returns the mean error of the retrained winners by seed and method, of seeds that have both."""
    errors: dict[int, dict[Method, float]] = {}
    for one in kept:
        errors.setdefault(one["seed"], {})[one["method"]] = statistics.fmean(one["errors"])
    return {seed: found for seed, found in sorted(errors.items()) if len(found) == len(BUDGETS)}


def build_rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Builds the table: errors of the winners by method, those of their own score beside those of new seeds."""
    rows: list[tuple[str, ...]] = [("method", "budget", "trials", "sweeps", "error, new seeds", "own score", "CPU s")]
    pairs = pair_sweeps(kept)
    for method, budget in BUDGETS.items():
        own = [one for one in kept if one["method"] == method and one["seed"] in pairs]
        if len(own) < 2:
            continue
        mean, half = compute_interval([pairs[one["seed"]][method] for one in own])
        score = statistics.fmean(one["own_error"] for one in own)
        seconds = statistics.fmean(one["trials_s"] for one in own)
        cells = (str(own[0]["trials"]), str(len(own)), f"{mean:.2%} +- {half:.2%}", f"{score:.2%}", f"{seconds:.0f}")
        rows.append((method, str(budget), *cells))
    return rows


def claim_errors(kept: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Returns the claim `halving_vs_random`, if two seeds or more have both sweeps."""
    pairs = pair_sweeps(kept)
    if len(pairs) < 2:
        return []
    halving, random = ([found[method] for found in pairs.values()] for method in BUDGETS)
    mean, half = compute_interval([100 * (one - other) for one, other in zip(halving, random, strict=True)])
    how = f"error {statistics.fmean(halving):.2%} over {statistics.fmean(random):.2%}, {len(pairs)} seeds, budgets"
    how += f" {BUDGETS['halving']} and {BUDGETS['random']}; difference {mean:.2f} +- {half:.2f} points (95 %)"
    how += f"; medians {statistics.median(halving):.2%} and {statistics.median(random):.2%}"
    return [Claim("halving_vs_random", statistics.fmean(halving) / statistics.fmean(random), "", how)]
