"""The learning rate that `headway sweep --lr` proposes, against a grid of 16 rates, on digits with a small network.

For SGD and AdamW and each of five seeds (weights, order, and split of the digits), 16 rates train for 150 steps, and so
do the rate that the range test proposes and the one that the short halving confirms. The figure is the negative
log-likelihood of the held-out digits, over that of the best of the 16 rates with the same seed. The best of 16 was
chosen on the same digits, which favours the grid.

lr_proposal         mean ratio of the proposed rate, of the worse optimizer; target at most 1.25
lr_proposal_share   steps of the range test, as a share of the grid's; target at most 0.1
lr_confirmed        mean ratio of the confirmed rate, of the worse optimizer
lr_confirmed_share  steps of range test and halving, as a share of the grid's; target at most 0.25
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
from torch import nn

import headway
from bench._common import Claim
from headway.core.errors import TrainingError
from headway.sweep.learning_rate import WORK, RateOptions, find_rates
from headway.sweep.rate_curve import GRID, list_rates

BATCH, STEPS, HELD_OUT = 64, 150, 360
SEEDS = (11, 12, 13, 14, 15)
"""The margins of the proposal were fitted with other ones, 1 to 3."""
RANGES = {"sgd": (1e-3, 3.0), "adamw": (1e-4, 0.3)}
"""Ends of the grids: 16 rates over three and a half powers of ten, with the best one far from both ends."""


def two_convolutions(num_classes: int, in_channels: int) -> nn.Module:
    """Builds a plain network for 8 x 8 pixels, without batch norm."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, num_classes),
    )


@dataclass(frozen=True)
class Outcome:
    """What one seed has given: NLL by rate of the grid, and the rates and NLLs of the proposal and after the halving.

    Attributes:
        shares: cost of the range test, and of both together, as shares of the grid's.
    """

    grid: dict[float, float]
    proposed: tuple[float, float]
    confirmed: tuple[float, float]
    shares: tuple[float, float]

    def ratio(self, nll: float) -> float:
        return nll / min(self.grid.values())


def measure(
    folder: Path, *, quick: bool, tell: Callable[[str], None] = lambda text: None
) -> tuple[list[Claim], list[tuple[str, ...]]]:
    """Returns the claims and the rows of their table. It takes about five minutes of one core."""
    seeds, steps, points = (SEEDS[:1], 40, 3) if quick else (SEEDS, STEPS, GRID)
    rows: list[tuple[str, ...]] = [("optimizer", "seed", "best of grid", "proposed", "NLL", "confirmed", "NLL")]
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
            numbers = [f"{value:.3g}, {one.ratio(nll):.3f}" for value, nll in (one.proposed, one.confirmed)]
            tell(f"{name} {seed}: {' / '.join(numbers)}")
            cells = [cell for rate, nll in (one.proposed, one.confirmed) for cell in (f"{rate:.3g}", f"{nll:.4f}")]
            rows.append((name, str(seed), f"{best:.3g}: {one.grid[best]:.4f}", *cells))
    return build_claims(found), rows


def build_claims(found: dict[str, list[Outcome]]) -> list[Claim]:
    claims = []
    for place, kind in enumerate(("proposal", "confirmed")):
        ratios = {
            name: [one.ratio((one.proposed, one.confirmed)[place][1]) for one in outcomes]
            for name, outcomes in found.items()
        }
        texts = [f"{name} {statistics.mean(r):.3f} ({min(r):.3f} to {max(r):.3f})" for name, r in ratios.items()]
        worst = max(statistics.mean(values) for values in ratios.values())
        share = max(one.shares[place] for outcomes in found.values() for one in outcomes)
        how = f"digits, {len(next(iter(found.values())))} seeds: {', '.join(texts)}"
        claims.append(Claim(f"lr_{kind}", worst, "of the NLL of the best of 16 rates", how))
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
        "model": {"factory": f"{__name__}:two_convolutions"},
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
    proposed, confirmed = ((lr, train(lr)) for lr in (row.proposal, row.lr))
    shares = ((row.work - float(WORK)) / len(rates), row.work / len(rates))
    return Outcome(grid, proposed, confirmed, shares)
