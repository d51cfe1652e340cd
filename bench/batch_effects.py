"""Two effects of a larger batch, measured on digits: it replaces a smaller rate, and it costs epochs.

The network is that of recipes/digits-conv.yaml, with SGD and momentum. Accuracies are those of the last epoch, on the
359 images of the evaluation set.

growth: at epochs 4 and 6 of 8 the batch doubles (`grow`), or the learning rate is halved (`decay`), or neither happens
(`constant`). Smith et al. 2018 (arXiv 1711.00489) say that the first two are alike. Six seeds, in pairs.

growth_gap              points of `grow` less those of `decay`
growth_gain             points of `grow` less those of `constant`
growth_steps            updates of `grow` over those of `decay`

epochs: epochs to 97 % at each batch, at the learning rate that needs the fewest steps (headway.sweep.steps_curve): one
seed searches, three others make the mean.

epochs_ratio_N          epochs to 97 % at batch N over those at batch 32

Accuracy does not depend on the machine: each finished run is kept in bench/results/batch_effects.jsonl, with the keys
study, arm or batch, lr, seed, settings, and a later call does the missing ones. Run it by
python -m bench.batch_effects [--minutes M].
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, final

import yaml

from bench._accuracy.batch_worker import train
from bench._accuracy.results import FOLDER, Results, commit, digest, made_by
from bench._arms import ROOT
from bench._common import Claim, parser, report, table
from bench._family import run_bench
from bench._sweep.recurrent import pack_digits
from headway.core.statistics import compute_interval
from headway.sweep.curve_panels import list_rows
from headway.sweep.steps_curve import GRID, STEP, CurveRun, StepsCurve, compute_steps_to

BATCH, LR = 32, 0.1
MILESTONES = [4, 6]
"""Epochs, of 8, at which something changes in two of the arms."""
ARMS: dict[str, dict[str, Any]] = {
    "decay": {"schedule": {"name": "multi_step", "milestones_epochs": MILESTONES, "gamma": 0.5}},
    "grow": {"batch_growth": {"milestones_epochs": MILESTONES, "factor": 2}},
    "constant": {},
}
GROWTH_SEEDS = (1, 2, 3, 4, 5, 6)
BATCHES = (32, 128, 512)
TARGET, CHANCE, SAMPLES, MOST_EPOCHS = 0.97, 0.1, 1438, 40
TUNING_SEED, SEEDS = 0, (1, 2, 3)
Key = dict[str, Any]


def build_recipe(key: Mapping[str, Any], packed: str) -> dict[str, Any]:
    """Builds the recipe of a run, for a data set packed in a folder."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / "recipes/digits-conv.yaml").read_text(encoding="utf-8"))
    tree["data"] |= {"train": f"{packed}/train", "eval": f"{packed}/eval"}
    tree["optimizer"] = {"name": "sgd", "lr": key["lr"], "momentum": 0.9}
    # The search for divergence would end in a warning only, and cost a copy of the weights.
    tree |= {"observe": {"on_divergence": "ignore"}, "seed": key["seed"]}
    if key["study"] == "growth":
        return tree | ARMS[key["arm"]] | {"batch": BATCH}
    # Statistics of batch norm are of the weights that are evaluated: at 512 an epoch has three steps.
    tree["model"]["batch_norm"] = {"recompute_batches": max(1, 1024 // key["batch"])}
    tree["evaluate"] = {"every_epochs": 0.2, "batch": 500}
    tree["checkpoint"] = {"every_epochs": MOST_EPOCHS}
    return tree | {"batch": key["batch"], "epochs": MOST_EPOCHS, "stop_at": {"accuracy": TARGET}}


@cache
def compute_settings(study: str, arm: str) -> str:
    """Computes the version of the settings of an arm, or of a study: its recipe without rate, batch and seed."""
    return digest(build_recipe({"study": study, "arm": arm, "lr": 0.0, "seed": 0, "batch": BATCH}, "packed"))


def list_rates(batch: int) -> list[float]:
    """Lists the learning rates that the search of a batch begins with; they follow the square root of the batch."""
    scale = round(math.log(batch / BATCH, STEP) / 2)
    return [LR / 4 * STEP ** (scale + place) for place in range(GRID)]


@final
class Effects:
    """The kept runs of both studies, and what follows from them.

    Args:
        records: kept runs, as the results file has them.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._growth: dict[tuple[str, int], Mapping[str, Any]] = {}
        steps = dict[CurveRun, float]()
        self._commits = []
        for one in records:
            if one["settings"] != compute_settings(one["study"], one.get("arm", "")):
                continue
            self._commits.append(one["commit"])
            if one["study"] == "growth":
                self._growth[one["arm"], one["seed"]] = one
                continue
            reached = None if one["diverged"] else compute_steps_to(one["evaluations"], TARGET, start=CHANCE)
            steps[CurveRun(one["batch"], one["lr"], one["seed"])] = math.inf if reached is None else reached
        grids = {batch: list_rates(batch) for batch in BATCHES}
        self.curve = StepsCurve(grids, tuning_seed=TUNING_SEED, seeds=SEEDS, steps=steps)

    def list_missing(self) -> list[Key]:
        """Lists the keys of the runs that can be done now."""
        growth = [
            {"study": "growth", "arm": arm, "lr": LR, "seed": seed, "settings": compute_settings("growth", arm)}
            for seed in GROWTH_SEEDS
            for arm in ARMS
            if (arm, seed) not in self._growth
        ]
        settings = compute_settings("epochs", "")
        return growth + [{"study": "epochs", **vars(run), "settings": settings} for run in self.curve.list_missing()]

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds the table of the first study."""
        rows: list[tuple[str, ...]] = [("arm", "updates", "accuracy, %, mean", "by seed")]
        for arm in ARMS:
            runs = [self._growth[arm, seed] for seed in GROWTH_SEEDS if (arm, seed) in self._growth]
            if runs:
                found = [100 * run["accuracy"] for run in runs]
                seeds = ", ".join(f"{one:.1f}" for one in found)
                rows.append((arm, str(runs[0]["steps"]), f"{statistics.fmean(found):.2f}", seeds))
        return rows

    def build_claims(self) -> list[Claim]:
        """Builds the claims whose runs are all there."""
        claims = []
        if all((arm, seed) in self._growth for arm in ARMS for seed in GROWTH_SEEDS):
            for name, other in (("growth_gap", "decay"), ("growth_gain", "constant")):
                pairs = [(self._growth["grow", seed], self._growth[other, seed]) for seed in GROWTH_SEEDS]
                mean, half = compute_interval([100 * (a["accuracy"] - b["accuracy"]) for a, b in pairs])
                how = f"grow less {other}, mean of {len(pairs)} pairs of seeds, 95 % interval +- {half:.2f}"
                claims.append(Claim(name, mean, "points", how))
            steps = [self._growth[arm, GROWTH_SEEDS[0]]["steps"] for arm in ("grow", "decay")]
            claims.append(Claim("growth_steps", steps[0] / steps[1], "", f"{steps[0]} and {steps[1]} updates"))
        epochs = {batch: None if (steps := self.curve.compute_steps(batch)) is None else steps * batch / SAMPLES
                  for batch in BATCHES}  # fmt: skip
        first = epochs[BATCHES[0]]
        for batch in BATCHES[1:]:
            if first is not None and (own := epochs[batch]) is not None:
                how = f"{own:.2f} and {first:.2f} epochs to {TARGET:.0%}, means of {len(SEEDS)} seeds"
                how += "; the best rate is at the edge of its search" if self.curve.is_at_edge(batch) else ""
                claims.append(Claim(f"epochs_ratio_{batch}", own / first, "", how))
        return claims

    def describe_commits(self) -> str:
        """Describes the commits that the runs were made by."""
        return made_by(self._commits)


def measure_effects(
    folder: Path, options: argparse.Namespace, results: Results | None = None, run: Callable[..., Any] = train
) -> list[Claim]:
    """Does the missing runs one after the other, prints the tables, and returns the claims.

    Args:
        folder: an empty folder for the data.
        options: `minutes`: no run begins later.
        results: kept runs; by default bench/results/batch_effects.jsonl.
        run: trains a recipe's tree.
    """
    results = results or Results(FOLDER / "batch_effects.jsonl")
    began, code, packed = time.monotonic(), commit(), ""
    while missing := Effects(results.all()).list_missing():
        if options.minutes is not None and time.monotonic() - began >= 60 * options.minutes:
            print(f"{len(missing)} runs or more are missing.")
            break
        packed = packed or str(pack_digits(folder))
        key = missing[0]
        found = run(build_recipe(key, packed))
        kept = {name: found[name] for name in ("accuracy", "diverged", "steps", "evaluations")}
        results.add({**key, **kept, "commit": code})
        print(f"{key}: {found['accuracy']:.2%} after {found['steps']} steps", file=sys.stderr)
    effects = Effects(results.all())
    table(effects.build_rows())
    table(list_rows(effects.curve, SAMPLES))
    print(f"{effects.describe_commits()}\n")
    return effects.build_claims()


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--minutes", type=float, metavar="M", help="begin no run after so long; 0 shows what is there")
    options = asked.parse_args()
    if options.quick:
        options.minutes = 0
    with tempfile.TemporaryDirectory(prefix="headway-effects-") as folder:
        report(measure_effects(Path(folder), options), options)


if __name__ == "__main__":
    run_bench(main)
