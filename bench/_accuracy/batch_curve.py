"""Steps to a fixed accuracy by batch and optimizer, and the batch from which more samples a step save no more steps.

The method is from Shallue et al. 2018, "Measuring the Effects of Data Parallelism on Neural Network Training" (arXiv
1811.03600): each batch gets the learning rate that needs the fewest steps. No rule scales it.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

from bench._accuracy import narrow
from bench._accuracy.batch_arms import (
    GRID,
    LARS_TRUST,
    MATRIX_ARMS,
    SEEDS,
    STEP,
    TUNING_SEED,
    build_base_recipe,
)
from bench._accuracy.results import Results, code, commit, digest, made_by
from bench._accuracy.workers import work
from bench._common import Claim, report, table
from headway.page.panel import Panel
from headway.page.renderer import render
from headway.sweep.curve_panels import build_panels, list_rows
from headway.sweep.steps_curve import CurveRun, StepsCurve, compute_steps_to

BATCHES = tuple(64 * 2**power for power in range(9))
TARGET, CHANCE = 0.60, 0.1
MOST_EPOCHS = 40.0
SAMPLES = 50_000
LARGE = 2048
"""The batch whose epochs to the target are a claim."""
LOWEST = {"sgd": 0.0125, "lars": 0.125, "muon": 0.005, "soap": 0.004}
"""The first sweep's lowest learning rate at a batch of 64, by optimizer; of larger ones times sqrt(batch / 64)."""
BEST_SGD = dict(zip(BATCHES, (0.025, 0.1, 0.1, 0.2, 0.4, 0.4, 0.8, 0.8, 0.8), strict=True))
"""Best rates of SGD's curve by batch, for what Muon gives to SGD. At 16,384, SGD does not get to the target by every
seed."""
FARTHEST = 8192
"""The largest batch at which every seed of SGD gets to the target."""
NAMES = {"sgd": "SGD", "lars": "LARS", "muon": "Muon", "soap": "SOAP"}


@dataclass(frozen=True)
class Job:
    """One run to the target."""

    batch: int
    lr: float
    seed: int
    optimizer: str = "sgd"

    def key(self) -> dict[str, Any]:
        found = {"bench": "curve", "batch": self.batch, "lr": self.lr, "seed": self.seed}
        # Runs of SGD were kept before there were others.
        found |= {} if self.optimizer == "sgd" else {"optimizer": self.optimizer}
        return found | {"settings": settings(self.batch, self.optimizer)}


def recipe(job: Job, packed: str) -> dict[str, Any]:
    """A constant rate, evaluated five times an epoch, until the target is reached. Statistics of batch norm are of the
    weights that are evaluated: at 16,384 moving ones would be those of the last three epochs."""
    optimizer: dict[str, Any] = {"name": job.optimizer, "lr": job.lr, "weight_decay": 5e-4}
    if job.optimizer != "soap":
        optimizer["momentum"] = 0.9
    if job.optimizer == "lars":
        optimizer["trust"] = LARS_TRUST
    if job.optimizer in MATRIX_ARMS:
        optimizer |= {"normalise": True, "no_decay": True}
    if job.optimizer == "muon":
        optimizer |= {"ns_precision": "fp32", "lr_rest": BEST_SGD[job.batch]}
    return build_base_recipe(job.batch, MOST_EPOCHS, job.seed, packed) | {
        "optimizer": optimizer,
        "evaluate": {"every_epochs": 0.2, "batch": 1000},
        "stop_at": {"accuracy": TARGET},
    }


@cache
def settings(batch: int, optimizer: str = "sgd") -> str:
    """Computes a digest of recipe and network. A kept run with another one does not count."""
    return digest([recipe(Job(batch, 1.0, 0, optimizer), "packed"), code(narrow)])


def first_grid(batch: int, optimizer: str = "sgd") -> list[float]:
    low = LOWEST[optimizer] * 2 ** round(math.log2(batch / 64) / 2)
    return [low * STEP**place for place in range(GRID)]


def steps_to(evaluations: Sequence[tuple[int, float]]) -> float | None:
    """Steps until the target, from chance on; None: never."""
    return compute_steps_to(evaluations, TARGET, start=CHANCE)


@final
class Curve:
    """The kept runs of one optimizer, by batch."""

    def __init__(self, records: Sequence[dict[str, Any]], optimizer: str = "sgd") -> None:
        self.optimizer = optimizer
        steps = dict[CurveRun, float]()
        self._commits: dict[int, list[str]] = {batch: [] for batch in BATCHES}
        for one in records:
            if one.get("bench") != "curve" or one["batch"] not in self._commits:
                continue
            if one["settings"] == settings(one["batch"], optimizer):
                found = None if one["diverged"] else steps_to(one["evaluations"])
                steps[CurveRun(one["batch"], one["lr"], one["seed"])] = math.inf if found is None else found
                self._commits[one["batch"]].append(one.get("commit", ""))
        grids = {batch: first_grid(batch, optimizer) for batch in BATCHES}
        self.curve = StepsCurve(grids, tuning_seed=TUNING_SEED, seeds=SEEDS, steps=steps)

    def at_edge(self, batch: int) -> bool:
        """Returns True if the learning rate that was chosen is the lowest or highest tried."""
        return self.curve.is_at_edge(batch)

    def made_by(self) -> str:
        """Names the commits of all these runs."""
        return made_by(one for commits in self._commits.values() for one in commits)

    def missing(self) -> list[Job]:
        return [Job(run.batch, run.lr, run.seed, self.optimizer) for run in self.curve.list_missing()]

    def steps(self, batch: int) -> float | None:
        """Returns the mean of the table's seeds; None where one is missing or did not come there."""
        return self.curve.compute_steps(batch)

    def points(self) -> list[tuple[int, float, str]]:
        """Lists (batch, steps, regime) from the smallest batch on, as far as there is no gap."""
        return [(one.batch, one.steps, one.regime) for one in self.curve.list_points()]

    def perfect_to(self) -> Claim | str:
        """Returns the largest batch of perfect scaling; or why none is named: what is missing may go on or end it."""
        found = self.curve.find_perfect_scaling()
        if found.batch is None:
            return found.how
        name = "perfect_scaling_to" + ("" if self.optimizer == "sgd" else f"_{self.optimizer}")
        return Claim(name, found.batch, "", f"{found.how}; {NAMES[self.optimizer]}, steps to {TARGET:.0%}")

    def rows(self) -> list[tuple[str, ...]]:
        heading, *rows = list_rows(self.curve, SAMPLES)
        commits = [" ".join(sorted(set(self._commits[batch]))) for batch in BATCHES]
        return [(*heading, "commit"), *((*row, made) for row, made in zip(rows, commits, strict=True))]

    def panels(self) -> list[Panel]:
        """Builds the panels of the curve with its regimes, and its table."""
        title = f"{NAMES[self.optimizer]}: steps to {TARGET:.0%} on CIFAR-10"
        place = 2 * list(NAMES).index(self.optimizer)
        return build_panels(self.curve, self.optimizer, title, self.rows(), order=place)


def claim_epochs(curves: Sequence[Curve]) -> Claim | str:
    """Claims the epochs to the target at a large batch by the fastest optimizer; or returns what that lacks."""
    name = f"epochs_to_{1e2 * TARGET:.0f}_{LARGE}"
    waiting = [NAMES[curve.optimizer] for curve in curves if any(job.batch == LARGE for job in curve.missing())]
    if len(curves) < len(NAMES):
        return f"{name}: needs the curves of {', '.join(NAMES.values())}"
    if waiting:
        return f"{name}: runs are missing"
    epochs = {curve: steps * LARGE / SAMPLES for curve in curves if (steps := curve.steps(LARGE)) is not None}
    if not epochs:
        return f"{name}: no optimizer reaches the target"
    fastest = min(epochs, key=lambda curve: epochs[curve])
    if fastest.at_edge(LARGE):
        which = NAMES[fastest.optimizer]
        return f"{name}: void, the best learning rate lies at the edge of its sweep: {which}"
    told = ", ".join(f"{NAMES[curve.optimizer]} {value:.1f}" for curve, value in epochs.items())
    return Claim(name, epochs[fastest], "epochs", f"means of {len(SEEDS)} seeds at batch {LARGE}: {told}")


def claim_fewer_steps(curves: Sequence[Curve]) -> list[Claim | str]:
    """Claims how many times the steps of each other optimizer SGD needs at the farthest batch; all batches stand beside
    it. An optimizer whose figure does not fall with the batch keeps its data efficiency (Essential AI 2025, "Practical
    Efficiency of Muon for Pretraining", arXiv 2505.02222)."""
    found, sgd = list[Claim | str](), next((curve for curve in curves if curve.optimizer == "sgd"), None)
    for curve in curves:
        if sgd is None or curve is sgd:
            continue
        name = f"sgd_steps_over_{curve.optimizer}_{FARTHEST}"
        # A batch counts when neither optimizer has a run to go: an unfinished sweep may still find a better rate.
        waiting = {job.batch for one in (sgd, curve) for job in one.missing()}
        both = [batch for batch in BATCHES if batch not in waiting and sgd.steps(batch) and curve.steps(batch)]
        ratios = {batch: (sgd.steps(batch) or math.nan) / (curve.steps(batch) or math.nan) for batch in both}
        told = ", ".join(f"{batch} {ratio:.2f}" for batch, ratio in ratios.items())
        if FARTHEST in ratios:
            found.append(Claim(name, ratios[FARTHEST], "", f"by batch: {told}"))
        else:
            found.append(f"{name}: runs are missing, or do not reach the target; by batch: {told or 'none'}")
    return found


def run(results: Results, packed: str, options: argparse.Namespace) -> None:
    """Does what is missing, and tells what is there."""

    def read() -> list[Curve]:
        records = results.all()
        return [Curve(records, optimizer) for optimizer in options.optimizers]

    def done(job: Job, found: dict[str, Any]) -> None:
        results.add({**job.key(), "commit": commit(), **found})
        reached = steps_to(found["evaluations"])
        said = "not reached" if reached is None else f"{reached:.0f} steps"
        left = sum(len(curve.missing()) for curve in read())
        where = f"{time.strftime('%H:%M')} {NAMES[job.optimizer]} {job.batch} lr {job.lr:g} seed {job.seed}"
        print(f"{where}: {said} in {found['seconds']:.0f} s; {left} runs to go", file=sys.stderr)

    if options.minutes != 0:
        work(
            lambda: [job for curve in read() for job in curve.missing()],
            lambda job: recipe(job, packed),
            done,
            workers=options.workers,
            minutes=options.minutes,
        )
    curves, panels, claims = read(), list[Panel](), list[Claim]()
    for curve in curves:
        print(f"{NAMES[curve.optimizer]}: {curve.made_by()}")
        table(curve.rows())
        panels += curve.panels() if curve.points() else []
        found = curve.perfect_to()
        if isinstance(found, Claim):
            claims.append(found)
        else:
            print(f"perfect_scaling_to, {NAMES[curve.optimizer]}: {found}")
        if missing := curve.missing():
            batches = ", ".join(map(str, sorted({job.batch for job in missing})))
            print(f"missing: {len(missing)} runs of batches {batches}")
    if panels:
        subtitle = ", ".join(NAMES[curve.optimizer] for curve in curves if curve.points())
        options.page.write_text(render(panels, title="Steps and batch", subtitle=subtitle), encoding="utf-8")
        print(f"drawn in {options.page}")
    for one in (claim_epochs(curves), *claim_fewer_steps(curves)):
        if isinstance(one, Claim):
            claims.append(one)
        else:
            print(one)
    report(claims, options)
