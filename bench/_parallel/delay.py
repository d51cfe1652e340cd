"""Accuracy of asynchronous SGD with simulated workers, with and without compensation of delay.

A network of 24,000 weights on CIFAR-10 at 16 pixels, plain SGD, no augmentation; workers take between 0.8 and 1.2
seconds for a step. All arms see the same samples in the same order, and have the ledger and the weights of our server.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from bench._parallel.forks import make_context
from headway.core.statistics import compute_interval
from headway.parallel.buffers import SharedBuffers
from headway.parallel.compensate import Compensation, DelayCompensation
from headway.parallel.shards import WeightShard
from headway.parallel.simulator import simulate

BATCH, LR = 32, 0.1
PER_CLASS, TEST_PER_CLASS, EPOCHS = 2000, 500, 5

# Test errors of the paper in percent, ResNet-20 on CIFAR-10 after 160 epochs (Zheng et al. 2017, table 1).
PAPER = {
    4: {"sequential": 8.65, "SSGD": 9.17, "ASGD": 9.27, "DC-c": 8.67, "DC-a": 8.19},
    8: {"sequential": 8.65, "SSGD": 10.10, "ASGD": 10.26, "DC-c": 9.27, "DC-a": 8.57},
}
PREVIOUS = "previous weight"


class PreviousWeight:
    """MXNet's rule (python/mxnet/optimizer/dcasgd.py): it corrects for the last update, whoever made that.

    So with one worker, and no delay at all, it is not SGD.
    """

    def __init__(self, weights: Sequence[Tensor], strength: float) -> None:
        self._previous, self._strength = [weight.detach().clone() for weight in weights], strength

    def note_read(self, worker: int, weights: Sequence[Tensor]) -> None:
        """Nothing: it does not know who has read what."""

    def forget(self, worker: int) -> None:
        """Nothing."""

    def correct(
        self, worker: int, gradients: list[Tensor | None], weights: Sequence[Tensor], *, is_stale: bool
    ) -> float:
        for place, (gradient, weight, previous) in enumerate(zip(gradients, weights, self._previous, strict=True)):
            assert gradient is not None
            gradients[place] = gradient + self._strength * gradient * gradient * (weight - previous)
            previous.copy_(weight)
        return 0.0

    def state(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing."""


def build_network(seed: int) -> nn.Module:
    """Builds the network: three convolutions, 24,234 weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


def find_cifar() -> Path | None:
    """Returns the folder of CIFAR-10; None, and said, where there is none."""
    cache = Path(os.environ.get("HEADWAY_CACHE") or Path.home() / ".cache/headway-data")
    source = Path(os.environ.get("HEADWAY_CIFAR10") or cache / "cifar10")
    if (source / "train").is_dir():
        return source
    print(f"no CIFAR-10 in {source}: set HEADWAY_CIFAR10 to the folder that has train/CLASS/NAME and test/CLASS/NAME")
    return None


def read_images(source: Path, part: str, per_class: int, side: int = 16) -> tuple[Tensor, Tensor]:
    """Reads the first images of each class: float32 [n, 3, side, side] about 0, and labels."""
    images, labels = [], []
    for label, folder in enumerate(sorted(path for path in (source / part).iterdir() if path.is_dir())):
        for path in sorted(folder.iterdir())[:per_class]:
            images.append(np.asarray(Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BOX)))
            labels.append(label)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float()
    return (pixels - 120.0) / 64.0, torch.tensor(labels)


def train_arm(
    data: tuple[Tensor, Tensor, Tensor, Tensor],
    workers: int,
    seed: int,
    epochs: int,
    *,
    lr: float = LR,
    merge: int = 1,
    compensate: Callable[[Sequence[str], Sequence[Tensor]], Compensation] | None = None,
) -> float:
    """Trains one network; returns its test accuracy in percent.

    Args:
        merge: workers whose batches are averaged in one step, as synchronous SGD does.
    """
    images, labels, test_images, test_labels = data
    model = build_network(seed)
    weights = dict(model.named_parameters())
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    size = BATCH * merge
    steps = epochs * len(images) // size

    def step(lr: float) -> None:
        with torch.no_grad():
            for weight in weights.values():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=lr)

    def compute(number: int) -> tuple[list[Tensor | None], list[Tensor]]:
        chosen = order[torch.arange(number * size, (number + 1) * size) % len(order)]
        loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
        return list(torch.autograd.grad(loss, list(weights.values()))), []

    rule = compensate or (lambda names, values: DelayCompensation("none", names, values, strength=0, decay=0))
    shard = WeightShard(weights, step, rule(tuple(weights), list(weights.values())))
    random = np.random.default_rng(seed)
    simulate(
        *(workers, steps, shard, SharedBuffers({}, {}), compute),
        lambda update: lr,
        lambda worker, number: random.uniform(0.8, 1.2),
    )
    with torch.no_grad():
        return 100 * float((model(test_images).argmax(1) == test_labels).float().mean())


def dc(rule: Any, strength: float) -> Callable[[Sequence[str], Sequence[Tensor]], Compensation]:
    """Returns a builder of one of our rules."""
    return lambda names, weights: DelayCompensation(rule, names, weights, strength=strength, decay=0.95)


def list_arms(workers: int) -> dict[str, dict[str, Any]]:
    """Returns the options of each arm of the table."""
    return {
        "sequential": {"workers": 1},
        # Equal learning rates, as the mean over all workers' batches is as large as one batch's.
        "SSGD": {"workers": 1, "merge": workers},
        "ASGD": {"workers": workers},
        "ASGD, half lr": {"workers": workers, "lr": LR / 2},
        "DC-c": {"workers": workers, "compensate": dc("constant", 0.04)},
        "DC-a": {"workers": workers, "compensate": dc("adaptive", 2.0)},
        "DC-a, strength 8": {"workers": workers, "compensate": dc("adaptive", 8.0)},
        PREVIOUS: {"workers": workers, "compensate": lambda names, weights: PreviousWeight(weights, 2.0)},
    }


def compare_rules(
    source: Path, worker_counts: Sequence[int], seeds: int, per_class: int, epochs: int
) -> dict[int, dict[str, tuple[float, float]]]:
    """Returns mean accuracy and half width of its 95 % interval over seeds, in percent, of each arm."""
    jobs = [
        (source, workers, name, seed, per_class, epochs)
        for workers in worker_counts
        for name in list_arms(workers)
        for seed in range(seeds)
    ]
    # Accuracies, not times: so processes side by side do no harm.
    with ProcessPoolExecutor(os.cpu_count(), make_context()) as pool:
        accuracies = dict(zip(jobs, pool.map(_run_job, jobs), strict=True))
    found: dict[tuple[int, str], list[float]] = {}
    for (_, workers, name, *_), accuracy in accuracies.items():
        found.setdefault((workers, name), []).append(accuracy)
    return {
        workers: {name: compute_interval(found[workers, name]) for name in list_arms(workers)}
        for workers in worker_counts
    }


def _run_job(job: tuple[Path, int, str, int, int, int]) -> float:
    source, workers, name, seed, per_class, epochs = job
    torch.set_num_threads(1)
    return train_arm(_read_data(source, per_class), seed=seed, epochs=epochs, **list_arms(workers)[name])


@cache
def _read_data(source: Path, per_class: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    test = read_images(source, "test", min(per_class, TEST_PER_CLASS))
    return (*read_images(source, "train", per_class), *test)
