"""The arms of `bench.large_batch`: overrides, the grid of learning rates, seeds. They were fixed before the first
measurement, except two of Muon's after its first runs at 2,048: `lr_rest`, and the first grid at 8,192."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench._accuracy import narrow
from bench._accuracy.results import code, digest
from headway.sweep.steps_curve import GRID, STEP

EPOCHS = 12.0
WARMUP_EPOCHS = 2.0
MATRIX_WARMUP_EPOCHS = 1.0
SMALL, LARGE, LARGEST = 256, 2048, 8192
TUNING_SEED, SEEDS = 0, (1, 2, 3)
GHOST = 128
STATISTICS = 8192
"""Samples whose batch norm statistics an evaluation uses, with the weights as they are then, in every run. Moving ones
would lag behind: over the last ten steps (momentum 0.1), of the 73 that a run at 8,192 has, and the 2,344 at 256."""
LONGER = (1.5, 2.0, 3.0)
"""Times EPOCHS: how long the last arm trains until it is as accurate as the small batch."""

NAMES = {
    "sgd": "SGD",
    "linear": "+ linear scaling, warm-up",
    "lars": "+ LARS",
    "no_decay": "+ no decay of b, beta, gamma",
    "ghost": f"+ ghost batches of {GHOST}",
    "linear_no_decay": "SGD, linear scaling, warm-up, no decay of b, beta, gamma",
    "nag": "NAG, linear scaling, warm-up",
    "lbsgd": f"LBSGD, macro-batches of steps of {SMALL}",
    "muon": "Muon, normalised filters",
    "soap": "SOAP, normalised filters",
    "alike": "SGD, schedule of Muon and SOAP, no decay of b, beta, gamma",
    "muon_free": "Muon, filters not normalised",
}
"""Each + has all that is above it too."""
MATRIX_ARMS = ("muon", "soap")
ALIKE_ARMS = ("alike", "muon_free")
"""Arms that tell an optimizer from its settings. They were added when all others had been measured."""
LARS_TRUST = 0.02
"""The paper's coefficient is 0.001, and learning rates 10 to 30: what has a trust of 1 (beta, gamma) would be moved by
these. With 0.02, which LARC takes, they are near 1."""
FIRST_BASE = {SMALL: 0.05, LARGE: 0.05, LARGEST: 0.025}
"""Lowest of the first four learning rates a batch of 256, which linear scaling multiplies by batch / 256."""
FIRST_SGD = {SMALL: 0.05, LARGE: 0.2, LARGEST: 0.4}
FIRST_LARS = {LARGE: 0.5, LARGEST: 1.0}
FIRST_MUON = {SMALL: 0.02, LARGE: 0.04, LARGEST: 0.04}
FIRST_SOAP = {SMALL: 0.001, LARGE: 0.002, LARGEST: 0.004}
BEST_SGD = {SMALL: 0.8, LARGE: 1.6, LARGEST: 0.8}
"""Best rates of the sweeps of plain SGD. Muon's biases, norms and head, which SGD steps, learn at these. At the rate of
the filters they learn too little: 70.5 % in place of 73.4 % with 0.16 at 2,048, seed 0."""


@dataclass(frozen=True, order=True)
class Cell:
    """One place of a table. `longer`: times the epochs of all others."""

    batch: int
    arm: str
    longer: float = 1.0


@dataclass(frozen=True)
class Job:
    """One run."""

    cell: Cell
    lr: float
    seed: int

    def key(self) -> dict[str, Any]:
        """Returns what a kept run is found by."""
        found = {"bench": "table", **asdict(self.cell), "lr": self.lr, "seed": self.seed}
        return found | {"settings": settings(self.cell)}


CELLS = (
    Cell(SMALL, "sgd"),
    *(Cell(LARGEST, arm) for arm in ("linear", "lars", "no_decay", "ghost")),
    *(Cell(LARGE, arm) for arm in ("sgd", "linear", "lars", "no_decay", "ghost")),
    Cell(LARGEST, "sgd"),
    Cell(LARGEST, "linear_no_decay"),
    *(Cell(batch, arm) for batch in (LARGE, LARGEST) for arm in ("nag", "lbsgd")),
    *(Cell(batch, arm) for arm in (*MATRIX_ARMS, *ALIKE_ARMS) for batch in (LARGE, LARGEST, SMALL)),
)
"""In the order in which they are run: what the claims need first."""


def first_grid(cell: Cell) -> list[float]:
    """The learning rates that a sweep begins with: of linear scaling those of a batch of 256."""
    if cell.arm in ("lars", "no_decay", "ghost"):
        low = FIRST_LARS[cell.batch]
    elif cell.arm in (*MATRIX_ARMS, "muon_free"):
        low = (FIRST_SOAP if cell.arm == "soap" else FIRST_MUON)[cell.batch]
    else:
        low = (FIRST_SGD if cell.arm in ("sgd", "alike") else FIRST_BASE)[cell.batch]
    return [low * STEP**place for place in range(GRID)]


def recipe(cell: Cell, lr: float, seed: int, packed: str) -> dict[str, Any]:
    """The recipe of a run."""
    arm, batch, epochs = cell.arm, cell.batch, EPOCHS * cell.longer
    optimizer: dict[str, Any] = {"name": "sgd", "lr": lr, "momentum": 0.9, "weight_decay": 5e-4}
    schedule: dict[str, Any] = {"name": "polynomial", "power": 2}
    norm: dict[str, Any] = {}
    warmup = {"warmup_epochs": WARMUP_EPOCHS, "warmup_start": SMALL / batch}
    if arm in ("linear", "linear_no_decay", "nag"):
        optimizer["lr"] = lr * batch / SMALL
        schedule |= warmup
    if arm == "linear_no_decay":
        optimizer["no_decay"] = True
    if arm == "nag":
        optimizer["name"] = "nag"
    if arm in ("lars", "no_decay", "ghost"):
        optimizer |= {"name": "lars", "trust": LARS_TRUST, "no_decay": arm != "lars"}
        schedule |= warmup
    if arm == "ghost":
        norm["ghost"] = GHOST
    if arm == "lbsgd":
        scale = batch // SMALL
        optimizer |= {"name": "lbsgd", "batch_scale": scale, "warmup": "linear", "warmup_epochs": WARMUP_EPOCHS}
        optimizer["no_decay"] = False
        batch = SMALL
    if arm in (*MATRIX_ARMS, *ALIKE_ARMS):
        optimizer["no_decay"] = True
        schedule = {"name": "polynomial", "power": 1, "warmup_epochs": MATRIX_WARMUP_EPOCHS, "warmup_start": 0.0}
    if arm in (*MATRIX_ARMS, "muon_free"):
        optimizer |= {"name": arm.removesuffix("_free"), "normalise": arm in MATRIX_ARMS}
        del optimizer["momentum"]
        if arm != "soap":
            # float32, so that a table does not depend on the machine.
            optimizer |= {"momentum": 0.9, "ns_precision": "fp32", "lr_rest": BEST_SGD[cell.batch]}
    tree = build_base_recipe(batch, epochs, seed, packed)
    tree["model"]["batch_norm"] |= norm
    return tree | {
        "optimizer": optimizer,
        "schedule": schedule,
        "evaluate": {"every_epochs": epochs, "batch": 1000},
    }


def build_base_recipe(batch: int, epochs: float, seed: int, packed: Path | str) -> dict[str, Any]:
    """Builds what all runs of the narrow network share: its recipe without optimizer, schedule and evaluations."""
    return {
        "seed": seed,
        "data": {"train": f"{packed}/train", "eval": f"{packed}/eval", "threads": 1},
        "augment": {"flip": True, "translate": 2},
        "model": {
            "factory": "bench._accuracy.narrow:narrow",
            "batch_norm": {"recompute_batches": recomputed(batch)},
        },
        "batch": batch,
        "epochs": epochs,
        "precision": "fp32",
        "checkpoint": {"every_epochs": epochs, "asynchronous": False},
        "log_every_steps": 100,
    }


def recomputed(batch: int) -> int:
    """Batches that hold so many samples."""
    return max(1, STATISTICS // batch)


@cache
def settings(cell: Cell) -> str:
    """Computes a digest of a cell's recipe and network. A kept run with another one does not count.

    The optimizers' code is no part of it: the commit of each run stands beside its table.
    """
    return digest([recipe(cell, 1.0, 0, "packed"), code(narrow)])
