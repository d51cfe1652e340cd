"""Accuracy of four simulated ranks that average their weights after some steps, beside data parallel training.

The network, images and batches of `delay`: 24,000 weights, CIFAR-10 at 16 pixels, plain SGD with one learning rate, no
augmentation. All arms see the same samples in the same order, and average with our outer optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from bench._parallel.delay import BATCH, LR, build_network, read_images
from bench._parallel.forks import make_context
from headway.core.statistics import compute_interval
from headway.parallel.local import OuterOptimizer
from headway.parallel.rounds import Rounds

RANKS, EPOCHS, PER_CLASS, TEST_PER_CLASS = 4, 8, 2000, 500


@dataclass(frozen=True)
class Arm:
    """One way to train: steps of a round, the share of the run before the first round, and the outer optimizer.

    With one step a round the outer optimizer is that of data parallel training.
    """

    every_steps: int
    start: float = 0.0
    lr: float = 1.0
    momentum: float = 0.0


ARMS = {
    "data parallel": Arm(1),
    # What the outer step of DiLoCo has and plain SGD lacks.
    "data parallel, momentum": Arm(1, lr=0.7, momentum=0.9),
    "local, every 8": Arm(8),
    "local, every 32": Arm(32),
    "post-local, every 32": Arm(32, start=0.5),
    "DiLoCo, every 8": Arm(8, lr=0.7, momentum=0.9),
    "DiLoCo, every 32": Arm(32, lr=0.7, momentum=0.9),
}


def train_arm(data: tuple[Tensor, Tensor, Tensor, Tensor], arm: Arm, seed: int, epochs: int) -> float:
    """Trains the ranks in turns; returns the test accuracy of their mean in percent."""
    images, labels, test_images, test_labels = data
    networks = [build_network(seed) for _ in range(RANKS)]
    inner = [torch.optim.SGD(network.parameters(), lr=LR) for network in networks]
    outers = [OuterOptimizer(network.named_parameters(), lr=arm.lr, momentum=arm.momentum) for network in networks]
    # A round of one step that takes the mean is data parallel training.
    data_parallel = [OuterOptimizer(network.named_parameters()) for network in networks]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    size = BATCH * RANKS
    steps = epochs * len(images) // size
    rounds = Rounds(first=int(arm.start * steps), length=arm.every_steps, steps=steps)
    for step in range(1, steps + 1):
        used = outers if arm.every_steps == 1 or rounds.is_alone(step) else data_parallel
        if rounds.find_start(step) == step - 1:
            for outer in used:
                outer.begin_round()
        chosen = order[torch.arange((step - 1) * size, step * size) % len(order)]
        for network, optimizer, own in zip(networks, inner, chosen.split(BATCH), strict=True):
            nn.functional.cross_entropy(network(images[own]), labels[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
        if rounds.is_end(step):
            for outer in used:
                outer.put_gradients(1 / RANKS)
            _sum_gradients(networks)
            for outer in used:
                outer.step()
    with torch.no_grad():
        return 100 * float((networks[0](test_images).argmax(1) == test_labels).float().mean())


def _sum_gradients(networks: list[nn.Module]) -> None:
    for parameters in zip(*(network.parameters() for network in networks), strict=True):
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        total = torch.stack(gradients).sum(0)
        for parameter in parameters:
            parameter.grad = total


def compare_accuracy(source: Path, seeds: int, per_class: int, epochs: int) -> Mapping[str, tuple[float, float]]:
    """Returns mean accuracy and half width of its 95 % interval over seeds, in percent, of each arm."""
    jobs = [(source, name, seed, per_class, epochs) for name in ARMS for seed in range(seeds)]
    # Accuracies, not times: so processes side by side do no harm.
    with ProcessPoolExecutor(os.cpu_count(), make_context()) as pool:
        accuracies = list(pool.map(_run_job, jobs))
    return {
        name: compute_interval([accuracy for job, accuracy in zip(jobs, accuracies, strict=True) if job[1] == name])
        for name in ARMS
    }


def _run_job(job: tuple[Path, str, int, int, int]) -> float:
    source, name, seed, per_class, epochs = job
    torch.set_num_threads(1)
    return train_arm(_read_data(source, per_class), ARMS[name], seed, epochs)


@cache
def _read_data(source: Path, per_class: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    test = read_images(source, "test", min(per_class, TEST_PER_CLASS))
    return (*read_images(source, "train", per_class), *test)
