"""The learning rate that `headway sweep --lr` finds, against a grid of 16 rates, on digits with a small network.

For SGD and AdamW and each of five seeds (weights, order, and split of the digits), 16 rates train for 150 steps, and so
do the rate that the range test proposes and the one that is the best of three around it. The figure is the negative
log-likelihood (NLL) of the held-out digits over that of the best of the 16 trainings of that seed, the luckiest of
them; a claim has the mean over the seeds. Beside it stands the mean NLL over that of the rate with the best mean.

lr_proposal         NLL of the proposed rate over that of the grid's best training, of the worse optimizer; target 1.25
lr_proposal_share   steps of the range test, as a share of the grid's; target at most 0.1
lr_confirmed        the same for the best of three rates
lr_confirmed_share  steps of the range test and of the three trainings, as a share of the grid's; target at most 0.25
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from sklearn.datasets import load_digits

import headway
from bench._common import Claim
from headway.core.errors import TrainingError
from headway.sweep.learning_rate import RateOptions, find_rates
from headway.sweep.rate_curve import GRID, list_rates

BATCH, STEPS, HELD_OUT = 64, 150, 360
SEEDS = (11, 12, 13, 14, 15)
"""The margins of the proposal were fitted with other ones, 1 to 3."""
RANGES = {"sgd": (1e-3, 3.0), "adamw": (1e-4, 0.3)}
"""Ends of the grids: 16 rates over three and a half powers of ten, with the best one far from both ends."""


@dataclass(frozen=True)
class Outcome:
    """What one seed has given.

    Attributes:
        grid: NLL by rate.
        found: rate, NLL, and full trainings that it took to find it, by kind: proposal, confirmed.
    """

    grid: dict[float, float]
    found: dict[str, tuple[float, float, float]]

    def nll(self, kind: str) -> float:
        return self.found[kind][1]

    def share(self, kind: str) -> float:
        return self.found[kind][2] / len(self.grid)


def measure(
    folder: Path, *, quick: bool, tell: Callable[[str], None] = lambda text: None
) -> tuple[list[Claim], list[tuple[str, ...]]]:
    """Returns the claims and the rows of their table. It takes about five minutes of one core."""
    seeds, steps, points = (SEEDS[:1], 40, 3) if quick else (SEEDS, STEPS, GRID)
    rows: list[tuple[str, ...]] = [("optimizer", "seed", "best of grid", "NLL", "proposed", "NLL", "confirmed", "NLL")]
    found: dict[str, list[Outcome]] = {name: [] for name in RANGES}
    for seed in seeds:
        data = folder / f"digits-{seed}"
        pack_digits(data, seed)
        for name, (low, high) in RANGES.items():
            path = data / f"{name}.yaml"
            path.write_text(yaml.safe_dump(build_recipe(name, seed, steps), sort_keys=False))
            one = measure_seed(path, list_rates(low, high, points), data / name)
            found[name].append(one)
            best = min(one.grid, key=one.grid.__getitem__)
            cells = [cell for rate, nll, _ in one.found.values() for cell in (f"{rate:.3g}", f"{nll:.4f}")]
            rows.append((name, str(seed), f"{best:.3g}", f"{one.grid[best]:.4f}", *cells))
            tell(" ".join(rows[-1]))
    return build_claims(found), rows


def build_claims(found: dict[str, list[Outcome]]) -> list[Claim]:
    claims = []
    for kind in ("proposal", "confirmed"):
        ratios, texts = [], []
        for name, outcomes in found.items():
            nlls = [one.nll(kind) for one in outcomes]
            lucky = [nll / min(one.grid.values()) for nll, one in zip(nlls, outcomes, strict=True)]
            ratios.append(statistics.mean(lucky))
            best = min(statistics.mean(one.grid[rate] for one in outcomes) for rate in outcomes[0].grid)
            spread = f"{min(lucky):.2f} to {max(lucky):.2f}"
            mean = statistics.mean(nlls) / best
            texts.append(f"{name} {ratios[-1]:.3f} ({spread}; {mean:.3f} of the rate with the best mean)")
        how = f"digits, {len(next(iter(found.values())))} seeds: {', '.join(texts)}"
        claims.append(Claim(f"lr_{kind}", max(ratios), "of the NLL of the best of 16 rates", how))
        share = max(one.share(kind) for outcomes in found.values() for one in outcomes)
        claims.append(Claim(f"lr_{kind}_share", share, "of the grid's steps", "the largest of all seeds"))
    return claims


def pack_digits(folder: Path, seed: int) -> None:
    """Packs the digits with a split of the seed's own."""
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(pixels))
    for place, number in enumerate(order):
        part = folder / ("eval" if place < HELD_OUT else "train") / str(digits.target[number])
        part.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(part / f"{number:04d}.png")
    for name in ("train", "eval"):
        headway.pack(folder / name, folder / "packed" / name, threads=1)


def build_recipe(optimizer: str, seed: int, steps: int) -> dict[str, Any]:
    samples = len(load_digits().images) - HELD_OUT
    return {
        "data": {"train": "packed/train", "eval": "packed/eval", "threads": 1},
        "model": {"factory": "bench._sweep.networks:two_convolutions"},
        # Any rate: none of the results depends on it.
        "optimizer": {"name": optimizer, "lr": 1.0},
        "schedule": "cosine",
        "batch": BATCH,
        "epochs": steps * BATCH / samples,
        "precision": "fp32",
        "seed": seed,
        "evaluate": {"every_epochs": 1000},
        "checkpoint": {"every_epochs": 1000},
    }


def measure_seed(path: Path, rates: tuple[float, ...], folder: Path) -> Outcome:
    def train(lr: float) -> float:
        try:
            run = headway.train(path, {"optimizer.lr": lr}, run=folder / f"{lr:.4g}")
        except TrainingError:
            return math.inf
        return float(run.summary["loss"])

    grid = {rate: train(rate) for rate in rates}
    result = find_rates(path, (), RateOptions(slots=1), folder / "lr")
    (row,) = result.rows
    assert row.proposal is not None
    assert row.lr is not None
    tested = row.work - len(row.candidates)
    return Outcome(
        grid,
        {
            "proposal": (row.proposal, train(row.proposal), tested),
            "confirmed": (row.lr, train(row.lr), row.work),
        },
    )
