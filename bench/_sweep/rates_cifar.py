"""The rates that `headway sweep --lr` finds for LARS, LAMB and Muon on CIFAR-10, against full grids of 16 rates.

A small network with batch norm trains on images of 16 pixels for three epochs, at batches of 256 and 2,048: 585 and 73
steps, some five CPU seconds. The rates of the grids span three powers of ten and were fixed before the first run. All
trainings of a grid share one seed and their input. The best rate of the grid and that of `--lr` are then trained with
the same three new seeds.

lr_cifar_share  accuracy of the rate that `--lr` finds over that of the grid's best rate, means of three new seeds, the
                lowest of the six cells; target at least 0.98
lr_cifar_cost   steps of everything that `--lr` makes over those of the grid, the highest of the six; target at most
                0.25. Core seconds stand beside it: those of `--lr` have its probes and the start of its processes, and
                those of the grid are without the measurement before the first trial.

Accuracies do not depend on the machine: what is finished is kept in bench/results/lr_cifar.jsonl, and a later call does
what is missing. All of it takes about 20 minutes of one core.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import yaml

from bench._accuracy.cifar import packed as pack_cifar
from bench._accuracy.results import FOLDER, Results, commit, digest, made_by
from bench._common import Claim, count_children_s, table
from headway.core.messages import mute_messages
from headway.sweep import range_test, rate_curve
from headway.sweep.learning_rate import RateOptions, find_rates
from headway.sweep.parameter import ParameterRecipe
from headway.sweep.rate_curve import GRID, list_rates
from headway.sweep.rate_table import FACTORS
from headway.sweep.space_recipe import SpaceRecipe
from headway.sweep.sweep import SweepOptions, start_sweep
from headway.training.runs import load_recipe

RANGES = {"lars": (0.3, 300.0), "lamb": (0.001, 1.0), "muon": (0.005, 5.0)}
"""Ends of the grids."""
SIDE, BATCHES, EPOCHS, SEED, SEEDS = 16, (256, 2048), 3, 1, (2, 3, 4)
CHANCE = 0.1
"""Accuracy of a training that has diverged."""
METHOD = digest(
    [
        (range_test.FIRST_CHANGE, range_test.LAST_CHANGE),
        (rate_curve.SMOOTHED_PARTS, rate_curve.DIVERGED, rate_curve.LAYER_WISE_SHARE),
        (rate_curve.FEWEST_STEPS, rate_curve.MOST_STEPS, rate_curve.TESTED_SHARE),
        FACTORS,
    ]
)
"""Code version of the proposal; `--lr` runs anew where it has changed."""


@final
@dataclass(frozen=True)
class Cell:
    """An optimizer at a batch."""

    optimizer: str
    batch: int

    def build_recipe(self, packed: str) -> dict[str, Any]:
        """Builds its recipe, with any learning rate: no result depends on it."""
        return {
            "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1},
            "model": {"factory": "bench._sweep.networks:patch_net"},
            "optimizer": {"name": self.optimizer, "lr": 0.1, "weight_decay": 0.0005},
            "schedule": {"name": "cosine", "warmup_epochs": EPOCHS / 10},
            "batch": self.batch,
            "epochs": EPOCHS,
            "seed": SEED,
            "device": "cpu",
            "precision": "fp32",
            "evaluate": {"every_epochs": EPOCHS, "batch": 1000},
            "checkpoint": {"every_epochs": EPOCHS},
            # A training that diverges is one of the trainings; the search for the reason would cost time only.
            "observe": {"on_divergence": "ignore"},
        }

    def build_key(self, part: str) -> dict[str, Any]:
        """Builds the key of a kept record. One of other settings does not count."""
        settings = digest([self.build_recipe("packed"), SIDE, GRID, RANGES])
        return {"part": part, "optimizer": self.optimizer, "batch": self.batch, "settings": settings}


CELLS = tuple(Cell(optimizer, batch) for batch in BATCHES for optimizer in RANGES)


def find_best(grid: Mapping[str, Any]) -> tuple[float, float]:
    """Returns rate and accuracy of the best training of a grid."""
    lr, accuracy = max(grid["accuracies"], key=lambda one: one[1])
    return lr, accuracy


@final
@dataclass(frozen=True)
class Outcome:
    """What a finished cell has shown.

    Attributes:
        grid, found: records of the grid and of `--lr`.
        best, own: accuracies of their rates with the new seeds.
    """

    grid: dict[str, Any]
    found: dict[str, Any]
    best: list[float]
    own: list[float]

    @property
    def share(self) -> float:
        """Accuracy of the rate of `--lr` over that of the grid's."""
        return statistics.fmean(self.own) / statistics.fmean(self.best)

    @property
    def cost(self) -> float:
        """Steps of `--lr` over those of the grid."""
        return float(self.found["work"]) / GRID

    @property
    def core_cost(self) -> float:
        """The same for core seconds."""
        return float(self.found["core_s"]) / float(self.grid["core_s"])


@final
class Study:
    """What the kept records of a cell say, and the jobs that add what they lack.

    Args:
        folder: an empty folder for recipes and sweeps.
        packed: the packed data.
        results: the kept records.
    """

    def __init__(self, folder: Path, packed: str, results: Results) -> None:
        self._folder, self._packed, self._results, self._code = folder, packed, results, commit()
        self._count = 0

    def find_job(self, cell: Cell) -> Callable[[], None] | None:
        """Returns the next job of a cell; the later ones need its result. None if all is there."""
        grid, found = self.find_grid(cell), self.find_lr(cell)
        if grid is None:
            return lambda: self._run_grid(cell)
        if found is None:
            return lambda: self._run_lr(cell)
        rates = sorted({find_best(grid)[0], found["lr"]})
        missing = [lr for lr in rates if self.list_retrained(cell, lr) is None]
        return (lambda: self._retrain(cell, missing)) if missing else None

    def find_grid(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the record of the grid."""
        return next(iter(self._results.where(**cell.build_key("grid"))), None)

    def find_lr(self, cell: Cell) -> dict[str, Any] | None:
        """Returns the newest record of `--lr` with the range test as it is."""
        return next(reversed(self._results.where(**cell.build_key("lr"), method=METHOD)), None)

    def list_retrained(self, cell: Cell, lr: float) -> list[float] | None:
        """Returns the accuracies of a rate with the new seeds; None if they are not there yet."""
        found = self._results.where(**cell.build_key("retrained"), lr=lr)
        return found[-1]["accuracies"] if found else None

    def list_outcomes(self) -> dict[Cell, Outcome]:
        """Returns the outcomes of the cells that have all their records."""
        outcomes = {}
        for cell in CELLS:
            grid, found = self.find_grid(cell), self.find_lr(cell)
            if grid is None or found is None:
                continue
            best = self.list_retrained(cell, find_best(grid)[0])
            own = self.list_retrained(cell, found["lr"])
            if best is not None and own is not None:
                outcomes[cell] = Outcome(grid, found, best, own)
        return outcomes

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds the table of the cells that are finished."""
        heading = ("optimizer", "batch", "grid's best", "new seeds", "--lr proposed", "confirmed", "new seeds", "share")
        rows: list[tuple[str, ...]] = [(*heading, "steps", "core s")]
        for cell, one in self.list_outcomes().items():
            edge = ", the edge" * (find_best(one.grid)[0] in RANGES[cell.optimizer])
            accuracies = [" ".join(f"{100 * accuracy:.1f}" for accuracy in few) for few in (one.best, one.own)]
            found = [f"{one.found['proposal']:.3g}", f"{one.found['lr']:.3g}"]
            cells = (f"{find_best(one.grid)[0]:.3g}{edge}", accuracies[0], *found, accuracies[1], f"{one.share:.3f}")
            rows.append((cell.optimizer, str(cell.batch), *cells, f"{one.cost:.3f}", f"{one.core_cost:.3f}"))
        return rows

    def build_claims(self) -> list[Claim]:
        """Builds the claims, if any cell is finished; they say how many are."""
        outcomes = self.list_outcomes()
        if not outcomes:
            return []
        cells = f"{len(outcomes)} of {len(CELLS)} cells"
        shares = {f"{cell.optimizer} at {cell.batch}": one.share for cell, one in outcomes.items()}
        how = f"{cells}, {len(SEEDS)} seeds: " + ", ".join(f"{name} {share:.3f}" for name, share in shares.items())
        core = [one.core_cost for one in outcomes.values()]
        cost = f"the highest of {cells}; of core seconds {min(core):.3f} to {max(core):.3f}"
        return [
            Claim("lr_cifar_share", min(shares.values()), "of the accuracy of the grid's best", how),
            Claim("lr_cifar_cost", max(one.cost for one in outcomes.values()), "of the grid's steps", cost),
        ]

    def describe_commits(self) -> str:
        """Describes the commits that the records were made by."""
        return made_by(one["commit"] for one in self._results.all())

    def _run_grid(self, cell: Cell) -> None:
        rates = [float(f"{rate:.3g}") for rate in list_rates(*RANGES[cell.optimizer], GRID)]
        scores, core_s = self._sweep(cell, {"optimizer.lr": rates})
        self._add(cell, "grid", accuracies=[[values["optimizer.lr"], score] for values, score in scores], core_s=core_s)

    def _run_lr(self, cell: Cell) -> None:
        path = self._write_recipe(cell)
        before = _count_core_s()
        with mute_messages():
            result = find_rates(path, (), RateOptions(), path.parent / "lr")
        (row,) = result.rows
        tried = [[one.lr, one.score] for one in row.candidates]
        found = {"minimum": row.minimum, "proposal": row.proposal, "lr": row.lr, "tried": tried, "work": row.work}
        curve = row.to_json().get("range_test")
        self._add(cell, "lr", method=METHOD, **found, core_s=_count_core_s() - before, curve=curve)

    def _retrain(self, cell: Cell, rates: Sequence[float]) -> None:
        scores, _ = self._sweep(cell, {"optimizer.lr": list(rates), "seed": list(SEEDS)})
        for lr in rates:
            by_seed = {values["seed"]: score for values, score in scores if values["optimizer.lr"] == lr}
            self._add(cell, "retrained", lr=lr, accuracies=[by_seed[seed] for seed in SEEDS])

    def _sweep(self, cell: Cell, choices: Mapping[str, list[Any]]) -> tuple[list[tuple[dict[str, Any], float]], float]:
        """Trains all combinations; returns values and accuracy of each, and core seconds."""
        path = self._write_recipe(cell)
        parameters = {key: ParameterRecipe(choice=tuple(values)) for key, values in choices.items()}
        space = SpaceRecipe(method="grid", parameters=parameters)
        count = 1
        for values in choices.values():
            count *= len(values)
        options = SweepOptions(budget=Fraction(count), method="random", seeds=0)
        with mute_messages():
            result = start_sweep(load_recipe(path, ()), space, options, path.parent / "sweep")
        trials = [(dict(one.values), CHANCE if one.has_failed else one.scores[-1]) for one in result.state.trials]
        return trials, result.core_s

    def _write_recipe(self, cell: Cell) -> Path:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        path = folder / "recipe.yaml"
        path.write_text(yaml.safe_dump(cell.build_recipe(self._packed), sort_keys=False), encoding="utf-8")
        return path

    def _add(self, cell: Cell, part: str, **found: Any) -> None:
        self._results.add({**cell.build_key(part), **found, "commit": self._code})
        told = {key: value for key, value in found.items() if key != "curve"}
        print(f"{part}, {cell.optimizer} at {cell.batch}: {told}", file=sys.stderr, flush=True)


def _count_core_s() -> float:
    return time.process_time() + count_children_s()


def compare_cifar_rates(folder: Path, options: argparse.Namespace, results: Results | None = None) -> list[Claim]:
    """Does the missing jobs, prints the table, and returns `lr_cifar_share` and `lr_cifar_cost`.

    Args:
        folder: an empty folder for recipes and sweeps.
        options: `minutes`: no job begins later; one takes up to four minutes. `quick` begins none.
        results: kept records; by default bench/results/lr_cifar.jsonl.
    """
    minutes = 0.0 if options.quick else getattr(options, "minutes", None)
    began = time.monotonic()

    def has_time() -> bool:
        return minutes is None or time.monotonic() - began < 60 * minutes

    study = Study(folder, str(pack_cifar(SIDE)) if has_time() else "", results or Results(FOLDER / "lr_cifar.jsonl"))
    for cell in CELLS:
        while has_time() and (job := study.find_job(cell)):
            job()
    table(study.build_rows())
    print(f"{study.describe_commits()}\n")
    return study.build_claims()
