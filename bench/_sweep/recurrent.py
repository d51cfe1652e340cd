"""A recurrent and a convolutional network on digits, with SGD, Adam, LAMB and LARS, at a small and at a large batch.

The recipes are recipes/digits-gru.yaml and recipes/digits-conv.yaml, the settings those of
recipes/digits-optimizers.space.yaml. Each optimizer has six learning rates in each cell, by one seed; three other seeds
train with the best one, and make the table. Accuracies are those of the last epoch, on the 359 images that the rate was
chosen on too. A run that diverged counts as chance.

recurrent_lars_gap_N    points by which Adam is better than LARS on the GRU at batch N; expected: at least 15
conv_lars_gap_N         the same on the convolutional network; expected: at most 4
recurrent_trust_gap_N   the same on the GRU for LARS with a trust coefficient of 0.02 in place of 0.001
recurrent_batch_gap     points that the GRU loses from batch 32 to 600 with Adam; conv_batch_gap: the other network

Accuracy does not depend on the machine: each finished run is kept in bench/results/recurrent.jsonl, and a later call
does the missing ones. All of them take about five minutes of one core. It runs alone too: python -m
bench._sweep.recurrent [--minutes M].
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bench._accuracy.batch_worker import train
from bench._accuracy.results import FOLDER, Results, commit, digest, made_by
from bench._arms import ROOT
from bench._common import Claim, parser, report, table
from bench._family import run_bench
from headway.core.statistics import compute_interval
from headway.data.pack import pack

NETWORKS = {"recurrent": "digits-gru", "conv": "digits-conv"}
EPOCHS = {32: 8, 600: 16}
"""Epochs of each batch: 360 and 38 steps."""
TUNING_SEED, SEEDS = 0, (1, 2, 3)
TRUST = "lars, trust 0.02"
ARMS: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "sgd": ({"name": "sgd"}, (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)),
    "adam": ({"name": "adam"}, (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)),
    "lamb": ({"name": "lamb"}, (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)),
    "lars": ({"name": "lars", "trust": 0.001}, (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)),
    TRUST: ({"name": "lars", "trust": 0.02}, (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
}
"""Keys of the optimizer, and its learning rates, by the name of an arm."""


@dataclass(frozen=True)
class Cell:
    """One place of the table."""

    network: str
    batch: int
    arm: str


@dataclass(frozen=True)
class Job:
    """One run."""

    cell: Cell
    lr: float
    seed: int

    def build_recipe(self, packed: str) -> dict[str, Any]:
        """Builds the recipe of the run, for a data set packed in a folder."""
        tree = read_recipe_tree(self.cell.network)
        tree["data"] |= {"train": f"{packed}/train", "eval": f"{packed}/eval"}
        tree["optimizer"] = {**ARMS[self.cell.arm][0], "lr": self.lr}
        # The search for divergence would end in a warning only, and cost a copy of the weights.
        tree["observe"] = {"on_divergence": "ignore"}
        return tree | {"seed": self.seed, "batch": self.cell.batch, "epochs": EPOCHS[self.cell.batch]}

    def build_key(self) -> dict[str, Any]:
        """Builds the key that a kept run is found by. A run of other settings does not count."""
        return {**asdict(self.cell), "lr": self.lr, "seed": self.seed, "settings": compute_settings(self.cell)}


CELLS = tuple(Cell(network, batch, arm) for network in NETWORKS for batch in EPOCHS for arm in ARMS)


@cache
def compute_settings(cell: Cell) -> str:
    """Computes the code version of a cell's settings: its recipe, without learning rate and seed."""
    return digest(Job(cell, 0.0, 0).build_recipe("packed"))


def read_recipe_tree(network: str) -> dict[str, Any]:
    """Reads the recipe of a network."""
    tree: dict[str, Any] = yaml.safe_load((ROOT / f"recipes/{NETWORKS[network]}.yaml").read_text(encoding="utf-8"))
    return tree


class Table:
    """The accuracies of the kept runs by cell, and what follows from them.

    Args:
        records: kept runs, as the results file has them.
    """

    def __init__(self, records: Sequence[Mapping[str, Any]]) -> None:
        jobs = [Job(cell, lr, seed) for cell in CELLS for lr in ARMS[cell.arm][1] for seed in (TUNING_SEED, *SEEDS)]
        known = {tuple(job.build_key().values()): job for job in jobs}
        self._accuracies: dict[Job, float] = {}
        self._commits = []
        for one in records:
            key = tuple(one.get(name) for name in jobs[0].build_key())
            if key in known:
                self._accuracies[known[key]] = one["accuracy"]
                self._commits.append(one["commit"])

    def find_best_rate(self, cell: Cell) -> float | None:
        """Returns the learning rate of a cell with the highest accuracy of the tuning seed; None: not all have run."""
        tried = {lr: self._accuracies.get(Job(cell, lr, TUNING_SEED)) for lr in ARMS[cell.arm][1]}
        known = {lr: accuracy for lr, accuracy in tried.items() if accuracy is not None}
        return max(known, key=lambda lr: known[lr]) if len(known) == len(tried) else None

    def is_at_edge(self, cell: Cell) -> bool:
        """Returns True if the best learning rate of a cell is the lowest or the highest that was tried."""
        rates = ARMS[cell.arm][1]
        return self.find_best_rate(cell) in (rates[0], rates[-1])

    def list_accuracies(self, cell: Cell) -> list[float]:
        """Lists the accuracies in percent of a cell's seeds at its best rate, without those that have not run."""
        lr = self.find_best_rate(cell)
        found = [self._accuracies.get(Job(cell, lr, seed)) for seed in SEEDS] if lr is not None else []
        return [100 * accuracy for accuracy in found if accuracy is not None]

    def list_missing(self) -> list[Job]:
        """Lists the runs that can be done now: the learning rates of each cell, then the seeds of its best one."""
        out = []
        for cell in CELLS:
            lr = self.find_best_rate(cell)
            rates = ARMS[cell.arm][1]
            wanted = [(one, TUNING_SEED) for one in rates] if lr is None else [(lr, seed) for seed in SEEDS]
            jobs = [Job(cell, one, seed) for one, seed in wanted]
            out += [job for job in jobs if job not in self._accuracies]
        return out

    def build_rows(self) -> list[tuple[str, ...]]:
        """Builds the table: mean accuracy and learning rate of each cell."""
        rows: list[tuple[str, ...]] = [("network", "batch", *ARMS)]
        for network in NETWORKS:
            for batch in EPOCHS:
                rows.append((network, str(batch), *(self._describe_cell(Cell(network, batch, arm)) for arm in ARMS)))
        return rows

    def build_rate_rows(self) -> list[tuple[str, ...]]:
        """Builds the table of all learning rates: the accuracy of the tuning seed at each."""
        rows: list[tuple[str, ...]] = [("network", "batch", "optimizer", "learning rate: accuracy, %")]
        for cell in CELLS:
            tried = [(lr, self._accuracies.get(Job(cell, lr, TUNING_SEED))) for lr in ARMS[cell.arm][1]]
            said = ", ".join(f"{lr:g}: {'missing' if found is None else f'{100 * found:.1f}'}" for lr, found in tried)
            rows.append((cell.network, str(cell.batch), cell.arm, said))
        return rows

    def _describe_cell(self, cell: Cell) -> str:
        found, lr = self.list_accuracies(cell), self.find_best_rate(cell)
        if lr is None or len(found) < len(SEEDS):
            return "missing"
        seeds = ", ".join(f"{one:.1f}" for one in found)
        return f"{statistics.fmean(found):.1f} ({seeds}) at {lr:g}{', the edge' * self.is_at_edge(cell)}"

    def build_claims(self) -> list[Claim]:
        """Builds the claims whose runs are all there."""
        pairs = []
        for batch in EPOCHS:
            pairs += [
                (f"recurrent_lars_gap_{batch}", Cell("recurrent", batch, "adam"), Cell("recurrent", batch, "lars")),
                (f"conv_lars_gap_{batch}", Cell("conv", batch, "adam"), Cell("conv", batch, "lars")),
                (f"recurrent_trust_gap_{batch}", Cell("recurrent", batch, "adam"), Cell("recurrent", batch, TRUST)),
            ]
        small, large = EPOCHS
        pairs += [
            (f"{network}_batch_gap", Cell(network, small, "adam"), Cell(network, large, "adam")) for network in NETWORKS
        ]
        return [claim for name, one, other in pairs if (claim := self._compare(name, one, other))]

    def _compare(self, name: str, one: Cell, other: Cell) -> Claim | None:
        mine, theirs = self.list_accuracies(one), self.list_accuracies(other)
        if min(len(mine), len(theirs)) < len(SEEDS):
            return None
        # The same seed means the same order of the samples, so the seeds are pairs.
        mean, half = compute_interval([a - b for a, b in zip(mine, theirs, strict=True)])
        how = f"mean of {len(SEEDS)} pairs of seeds, 95 % interval +- {half:.1f}"
        edges = [cell.arm for cell in (one, other) if self.is_at_edge(cell)]
        how += f"; the best rate of {' and '.join(edges)} is at the edge of the sweep" if edges else ""
        return Claim(name, mean, "points", how)

    def describe_commits(self) -> str:
        """Describes the commits that the runs were made by."""
        return made_by(self._commits)


def pack_digits(folder: Path, split: float = 0.2) -> Path:
    """Packs scikit-learn's digits into a folder and returns its path; by default 359 are for evaluation."""
    source = folder / "digits"
    subprocess.run([sys.executable, ROOT / "examples/digits_folder.py", source], check=True, stdout=subprocess.DEVNULL)
    pack(source, folder / "digits.packed", split=split)
    return folder / "digits.packed"


def compare_optimizers(
    folder: Path, options: argparse.Namespace, results: Results | None = None, run: Callable[..., Any] = train
) -> list[Claim]:
    """Does the missing runs one after the other, prints the tables, and returns the claims.

    Args:
        folder: an empty folder for the data.
        options: `quick` makes two steps of some cells, and no claims; `minutes`: no run begins later.
        results: kept runs; by default bench/results/recurrent.jsonl.
        run: trains a recipe's tree and returns its `accuracy`.
    """
    # Once: the code that runs is that of the start, whatever is edited meanwhile.
    packed, began, code = str(pack_digits(folder)), time.monotonic(), commit()
    if options.quick:
        table(_try_cells(packed, run))
        return []
    results = results or Results(FOLDER / "recurrent.jsonl")
    minutes = getattr(options, "minutes", None)
    # The seeds of a cell are known to be missing once its learning rates have run: so the list is made anew each time.
    while missing := Table(results.all()).list_missing():
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            print(f"{len(missing)} runs or more are missing.")
            break
        job = missing[0]
        accuracy = run(job.build_recipe(packed))["accuracy"]
        results.add({**job.build_key(), "accuracy": accuracy, "commit": code})
        print(f"{job.cell} lr {job.lr:g} seed {job.seed}: {accuracy:.2%}", file=sys.stderr)
    found = Table(results.all())
    table(found.build_rate_rows())
    table(found.build_rows())
    print(f"{found.describe_commits()}\n")
    return found.build_claims()


def _try_cells(packed: str, run: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Makes two steps with the first learning rate of every third cell. Returns rows with the accuracies."""
    rows: list[tuple[str, ...]] = [("network", "batch", "optimizer", "accuracy after two steps")]
    # All arms, both networks and both batches are among them.
    for cell in CELLS[::3]:
        tree = Job(cell, ARMS[cell.arm][1][0], TUNING_SEED).build_recipe(packed)
        # The packed training set has 1,438 images.
        found = run(tree | {"epochs": 2 * cell.batch / 1438})
        rows.append((cell.network, str(cell.batch), cell.arm, f"{found['accuracy']:.1%}"))
    return rows


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--minutes", type=float, metavar="M", help="begin no run after so long; 0 shows what is there")
    options = asked.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-recurrent-") as folder:
        report(compare_optimizers(Path(folder), options), options)


if __name__ == "__main__":
    run_bench(main)
