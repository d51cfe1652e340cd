"""The question of `bench.large_batch` once more, of a network with fifteen times the parameters.

Fewer cells, learning rates and seeds than the small network has, as a run takes several times as long: each sweep
begins with the best rate of the small network and half and twice of it, and one other seed makes the table.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from functools import cache
from typing import Any, final

from bench._accuracy import batch_arms, narrow
from bench._accuracy.batch_arms import LARGE, LARGEST, NAMES, SEEDS, SMALL, STEP, TUNING_SEED, Cell, Job
from bench._accuracy.batch_table import Tables
from bench._accuracy.results import Results, code, commit, digest
from bench._accuracy.workers import work
from bench._common import Claim, report
from bench._common import table as table_on_screen
from headway.sweep.steps_curve import extend_grid, is_at_edge

WIDTH = 32
"""16 times as many multiply-adds as with width 8, and 295,000 parameters."""
SEED = SEEDS[0]
CELLS = (
    Cell(SMALL, "sgd"),
    Cell(LARGE, "muon"),
    Cell(SMALL, "muon"),
    Cell(LARGEST, "muon"),
)
"""In the order in which they are run."""


def recipe(cell: Cell, lr: float, seed: int, packed: str) -> dict[str, Any]:
    """That of the small network, with the width changed."""
    tree = batch_arms.recipe(cell, lr, seed, packed)
    tree["model"]["args"] = {"width": WIDTH}
    return tree


@cache
def settings(cell: Cell) -> str:
    """Computes a digest of a cell's recipe and network. A kept run with another one does not count."""
    return digest([recipe(cell, 1.0, 0, "packed"), code(narrow)])


@final
class WideTable:
    """The kept runs, by cell.

    Args:
        records: of the results file, those of the small network among them.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        records = list(records)
        self._small = Tables(records)
        self._runs: dict[Cell, dict[tuple[float, int], float]] = {cell: {} for cell in CELLS}
        for one in records:
            cell = Cell(one["batch"], one["arm"]) if one.get("bench") == "wide" else None
            if cell in self._runs and one["settings"] == settings(cell):
                self._runs[cell][one["lr"], one["seed"]] = one["accuracy"]

    def tuned(self, cell: Cell) -> dict[float, float]:
        """Returns the accuracy by learning rate, of the seed that tunes."""
        return {lr: accuracy for (lr, seed), accuracy in sorted(self._runs[cell].items()) if seed == TUNING_SEED}

    def sweep(self, cell: Cell) -> tuple[list[float], float | None]:
        """Returns (learning rates to be run yet, the best one); neither while the small network's best is not known."""
        best = self._small.best(cell)
        return ([], None) if best is None else extend_grid(self.tuned(cell), [best / STEP, best, best * STEP])

    def missing(self) -> list[Job]:
        out = []
        for cell in CELLS:
            lrs, best = self.sweep(cell)
            out += [Job(cell, lr, TUNING_SEED) for lr in lrs]
            if best is not None and (best, SEED) not in self._runs[cell]:
                out.append(Job(cell, best, SEED))
        return out

    def accuracy(self, cell: Cell) -> float | None:
        """Returns the accuracy of the table's seed; None until it is there."""
        return self._runs[cell].get((self.sweep(cell)[1] or 0.0, SEED))

    def rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("batch", "arm", "accuracy by learning rate", "chosen", "accuracy %")]
        for cell in CELLS:
            tried = "  ".join(f"{lr:g}: {1e2 * accuracy:.2f}" for lr, accuracy in self.tuned(cell).items())
            best, found = self.sweep(cell)[1], self.accuracy(cell)
            edge = best is not None and is_at_edge(self.tuned(cell))
            chosen = "not yet" if best is None else f"{best:g}{' (at the edge)' if edge else ''}"
            rows.append(
                (str(cell.batch), NAMES[cell.arm], tried, chosen, "missing" if found is None else f"{1e2 * found:.2f}")
            )
        return rows

    def claims(self) -> tuple[list[Claim], list[str]]:
        """Returns what can be claimed yet, and what each other one lacks."""
        claims, lacking = [], list[str]()
        pairs = (
            ("gap_2048_wide", Cell(SMALL, "sgd"), Cell(LARGE, "muon")),
            ("gap_2048_same_wide", Cell(SMALL, "muon"), Cell(LARGE, "muon")),
            ("gap_8192_wide", Cell(SMALL, "sgd"), Cell(LARGEST, "muon")),
        )
        for name, small, large in pairs:
            before, after = self.accuracy(small), self.accuracy(large)
            edges = [cell for cell in (small, large) if self.tuned(cell) and is_at_edge(self.tuned(cell))]
            if before is None or after is None:
                lacking.append(f"{name}: runs are missing")
            elif edges:
                lacking.append(f"{name}: void, the best learning rate lies at the edge of its sweep")
            else:
                how = f"{NAMES[small.arm]} at {small.batch} over {NAMES[large.arm]} at {large.batch}; one seed"
                claims.append(Claim(name, 1e2 * (before - after), "points", how))
        return claims, lacking


def key(job: Job) -> dict[str, Any]:
    """Returns what a kept run is found by."""
    found = {"bench": "wide", "batch": job.cell.batch, "arm": job.cell.arm, "lr": job.lr, "seed": job.seed}
    return found | {"settings": settings(job.cell)}


def run(results: Results, packed: str, options: argparse.Namespace) -> None:
    """Does what is missing, and tells what is there."""

    def done(job: Job, found: dict[str, Any]) -> None:
        results.add({**key(job), "commit": commit(), **found})
        say = f"{time.strftime('%H:%M')} wide {job.cell.batch} {job.cell.arm} lr {job.lr:g} seed {job.seed}"
        left = len(WideTable(results.all()).missing())
        print(f"{say}: {found['accuracy']:.2%} in {found['seconds']:.0f} s; {left} runs to go", file=sys.stderr)

    if options.minutes != 0:
        work(
            lambda: WideTable(results.all()).missing(),
            lambda job: recipe(job.cell, job.lr, job.seed, packed),
            done,
            workers=options.workers,
            minutes=options.minutes,
        )
    wide = WideTable(results.all())
    table_on_screen(wide.rows())
    claims, lacking = wide.claims()
    for one in lacking:
        print(one)
    report(claims, options)
