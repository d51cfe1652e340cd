"""How even the load of experts is, with and without losses for it, and what experts learn at equal multiply-adds.

`cifar_moe` on a part of CIFAR-10, AdamW, no augmentation. The dense arm has one network instead of each mixture, as
large as the two experts that a position passes. All arms of a seed see the same samples in the same order.
"""

from __future__ import annotations

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from bench._common import Claim, table
from bench._parallel.delay import find_cifar, read_images
from bench._parallel.forks import make_context
from headway.core.statistics import compute_interval
from headway.model import cifar_moe
from headway.model.auxiliary import AuxiliaryLosses
from headway.model.mixture import list_mixtures

BATCH, LR, SIDE = 128, 0.01, 32
PER_CLASS, TEST_PER_CLASS, EPOCHS = 500, 200, 4

ARMS: dict[str, dict[str, Any]] = {
    "with the losses": {},
    "without them": {"balance": 0.0},
    "dense": {"experts": 0},
}


class Trained(NamedTuple):
    """What one training found.

    Attributes:
        accuracy: on the test images, in percent.
        importance_cv, load_cv: coefficients of variation in the last epoch, means over its steps, of the least even
            layer; 0 without experts.
    """

    accuracy: float
    importance_cv: float
    load_cv: float


def train_arm(data: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, epochs: int, options: dict[str, Any]) -> Trained:
    """Trains one network."""
    images, labels, test_images, test_labels = data
    torch.manual_seed(seed)
    model = cifar_moe(**options).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    auxiliary, mixtures = AuxiliaryLosses(model), [layer for _, layer in list_mixtures(model)]
    batch = min(BATCH, len(images))
    steps = len(images) // batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=epochs * steps)
    draw, found = torch.Generator().manual_seed(seed), []
    for epoch in range(epochs):
        for chosen in torch.randperm(len(images), generator=draw)[: steps * batch].split(batch):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            if (balance := auxiliary.pop()) is not None:
                loss = loss + balance
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if epoch == epochs - 1:
                loads = [layer.load.summarise() for layer in mixtures if layer.load is not None]
                found.append([[load["importance_cv"], load["load_cv"]] for load in loads] or [[0.0, 0.0]])
    model.eval()
    with torch.no_grad():
        outputs = torch.cat([model(part) for part in test_images.split(500)])
    accuracy = 100 * float((outputs.argmax(1) == test_labels).float().mean())
    return Trained(accuracy, *torch.tensor(found).mean(0).amax(0).tolist())


def compare_experts(options: argparse.Namespace) -> list[Claim]:
    """Prints accuracy and evenness of a network with experts, with and without the losses for their load."""
    if (source := find_cifar()) is None:
        return []
    seeds, per_class, epochs = (1, 20, 1) if options.quick else (3, PER_CLASS, EPOCHS)
    found = train_arms(source, seeds, per_class, epochs)
    rows = []
    means: dict[str, tuple[float, ...]] = {}
    for name, trained in found.items():
        accuracy, half = compute_interval([one.accuracy for one in trained])
        means[name] = accuracy, *(sum(values) / seeds for values in list(zip(*trained, strict=True))[1:])
        cvs = (f"{value:.3f}" if value else "" for value in means[name][1:])
        rows.append((name, f"{accuracy:.1f} +- {half:.1f}" if seeds > 1 else f"{accuracy:.1f}", *cvs))
    table([("cifar_moe", "accuracy in %", "CV of importance", "CV of load"), *rows])
    (ours, *even), (_, *uneven), (dense, *_) = (means[name] for name in ARMS)
    setting = f"{seeds} seeds, {epochs} epochs of {10 * per_class:,} images"
    least = min(range(2), key=lambda number: uneven[number] / even[number])
    how = f"{uneven[least]:.3f} against {even[least]:.3f}, {('importance', 'load')[least]}; {setting}"
    return [
        Claim("experts_cv", max(even), "", setting),
        Claim("experts_cv_without", uneven[least] / even[least], "", how),
        Claim("experts_gain", ours - dense, "points", f"{ours:.1f} against {dense:.1f} %; {setting}"),
    ]


def train_arms(source: Path, seeds: int, per_class: int, epochs: int) -> dict[str, list[Trained]]:
    """Trains the network of each arm with each seed."""
    jobs = [(source, name, seed, per_class, epochs) for name in ARMS for seed in range(seeds)]
    # Accuracies, not times: so processes side by side do no harm.
    with ProcessPoolExecutor(os.cpu_count(), make_context()) as pool:
        trained = list(pool.map(_run_job, jobs))
    return {name: trained[number * seeds : (number + 1) * seeds] for number, name in enumerate(ARMS)}


def _run_job(job: tuple[Path, str, int, int, int]) -> Trained:
    source, name, seed, per_class, epochs = job
    torch.set_num_threads(1)
    return train_arm(_read_data(source, per_class), seed, epochs, ARMS[name])


@cache
def _read_data(source: Path, per_class: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    test = read_images(source, "test", min(per_class, TEST_PER_CLASS), SIDE)
    return (*read_images(source, "train", per_class, SIDE), *test)
