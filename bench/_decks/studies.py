"""Small trainings that the decks' figures ask for: `python -m bench.decks --train`. Each study is a grid of runs.

norm        three layers of sigmoids on digits, with and without batch norm, at seven learning rates
divergence  a learning rate of 40 at a batch of 2,048, under SGD with and without a warm-up, and under LARS with it;
            CIFAR-10 at 16 pixels, 12 epochs
batch       SGD at one learning rate, three epochs of CIFAR-10, batches of 64 to 1,280: the deck's table of batches
rules       batches 4 and 16 times as large as 256, with its learning rate as it was, times the root of the factor, and
            times the factor; CIFAR-10 at 16 pixels, 8 epochs with a warm-up. The rate at 256 has a sweep
optimizers  SGD, NAG and LBSGD at a batch of 1,280, 20 epochs of CIFAR-10 at 16 pixels: the deck's three logs
alexnet     AlexNet-BN with a sixteenth of its channels under LARS at a batch of 2,048, 12 epochs of CIFAR-10, with and
            without weight decay of biases, beta and gamma. Each has a sweep of its rate

Accuracies do not depend on the machine, so every finished run is kept in bench/results/decks.jsonl, and a later call
does the missing ones. All settings were fixed before the first run.
"""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

from bench._accuracy import narrow
from bench._accuracy.batch_arms import FIRST_LARS, LARS_TRUST, WARMUP_EPOCHS, build_base_recipe, recomputed
from bench._accuracy.batch_worker import run_recipe
from bench._accuracy.cifar import packed as pack_cifar
from bench._accuracy.results import FOLDER, Results, code, commit, digest
from bench._decks import alexnet, networks
from bench._sweep.recurrent import pack_digits
from headway.sweep.steps_curve import GRID, STEP, extend_grid, is_at_edge

RESULTS = FOLDER / "decks.jsonl"
TUNING_SEED, SEEDS = 0, (1, 2, 3)
BATCHES = (64, 128, 256, 512, 1280)
"""The deck's, per device."""
BATCH_LR = 0.1
"""The best one at 128 and 256 of `bench.large_batch --curve`. It is that of all batches."""
OPTIMIZERS = ("sgd", "nag", "lbsgd")
LOG_BATCH, LOG_SCALE, LOG_LR = 1280, 5, 0.1
"""LBSGD makes its batch of LOG_SCALE steps of 256. SGD and NAG have LOG_SCALE times the rate, which LBSGD rises to."""
RULE_BATCH, RULE_FACTORS = 256, (4, 16)
RULE_RATES = (0.05, 0.1, 0.2, 0.4)
"""Learning rates of the sweep at RULE_BATCH."""
RULES = {"none": 0.0, "root": 0.5, "linear": 1.0}
"""Powers of the factor between the batches, by which the learning rate is multiplied."""
NORM = ("with", "without")
NORM_BATCH, NORM_RATES = 60, (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""The batch of Ioffe and Szegedy 2015 (arXiv 1502.03167)."""
LARGE_BATCH, LARGE_LR = 2048, 40.0
DIVERGENCE = ("sgd", "sgd, no warm-up", "lars")
DECAY = ("all", "weights")
"""Parameters that decay: all, or weights alone."""
DECAY_RATES = tuple(FIRST_LARS[LARGE_BATCH] * STEP**place for place in range(GRID))
"""First learning rates of both sweeps, those of LARS in `bench.large_batch`."""
EPOCHS = {"norm": 20, "divergence": 12, "batch": 3, "rules": 8, "optimizers": 20, "alexnet": 12}
LOGGED = ("norm", "divergence", "batch", "optimizers")
SIDES = {"norm": 8, "batch": 32, "alexnet": 32}
"""Pixels; others have 16."""


@dataclass(frozen=True)
class Job:
    """One run."""

    study: str
    arm: str
    batch: int
    lr: float
    seed: int

    def build_key(self) -> dict[str, Any]:
        """Builds the key that a kept run is found by. A run of other settings does not count."""
        return asdict(self) | {"settings": compute_settings(self.study)}

    def build_recipe(self, packed: Path | str) -> dict[str, Any]:
        """Builds the recipe, for data packed in a folder."""
        epochs = EPOCHS[self.study]
        tree = build_base_recipe(self.batch, epochs, self.seed, packed)
        tree |= {
            "optimizer": {"name": "sgd", "lr": self.lr, "momentum": 0.9, "weight_decay": 5e-4},
            "schedule": {"name": "constant"},
            "evaluate": {"every_epochs": 1, "batch": 1000},
            # An epoch's training loss and accuracy are the means of its records, one a step.
            "log_every_steps": 1 if self.study in LOGGED else 100,
            "observe": {"on_divergence": "ignore"},
        }
        _CHANGES.get(self.study, lambda job, tree: None)(self, tree)
        return tree


def _change_optimizer(job: Job, tree: dict[str, Any]) -> None:
    tree["optimizer"] |= {"name": job.arm, "lr": job.lr * LOG_SCALE}
    if job.arm == "lbsgd":
        warmup = {"batch_scale": LOG_SCALE, "warmup": "linear", "warmup_epochs": 5, "no_decay": False}
        tree["batch"] = job.batch // LOG_SCALE
        tree["model"]["batch_norm"]["recompute_batches"] = recomputed(tree["batch"])
        tree["optimizer"] |= {"lr": job.lr, **warmup}


def _change_rule(job: Job, tree: dict[str, Any]) -> None:
    factor = job.batch / RULE_BATCH
    tree["optimizer"]["lr"] = job.lr * factor ** RULES[job.arm]
    tree["schedule"] = {"name": "cosine", "warmup_epochs": 1, "warmup_start": 1 / factor}


def _change_norm(job: Job, tree: dict[str, Any]) -> None:
    tree["model"] = {"factory": "bench._decks.networks:sigmoid_net", "args": {"norm": job.arm == "with"}}
    tree["optimizer"] = {"name": "sgd", "lr": job.lr, "momentum": 0.0}
    del tree["augment"]


def _change_divergence(job: Job, tree: dict[str, Any]) -> None:
    tree["schedule"] = {"name": "polynomial", "power": 2}
    if job.arm != "sgd, no warm-up":
        tree["schedule"] |= {"warmup_epochs": 2, "warmup_start": 0.0}
    if job.arm == "lars":
        # The paper's trust coefficient: a weight moves by 0.04 of its norm in a step at this rate.
        tree["optimizer"] |= {"name": "lars", "trust": 0.001, "no_decay": False}


def _change_decay(job: Job, tree: dict[str, Any]) -> None:
    tree["model"]["factory"] = "bench._decks.alexnet:small_alexnet"
    tree["optimizer"] |= {"name": "lars", "trust": LARS_TRUST, "no_decay": job.arm == "weights"}
    warmup_start = RULE_BATCH / LARGE_BATCH
    tree["schedule"] = {"name": "polynomial", "power": 2, "warmup_epochs": WARMUP_EPOCHS, "warmup_start": warmup_start}
    # Only the end counts.
    tree["evaluate"]["every_epochs"] = EPOCHS["alexnet"]


_CHANGES: Mapping[str, Callable[[Job, dict[str, Any]], None]] = {
    "optimizers": _change_optimizer,
    "rules": _change_rule,
    "norm": _change_norm,
    "divergence": _change_divergence,
    "alexnet": _change_decay,
}
_NETWORKS = {"norm": networks, "alexnet": alexnet}
_FIRST = {
    "norm": [Job("norm", arm, NORM_BATCH, lr, seed) for seed in SEEDS for arm in NORM for lr in NORM_RATES],
    "divergence": [Job("divergence", arm, LARGE_BATCH, LARGE_LR, seed) for seed in SEEDS for arm in DIVERGENCE],
    "batch": [Job("batch", "sgd", batch, BATCH_LR, seed) for seed in SEEDS for batch in BATCHES],
    "rules": [Job("rules", "linear", RULE_BATCH, lr, TUNING_SEED) for lr in RULE_RATES],
    "optimizers": [Job("optimizers", arm, LOG_BATCH, LOG_LR, seed) for seed in SEEDS for arm in OPTIMIZERS],
    "alexnet": [Job("alexnet", arm, LARGE_BATCH, lr, TUNING_SEED) for arm in DECAY for lr in DECAY_RATES],
}
STUDIES = tuple(_FIRST)
"""In the order in which they are run."""


@cache
def compute_settings(study: str) -> str:
    """Computes the code version of a study: a recipe of each arm without its rate, and the network."""
    arms = RULES if study == "rules" else {job.arm for job in _FIRST[study]}
    jobs = [Job(study, arm, _FIRST[study][0].batch, 1.0, 0) for arm in sorted(arms)]
    return digest([*(job.build_recipe("packed") for job in jobs), code(_NETWORKS.get(study, narrow))])


@final
class Runs:
    """The kept runs, by job.

    Args:
        records: of the results file; those of other settings are left out.
    """

    def __init__(self, records: Iterable[Mapping[str, Any]]) -> None:
        self._found: dict[Job, Mapping[str, Any]] = {}
        for one in records:
            job = Job(one["study"], one["arm"], one["batch"], one["lr"], one["seed"])
            if job.study in _FIRST and one["settings"] == compute_settings(job.study):
                self._found[job] = one

    def list_missing(self) -> list[Job]:
        """Lists the runs that can be done now. Those of `rules` and `alexnet` follow from their sweeps."""
        jobs = [job for study in STUDIES for job in _FIRST[study]]
        if (lr := self.find_rule_rate()) is not None:
            large = [(RULE_BATCH * factor, rule) for factor in RULE_FACTORS for rule in RULES]
            jobs += [
                Job("rules", rule, batch, lr, seed)
                for seed in SEEDS
                for batch, rule in [(RULE_BATCH, "linear"), *large]
            ]
        jobs += [Job("rules", "linear", RULE_BATCH, lr, TUNING_SEED) for lr in self._search_rule_rate()[0]]
        for arm in DECAY:
            lrs, best = extend_grid(self._read_sweep("alexnet", arm), DECAY_RATES)
            pairs = [(lr, TUNING_SEED) for lr in lrs] if best is None else [(best, seed) for seed in SEEDS]
            jobs += [Job("alexnet", arm, LARGE_BATCH, lr, seed) for lr, seed in pairs]
        # Each once, in the order of the studies: the sort is stable.
        missing = [job for job in dict.fromkeys(jobs) if job not in self._found]
        return sorted(missing, key=lambda job: STUDIES.index(job.study))

    def find_rule_rate(self) -> float | None:
        """Finds the best learning rate at the small batch of `rules`; None until its sweep is done."""
        return self._search_rule_rate()[1]

    def is_rule_rate_at_edge(self) -> bool:
        """Returns True if that is the lowest or highest rate of the sweep: a better one may lie beyond."""
        return is_at_edge(self._read_sweep("rules", "linear"))

    def _search_rule_rate(self) -> tuple[list[float], float | None]:
        return extend_grid(self._read_sweep("rules", "linear"), RULE_RATES)

    def find_decay_rate(self, arm: str) -> float | None:
        """Finds the best learning rate of an arm of `alexnet`; None until its sweep is done."""
        return extend_grid(self._read_sweep("alexnet", arm), DECAY_RATES)[1]

    def is_decay_at_edge(self, arm: str) -> bool:
        """Returns True if that is the lowest or highest rate of the sweep: a better one may lie beyond."""
        return is_at_edge(self._read_sweep("alexnet", arm))

    def _read_sweep(self, study: str, arm: str) -> dict[float, float]:
        """Reads the accuracy by learning rate of the seed that tunes."""
        return {
            job.lr: record["accuracy"]
            for job, record in self._found.items()
            if (job.study, job.arm, job.seed) == (study, arm, TUNING_SEED)
        }

    def select(self, study: str, **asked: Any) -> list[Mapping[str, Any]]:
        """Selects the kept runs of a study's three seeds by arm, batch or learning rate."""
        wanted = {"study": study} | asked
        return [
            record
            for job, record in sorted(self._found.items(), key=lambda pair: pair[0].seed)
            if job.seed in SEEDS and all(getattr(job, name) == value for name, value in wanted.items())
        ]


def average(runs: Sequence[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], float]) -> float | None:
    """Returns the mean over runs of three seeds; None until all are there."""
    return statistics.fmean(map(read, runs)) if len(runs) == len(SEEDS) else None


def summarise_epochs(records: Sequence[Mapping[str, Any]]) -> list[dict[str, float]]:
    """Returns the means of training loss and accuracy over the steps of each epoch, and the evaluation at its end."""
    epochs: dict[int, list[Mapping[str, Any]]] = {}
    for one in records:
        if one["kind"] == "train":
            # A step across the end of an epoch counts for the one in which most of its samples lie.
            middle = one["epoch"] * (1 - one["batch"] / 2 / one["position"])
            epochs.setdefault(int(middle), []).append(one)
    evaluated = {round(one["epoch"]) - 1: one["accuracy"] for one in records if one["kind"] == "evaluate"}
    return [
        {
            "loss": round(statistics.fmean(one["loss"] for one in steps), 6),
            "train": round(statistics.fmean(one["accuracy"] for one in steps), 6),
            "val": evaluated[epoch],
        }
        for epoch, steps in sorted(epochs.items())
        if epoch in evaluated
    ]


def has_diverged(run: Mapping[str, Any]) -> bool:
    """Returns True if a run's loss was not finite, or in some epoch ten times that of guesses among ten classes."""
    return bool(run["diverged"]) or max(one["loss"] for one in run["epochs"]) > 10 * math.log(10)


def run_missing(results: Results, only: Sequence[str], minutes: float | None) -> None:
    """Runs what is missing of some studies, one run after the other.

    Args:
        minutes: no run begins later.
    """
    began, made_by = time.monotonic(), commit()
    with tempfile.TemporaryDirectory(prefix="headway-decks-") as folder:
        digits: Path | None = None
        while jobs := [job for job in Runs(results.all()).list_missing() if job.study in only]:
            if minutes is not None and time.monotonic() - began >= 60 * minutes:
                break
            job = jobs[0]
            if job.study == "norm":
                packed = digits = digits or pack_digits(Path(folder))
            else:
                packed = pack_cifar(SIDES.get(job.study, 16))
            found, records = run_recipe(job.build_recipe(packed))
            kept = {name: found[name] for name in ("accuracy", "diverged", "steps", "seconds")}
            results.add({**job.build_key(), **kept, "epochs": summarise_epochs(records), "commit": made_by})
            print(f"{job}: {found['accuracy']:.2%} in {found['seconds']:.0f} s", file=sys.stderr)
