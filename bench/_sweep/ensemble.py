"""Ensembles of 1 to 8 networks on digits with 300 labels.

A repetition draws 30 digits of each class, trains eight networks on them with own seeds (initial weights and order),
and evaluates on all other digits. Networks are saved after their last step: no evaluation chose their weights. Three
settings show how the gain depends on the single network.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from sklearn.datasets import load_digits
from torch.nn import functional as F

import headway
from bench._common import Claim
from headway.core.run_folder import RunFolder
from headway.training.average_outputs import average_outputs
from headway.training.evaluate import open_evaluation_set, predict_outputs
from headway.training.make_ensemble import make_ensemble
from headway.training.runs import load_trained

PER_CLASS, EPOCHS, REPETITIONS = 30, 20, 3
SIZES = (1, 2, 4, 8)
"""Members of the ensembles. Eight networks make eight ensembles of one, four of two, two of four, one of eight."""


CLAIMED = "two convolutions"
SETTINGS: dict[str, dict[str, Any]] = {
    CLAIMED: {"model": {"factory": "bench._sweep.networks:two_convolutions"}, "optimizer": {"weight_decay": 0.0}},
    "small_net": {},
    "small_net, shifts": {"augment": {"translate": 1}},
}
"""Changes of the recipe. The better a single network is regularised, the less an ensemble adds: all are shown."""


def recipe(epochs: int, changes: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "data": {"train": "packed/train", "eval": "packed/eval", "threads": 1},
        "model": {"factory": "headway.model:small_net"},
        "optimizer": {"name": "sgd", "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        "schedule": "cosine",
        "batch": 32,
        "epochs": epochs,
        "precision": "fp32",
        "evaluate": {"every_epochs": epochs, "batch": 64},
        "checkpoint": {"every_epochs": epochs},
    }
    return tree | {key: {**tree.get(key, {}), **part} for key, part in changes.items()}


def pack_digits(folder: Path, seed: int, per_class: int) -> None:
    """Packs `per_class` digits of each class into packed/train, and the others into packed/eval."""
    digits = load_digits()
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    order = np.random.default_rng(seed).permutation(len(pixels))
    seen = dict.fromkeys(range(10), 0)
    for number in order:
        label = int(digits.target[number])
        part = "train" if seen[label] < per_class else "eval"
        seen[label] += 1
        place = folder / part / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number]).save(place / f"{number:04d}.png")
    for part in ("train", "eval"):
        headway.pack(folder / part, folder / "packed" / part, threads=1)


def measure(
    folder: Path, *, quick: bool, tell: Callable[[str], None] = lambda text: None
) -> tuple[list[Claim], list[tuple[str, ...]]]:
    """Returns the claim `ensemble_nll_k4` and the rows of its table. It takes about two minutes of one core."""
    repetitions, epochs, sizes = (1, 2, SIZES[:3]) if quick else (REPETITIONS, EPOCHS, SIZES)
    drawn = [folder / f"draw-{seed}" for seed in range(1, repetitions + 1)]
    for seed, one in enumerate(drawn, 1):
        pack_digits(one, seed, PER_CLASS)
    names = ("accuracy", "nll", "ece")
    rows: list[tuple[str, ...]] = [("recipe", "members", *names, "disagreement", "nll of 4 / nll of 1")]
    claims = []
    for setting, changes in list(SETTINGS.items())[: 1 if quick else None]:
        tree = recipe(epochs, changes)
        found = [measure_draw(one, setting, tree, seed, sizes) for seed, one in enumerate(drawn, 1)]
        ratios = [one.mean(4, "nll") / one.mean(1, "nll") for one in found]
        spread = f"{statistics.mean(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        differ = statistics.mean(one.disagreement for one in found)
        for size in sizes:
            values = [f"{statistics.mean(one.mean(size, name) for one in found):.4f}" for name in names]
            ends = (f"{differ:.1%}", spread) if size == 4 else ("", "")
            rows.append((setting, str(size), *values, *ends))
        tell(f"{setting}: {spread}")
        if setting == CLAIMED:
            how = f"{CLAIMED}, {repetitions} draws of {10 * PER_CLASS} digits: {min(ratios):.3f} to {max(ratios):.3f};"
            how += f" Jensen held in all {sum(one.batches for one in found)} batches"
            claims.append(Claim("ensemble_nll_k4", statistics.mean(ratios), "of one member's NLL", how))
    return claims, rows


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Metrics of all ensembles of one draw by their size, mean disagreement, and batches in which Jensen held."""

    metrics: dict[int, list[dict[str, float]]]
    disagreement: float
    batches: int

    def mean(self, size: int, name: str) -> float:
        return statistics.mean(one[name] for one in self.metrics[size])


def measure_draw(folder: Path, setting: str, tree: dict[str, Any], seed: int, sizes: Sequence[int]) -> Draw:
    """Trains as many members as the largest size, and measures ensembles of each size."""
    path = folder / f"{setting}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    places = [folder / setting / str(member) for member in range(sizes[-1])]
    runs = [headway.train(path, {"seed": 100 * seed + place}, run=run).folder for place, run in enumerate(places)]
    whole = make_ensemble(runs, out=folder / setting / "all").study
    metrics = {1: [one.metrics for one in whole.members], sizes[-1]: [whole.metrics]}
    for size in sizes[1:-1]:
        parts = [runs[low : low + size] for low in range(0, len(runs), size)]
        metrics[size] = [make_ensemble(part).study.metrics for part in parts]
    batches = check_jensen(folder / setting / "all")
    return Draw(metrics=metrics, disagreement=whole.disagreement or 0.0, batches=batches)


def check_jensen(ensemble: Path) -> int:
    """Checks that the mean's NLL is at most the mean NLL in each batch of 64; returns the number of batches."""
    setup = load_trained(RunFolder.open_trained(ensemble))
    count = 0
    with closing(setup.inputs), closing(open_evaluation_set(setup, None, ensemble)) as held_out, torch.no_grad():
        for batch in setup.inputs.build_evaluation_loader(setup.recipe, held_out):
            outputs = [predict_outputs(member, batch.images).double() for member in setup.members]
            together = F.cross_entropy(average_outputs("softmax", outputs), batch.labels)
            alone = torch.stack([F.cross_entropy(one, batch.labels) for one in outputs]).mean()
            assert together <= alone + 1e-12, f"NLL {together} of the mean, {alone} of the members"
            count += 1
    return count
