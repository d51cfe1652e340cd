"""Labels that mining saves on digits: a perceptron 64-128-128-10, trained anew each round, 40 to 320 labels.

A seed draws 500 test images and the first 40 labels; each round adds 40. `choose` is that of `headway mine`, with its
fifth of random picks. The pools: plain; three classes cut to a tenth; and 70 % near copies, each a digit of the pool
that is brighter or darker by at most 10 %, with one level of noise. No augmentation, which favours mining. BALD asks
three networks of other seeds; the accuracy is that of the first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from torch.nn import functional as F

import headway
from bench._common import Claim, table, use_one_thread
from headway.core.statistics import compute_interval
from headway.lifecycle.copies.hash_images import hash_images
from headway.lifecycle.copies.near_copies import find_near_copies
from headway.lifecycle.mining.choose import Candidates, choose
from headway.lifecycle.mining.scores import compute_entropy

START, STEP, END, HELD_OUT, SEEDS = 40, 40, 320, 500, 8
RARE, COPY_SHARE, STEPS, BATCH = (2, 5, 8), 0.7, 300, 32
SIZES = range(START, END + 1, STEP)
BOOTSTRAPS = 1000


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to choose. `removes` takes near copies out; `members` networks are asked."""

    name: str
    strategy: str
    removes: bool = False
    members: int = 1


RANDOM, MARGIN, WITHOUT = Arm(name="random", strategy="random"), Arm(name="margin", strategy="margin"), Arm(
    name="margin, near copies out", strategy="margin", removes=True
)  # fmt: skip
POOLS: dict[str, tuple[Arm, ...]] = {
    "plain": (
        RANDOM,
        MARGIN,
        *(Arm(name=one, strategy=one) for one in ("entropy", "k-center", "badge")),
        Arm(name="bald of 3", strategy="bald", members=3),
    ),
    "rare": (RANDOM, MARGIN, Arm(name="badge", strategy="badge")),
    "copies": (RANDOM, MARGIN, WITHOUT),
}
CLAIMED = {"plain": "margin", "rare": "margin", "copies": WITHOUT.name}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Images float32 [n, 64] and labels of a pool and of the test set; group of near copies of each pool image."""

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    group: NDArray[np.int64]
    kept: NDArray[np.bool_]


@use_one_thread()
def count_labels(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Trains 900 small networks: three minutes of one core."""
    seeds, steps = (range(1), STEPS // 10) if options.quick else (range(SEEDS), STEPS)
    rows = [("pool", "arm", "accuracy at 320", "over random, points", "wins", "labels to random's 320", "95 %")]
    claims = []
    for name, arms in POOLS.items():
        arms = tuple(arm for arm in arms if not options.quick or arm.name in ("random", CLAIMED[name]))
        curves = {arm.name: np.array([simulate(build_pool(name, seed, folder), arm, seed, steps) for seed in seeds])
                  for arm in arms}  # fmt: skip
        target = curves["random"]
        for arm in arms:
            curve = curves[arm.name]
            low, high = bootstrap(curve, target)
            needed = interpolate(curve.mean(axis=0), target[:, -1].mean())
            gain, half = compute_interval((100 * (curve[:, -1] - target[:, -1])).tolist())
            wins = int((curve[:, -1] > target[:, -1]).sum())
            found = ("", "", "320", "") if arm.name == "random" else (
                f"{gain:+.1f} +- {half:.1f}", f"{wins}/{len(seeds)}", f"{needed:.0f}", f"{low:.0f} to {high:.0f}"
            )  # fmt: skip
            rows.append((name, arm.name, f"{100 * curve[:, -1].mean():.1f} %", *found))
            if arm.name == CLAIMED[name]:
                how = f"{arm.name}, a fifth random, {len(seeds)} seeds; 95 % {low:.0f} to {high:.0f} over seeds"
                claims.append(Claim(f"labels_to_random_320_{name}", needed, "labels", how))
    table(rows)
    return claims


def interpolate(curve: NDArray[np.float64], target: float) -> float:
    """Returns the number of labels at which a mean curve first reaches a target, by straight lines; else infinity."""
    previous: tuple[int, float] | None = None
    for labels, value in zip(SIZES, curve.tolist(), strict=True):
        if value >= target:
            if previous is None:
                return float(labels)
            before, low = previous
            return before + (labels - before) * (target - low) / (value - low)
        previous = (labels, value)
    return float("inf")


def bootstrap(curves: NDArray[np.float64], random: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the 95 % interval of the labels needed, over draws of seeds with replacement."""
    draws = np.random.default_rng(0).integers(len(curves), size=(BOOTSTRAPS, len(curves)))
    found = sorted(interpolate(curves[draw].mean(axis=0), random[draw, -1].mean()) for draw in draws)
    return found[int(0.025 * BOOTSTRAPS)], found[int(0.975 * BOOTSTRAPS) - 1]


def build_pool(name: str, seed: int, folder: Path) -> Pool:
    # scikit-learn takes two seconds to import, and the tests of this file need it rarely.
    from sklearn.datasets import load_digits

    digits = load_digits()
    levels, labels = digits.images.astype(np.int64), digits.target.astype(np.int64)
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(labels))
    test, rest = order[:HELD_OUT], order[HELD_OUT:]
    if name == "rare":
        drawn = generator.random(len(rest)) < 0.1
        rest = rest[~np.isin(labels[rest], RARE) | drawn]
    images, group = levels[rest], np.arange(len(rest))
    if name == "copies":
        # As many images as the plain pool, 30 % of them originals.
        originals = round((1 - COPY_SHARE) * len(rest))
        source = np.concatenate([np.arange(originals), generator.integers(originals, size=len(rest) - originals)])
        factor = generator.uniform(0.9, 1.1, size=(len(rest), 1, 1))
        factor[:originals] = 1
        noise = generator.integers(-1, 2, size=images.shape) * (generator.random(images.shape) < 0.2)
        noise[:originals] = 0
        images = np.clip(np.rint(images[source] * factor) + noise, 0, 16).astype(np.int64)
        rest = rest[source]
    kept = np.ones(len(rest), np.bool_)
    if name == "copies":
        group, kept = find_groups(images, labels[rest], folder / f"{name}-{seed}")
    return Pool(
        x=torch.tensor(images.reshape(len(images), -1) / 16, dtype=torch.float32),
        y=torch.tensor(labels[rest]),
        test_x=torch.tensor(levels[test].reshape(HELD_OUT, -1) / 16, dtype=torch.float32),
        test_y=torch.tensor(labels[test]),
        group=group,
        kept=kept,
    )


def find_groups(
    images: NDArray[np.int64], labels: NDArray[np.int64], folder: Path
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Packs the pool, and finds its near copies as `headway mine` does."""
    if not (folder / "packed").exists():
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            place = folder / "files" / str(label)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)).save(place / f"{number:05d}.png")
        headway.pack(folder / "files", folder / "packed", mode="keep", threads=1)
    group, kept = np.arange(len(images)), np.ones(len(images), np.bool_)
    with closing(headway.open(folder / "packed")) as dataset:
        numbers = np.array([int(Path(dataset.name(place)).stem) for place in range(len(dataset))])
        for cluster in find_near_copies(hash_images(dataset, threads=1)).clusters:
            group[numbers[cluster]] = numbers[cluster[0]]
            kept[numbers[cluster[1:]]] = False
    return group, kept


def simulate(pool: Pool, arm: Arm, seed: int, steps: int = STEPS) -> list[float]:
    """Returns the accuracy on the test images at each number of labels."""
    generator = np.random.default_rng(1000 + seed)
    chosen = generator.permutation(len(pool.y))[:START].tolist()
    accuracies = []
    for number in SIZES:
        # The first has the seed that it has alone.
        seeds = [1000 * seed + number + 1_000_000 * member for member in range(arm.members)]
        networks = [train(pool.x[chosen], pool.y[chosen], one, steps) for one in seeds]
        with torch.no_grad():
            accuracies.append(float((networks[0](pool.test_x).argmax(1) == pool.test_y).float().mean()))
        if number < END:
            chosen += extend(pool, arm, chosen, networks, 1000 * seed + number)
    return accuracies


def extend(pool: Pool, arm: Arm, chosen: Sequence[int], networks: Sequence[nn.Sequential], seed: int) -> list[int]:
    """Chooses the next images to label."""
    free = np.ones(len(pool.y), np.bool_)
    free[list(chosen)] = False
    if arm.removes:
        # Copies of labelled images are out, and of several copies all but the first.
        free &= pool.kept & ~np.isin(pool.group, pool.group[list(chosen)])
    places = np.flatnonzero(free)
    with torch.no_grad():
        features = networks[0][:-1](pool.x)
        each = torch.stack([network(pool.x[places]).softmax(1) for network in networks]).numpy()
    candidates = Candidates(
        samples=places,
        names=[str(place) for place in places],
        classes=tuple("0123456789"),
        probabilities=each.mean(axis=0),
        mean_entropy=compute_entropy(each).mean(axis=0),
        members=len(networks),
        features=features[places].numpy(),
    )
    labelled = features[list(chosen)].numpy() if arm.strategy == "k-center" else None
    picks = choose(candidates, arm.strategy, STEP, labelled_features=labelled, seed=seed)
    return [int(places[pick.place]) for pick in picks]


def train(x: torch.Tensor, y: torch.Tensor, seed: int, steps: int = STEPS) -> nn.Sequential:
    """Trains a perceptron with Adam for a fixed number of steps, whatever the number of labels."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    order = torch.cat([torch.randperm(len(x)) for _ in range(-(-steps * BATCH // len(x)))])
    for step in range(steps):
        rows = order[step * BATCH : (step + 1) * BATCH]
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
    return net
