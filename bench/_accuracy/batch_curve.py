"""Steps to a fixed accuracy by batch and optimizer, and the batch from which more samples a step save no more steps.

The method is from Shallue et al. 2018, "Measuring the Effects of Data Parallelism on Neural Network Training" (arXiv
1811.03600): each batch gets the learning rate that needs the fewest steps. No rule scales it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, final

from bench._accuracy import narrow
from bench._accuracy.batch_arms import (
    GRID,
    LARS_TRUST,
    MATRIX_ARMS,
    SEEDS,
    STEP,
    TUNING_SEED,
    at_edge,
    recomputed,
    sweep,
)
from bench._accuracy.results import Results, code, commit, digest, made_by
from bench._accuracy.workers import work
from bench._common import Claim, report
from bench._common import table as table_on_screen
from headway.page.panel import Panel, lines, table
from headway.page.renderer import render

BATCHES = tuple(64 * 2**power for power in range(9))
TARGET = 0.60
MOST_EPOCHS = 40.0
SAMPLES = 50_000
LARGE = 2048
"""The batch whose epochs to the target are a claim."""
LOWEST = {"sgd": 0.0125, "lars": 0.125, "muon": 0.01, "soap": 0.0005}
"""The first sweep's lowest learning rate at a batch of 64, by optimizer; of larger ones times sqrt(batch / 64)."""
NAMES = {"sgd": "SGD", "lars": "LARS", "muon": "Muon", "soap": "SOAP"}
PERFECT, NONE = 0.575, 0.9
"""Steps over those of half the batch: up to the first (0.5 and 15 %) scaling is perfect, from the second there is
none."""


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
        return found | {"settings": settings(self.optimizer)}


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
        optimizer["ns_precision"] = "fp32"
    return {
        "seed": job.seed,
        "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1},
        "augment": {"flip": True, "translate": 2},
        "model": {
            "factory": "bench._accuracy.narrow:narrow",
            "batch_norm": {"recompute_batches": recomputed(job.batch)},
        },
        "optimizer": optimizer,
        "batch": job.batch,
        "epochs": MOST_EPOCHS,
        "precision": "fp32",
        "evaluate": {"every_epochs": 0.2, "batch": 1000},
        "stop_at": {"accuracy": TARGET},
        "checkpoint": {"every_epochs": MOST_EPOCHS, "asynchronous": False},
        "log_every_steps": 100,
    }


@cache
def settings(optimizer: str = "sgd") -> str:
    """The code version of these runs."""
    return digest([recipe(Job(64, 1.0, 0, optimizer), "packed"), code(narrow)])


def first_grid(batch: int, optimizer: str = "sgd") -> list[float]:
    low = LOWEST[optimizer] * 2 ** round(math.log2(batch / 64) / 2)
    return [low * STEP**place for place in range(GRID)]


def steps_to(evaluations: Sequence[tuple[int, float]], target: float = TARGET) -> float | None:
    """Steps until the target, along a line between the evaluation before and the one that reached it; None: never."""
    before = (0, 0.1)
    for step, accuracy in evaluations:
        if accuracy >= target:
            share = (target - before[1]) / (accuracy - before[1])
            return before[0] + share * (step - before[0])
        before = (step, accuracy)
    return None


def regimes(steps: Sequence[float], perfect: float = PERFECT, none: float = NONE) -> list[str]:
    """Of each batch, the first being the smallest and each twice the one before: `perfect` scaling as long as every
    doubling divides the steps by nearly two, `none` from where no doubling saves much, `diminishing` between.

    Args:
        steps: to the target, of each batch.
    """
    factors = [after / before for before, after in pairwise(steps)]
    last_perfect = next((place for place, factor in enumerate(factors) if factor > perfect), len(factors))
    first_none = len(factors)
    while first_none > last_perfect and factors[first_none - 1] >= none:
        first_none -= 1
    out = []
    for place in range(len(steps)):
        out.append("perfect" if place <= last_perfect else "none" if place > first_none else "diminishing")
    return out


@final
class Curve:
    """The kept runs of one optimizer, by batch."""

    def __init__(self, records: Sequence[dict[str, Any]], optimizer: str = "sgd") -> None:
        self.optimizer, now = optimizer, settings(optimizer)
        self._steps: dict[int, dict[tuple[float, int], float]] = {batch: {} for batch in BATCHES}
        self._commits: dict[int, list[str]] = {batch: [] for batch in BATCHES}
        for one in records:
            if one.get("bench") == "curve" and one["settings"] == now and one["batch"] in self._steps:
                found = None if one["diverged"] else steps_to(one["evaluations"])
                self._steps[one["batch"]][one["lr"], one["seed"]] = math.inf if found is None else found
                self._commits[one["batch"]].append(one.get("commit", ""))

    def tuned(self, batch: int) -> dict[float, float]:
        """Steps by learning rate, of the seed that tunes; infinite where the target was not reached."""
        return {lr: steps for (lr, seed), steps in sorted(self._steps[batch].items()) if seed == TUNING_SEED}

    def sweep(self, batch: int) -> tuple[list[float], float | None]:
        return sweep({lr: -steps for lr, steps in self.tuned(batch).items()}, first_grid(batch, self.optimizer))

    def at_edge(self, batch: int) -> bool:
        """Whether the learning rate that was chosen is the lowest or highest tried."""
        found = {lr: -steps for lr, steps in self.tuned(batch).items()}
        return self.sweep(batch)[1] is not None and at_edge(found)

    def made_by(self) -> str:
        """The commits of all these runs."""
        return made_by(one for commits in self._commits.values() for one in commits)

    def missing(self) -> list[Job]:
        out = []
        for batch in BATCHES:
            lrs, best = self.sweep(batch)
            out += [Job(batch, lr, TUNING_SEED, self.optimizer) for lr in lrs]
            if best is not None:
                kept = self._steps[batch]
                out += [Job(batch, best, seed, self.optimizer) for seed in SEEDS if (best, seed) not in kept]
        return out

    def steps(self, batch: int) -> float | None:
        """Mean of the table's seeds; None where one is missing or did not come there."""
        best = self.sweep(batch)[1]
        found = [self._steps[batch].get((best, seed), math.inf) for seed in SEEDS if best is not None]
        return statistics.fmean(found) if found and max(found) < math.inf else None

    def points(self) -> list[tuple[int, float, str]]:
        """(batch, steps, regime) from the smallest batch on, as far as there is no gap."""
        known = []
        for batch in BATCHES:
            found = self.steps(batch)
            if found is None:
                break
            known.append((batch, found))
        names = regimes([steps for _, steps in known])
        return [(*one, name) for one, name in zip(known, names, strict=True)]

    def perfect_to(self) -> Claim | str:
        """The largest batch of perfect scaling; or why none can be named: what is missing may go on or end it."""
        points = self.points()
        perfect = [batch for batch, _, name in points if name == "perfect"]
        ended = len(perfect) < len(points)
        if not ended and self.missing():
            return "runs are missing"
        if not perfect:
            return f"batch {BATCHES[0]} does not reach {TARGET:.0%}"
        edges = [str(batch) for batch, *_ in points[: len(perfect) + 1] if self.at_edge(batch)]
        if edges:
            return f"void, the best learning rate lies at the edge of its sweep: batch {', '.join(edges)}"
        how = "largest batch of it" if ended else "no batch that reaches the target is beyond it"
        name = "perfect_scaling_to" + ("" if self.optimizer == "sgd" else f"_{self.optimizer}")
        return Claim(name, perfect[-1], "", f"{how}; {NAMES[self.optimizer]}, steps to {TARGET:.0%}")

    def rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [
            ("batch", "lr", "steps", "epochs", "regime", "steps by learning rate, one seed", "commit")
        ]
        regime = {batch: name for batch, _, name in self.points()}
        lacking = {job.batch for job in self.missing()}
        for batch in BATCHES:
            tried = "  ".join(f"{lr:g}: {steps:.0f}" for lr, steps in self.tuned(batch).items())
            best, steps = self.sweep(batch)[1], self.steps(batch)
            lr = "" if best is None else f"{best:g}{' (at the edge)' if self.at_edge(batch) else ''}"
            known = ("", "") if steps is None else (f"{steps:.0f}", f"{steps * batch / SAMPLES:.1f}")
            other = "missing" if batch in lacking else "not reached" if steps is None else "after a gap"
            made = " ".join(sorted(set(self._commits[batch])))
            rows.append((str(batch), lr, *known, regime.get(batch, other), tried, made))
        return rows

    def panels(self) -> list[Panel]:
        """The curve with its regimes, and its table."""
        points, name = self.points(), NAMES[self.optimizer]
        first = points[0]
        ideal = (
            "if steps fell as the batch grows",
            [p[0] for p in points],
            [first[1] * first[0] / p[0] for p in points],
        )
        series = [ideal]
        for regime in ("perfect", "diminishing", "none"):
            places = [place for place, point in enumerate(points) if point[2] == regime]
            if places:  # each part begins where the one before ends, so that the line has no gap
                part = points[max(0, places[0] - 1) : places[-1] + 1]
                label = {"perfect": "perfect scaling", "diminishing": "diminishing returns", "none": "no gain"}[regime]
                series.append((label, [p[0] for p in part], [p[1] for p in part]))
        title = f"{name}: steps to {TARGET:.0%} on CIFAR-10"
        note = f"Means of {len(SEEDS)} seeds, each batch with the learning rate that needs the fewest steps."
        axes: dict[str, Any] = {"x_label": "batch", "y_label": "steps", "log_x": True, "log_y": True}
        place = 2 * list(NAMES).index(self.optimizer)
        layout: dict[str, Any] = {"width": "full", "section": "Batch"}
        drawn = lines(f"curve-{self.optimizer}", title, series, **axes, note=note, **layout, order=place + 1)
        head, *rows = self.rows()
        runs = table(f"runs-{self.optimizer}", f"{name}, by batch", head, rows, **layout, order=place + 2)
        return [drawn, runs]


def claim_epochs(curves: Sequence[Curve]) -> Claim | str:
    """Epochs to the target at a large batch by the fastest optimizer; or what that lacks."""
    name = f"epochs_to_{1e2 * TARGET:.0f}_{LARGE}"
    waiting = [NAMES[curve.optimizer] for curve in curves if any(job.batch == LARGE for job in curve.missing())]
    if waiting or len(curves) < len(NAMES):
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
        table_on_screen(curve.rows())
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
    epochs = claim_epochs(curves)
    if isinstance(epochs, Claim):
        claims.append(epochs)
    else:
        print(epochs)
    report(claims, options)
