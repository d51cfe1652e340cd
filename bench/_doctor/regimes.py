"""Both regimes on one machine and one set of images: a network with the compute per byte of ResNet-50 is limited by the
device, one with that of AlexNet by the host.

On a GPU these are the real networks, in bf16, and all CPU cores decode.

A CPU as device would limit both networks at full size. So both are scaled down by one factor, until the rate of the
loader lies in the middle between theirs: the same four convolutions in two widths, one with 5.8 times as many
multiply-adds per image as the other.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import final

import torch

import headway
from bench._common import Claim, median
from bench._doctor.around import around
from bench._doctor.data import Sets
from bench._doctor.jobs import BASES, Job, network, own
from bench._doctor.measure import examined, trained
from bench._synthetic import setup, trainer
from headway.core.cpu_count import list_usable_cpus
from headway.training.progress import SilentDisplay

SIDE, BATCH = 224, 32
RESNET50, ALEXNET = 4.089e9 / (224**2 * 3), 0.724e9 / (227**2 * 3)
"""Multiply-adds of a forward pass for each byte of the decoded image: 27,165 and 4,683 (headway.model.model_size)."""
RATIO = RESNET50 / ALEXNET
REAL = {"AlexNet": ("headway.model:alexnet", 724_000_000), "ResNet-50": ("headway.model:resnet50", 4_089_000_000)}
"""On a GPU: the networks, and multiply-adds of an image."""
REAL_BATCH = 256
CHANNELS = range(2, 49)
WAITS, DOES_NOT = 0.15, 0.05
"""Share of the time that the loop waits for batches, from which on the host limits, and below which it does not."""


@final
@dataclass(frozen=True)
class Regime:
    """Attributes: like: the network that it is scaled down from. truth: a kind of verdict; None: neither shows."""

    like: str
    multiply_adds: int
    images_s: float
    wait_share: float
    said: str
    stage: str

    @property
    def truth(self) -> str | None:
        if self.wait_share >= WAITS:
            return "host/IO limited"
        return "device limited" if self.wait_share <= DOES_NOT else None

    @property
    def right(self) -> bool:
        return self.said == self.truth

    def row(self) -> tuple[str, ...]:
        adds = f"{self.multiply_adds / 1e6:.1f} million"
        waits = f"{self.wait_share:.0%}"
        truth = self.truth or "neither"
        return (self.like, adds, f"{self.images_s:,.0f}", waits, truth, self.said, self.stage)


HEADING = ("like", "multiply-adds", "images/s", "waits", "truth", "said", "stage")


def multiply_adds(channels: int, side: int = SIDE, classes: int = 250) -> int:
    """Of `user.Blocks` for an image."""
    pixels = (side // 8) ** 2
    return pixels * channels * (3 * 64 + 4 * 9 * channels) + channels * classes


def pairs() -> list[tuple[int, int]]:
    """(channels like AlexNet, like ResNet-50): the nearest to the ratio."""
    widest = multiply_adds(CHANNELS[-1]) / RATIO
    return [
        (few, min(CHANNELS, key=lambda many: abs(multiply_adds(many) / multiply_adds(few) - RATIO)))
        for few in CHANNELS
        if multiply_adds(few) <= widest
    ]


def run(sets: Sets, folder: Path, options: argparse.Namespace) -> tuple[list[Claim], list[tuple[str, ...]]]:
    """The claim and the table."""
    seconds = 1.0 if options.quick else 10.0
    if torch.cuda.is_available():
        jobs = {like: (real_job(factory), adds) for like, (factory, adds) in REAL.items()}
    else:
        loader = loader_s(sets.train("photos x 1"), 0.5 if options.quick else 5.0)
        candidates, rounds = (pairs()[::9], 1) if options.quick else (pairs()[::3], 5)
        few, many = chosen(candidates, loader, folder, rounds)
        jobs = {
            like: (job_of(channels), multiply_adds(channels))
            for like, channels in (("AlexNet", few), ("ResNet-50", many))
        }
    if options.quick:
        # One of them shows that it works, and takes half as long.
        jobs = {"AlexNet": jobs["AlexNet"]}
    found = [
        regime(like, job, adds, sets, folder / like, seconds, quick=options.quick) for like, (job, adds) in jobs.items()
    ]
    rows = [HEADING, *(one.row() for one in found)]
    if {one.truth for one in found} != {"host/IO limited", "device limited"}:
        print("The two networks did not come into two regimes on this machine: nothing is claimed.")
        return [], rows
    share = sum(one.right for one in found) / len(found)
    how = "of a network like AlexNet, host limited, and one like ResNet-50, device limited, both by their waiting share"
    return [Claim("regimes_named", share, "", how)], rows


def regime(like: str, job: Job, adds: int, sets: Sets, folder: Path, seconds: float, *, quick: bool) -> Regime:
    """Trains a network, and asks the doctor. Args: adds: multiply-adds of an image."""
    with around(job, sets) as place:
        images_s, waits = trained(job, place, folder / "train", seconds)
        profile = examined(job, place, folder / "doctor", quick=quick)
    return Regime(like, adds, images_s, waits, profile.verdict.kind, profile.verdict.stage)


def job_of(channels: int) -> Job:
    """Photographs decoded by one thread, a network that another one computes."""
    values = {"data.crop": "random", "data.size": SIDE, "batch": BATCH}
    return BASES["photos"].but({**values, **network(own("Blocks"), channels=channels)}, data="photos x 1")


def real_job(factory: str) -> Job:
    """Photographs decoded by all processors, and a network of full size on a GPU."""
    values = {"data.crop": "random", "data.size": SIDE, "batch": REAL_BATCH, "data.threads": list_usable_cpus()}
    gpu = {"device": "cuda", "precision": "bf16", **network(factory)}
    return BASES["photos"].but({**values, **gpu}, data="photos x 1")


def chosen(candidates: Sequence[tuple[int, int]], loader: float, folder: Path, rounds: int) -> tuple[int, int]:
    """The pair between whose seconds for an image the loader's lie in the middle."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [(pair, loop_s(pair[0], folder, rounds), loop_s(pair[1], folder, rounds)) for pair in candidates]
        return nearest(found, loader)
    finally:
        torch.set_num_threads(threads)


def nearest(found: Sequence[tuple[tuple[int, int], float, float]], loader: float) -> tuple[int, int]:
    """Args: found: (pair, seconds of one, of the other). The middle is that of the logarithms."""
    return min(found, key=lambda one: abs((one[1] * one[2]) ** 0.5 / loader - 1))[0]


def loop_s(channels: int, folder: Path, rounds: int) -> float:
    """Seconds of an image in the training loop alone, on images that are there already."""
    args = f"model.args={{channels: {channels}}}"
    with tempfile.TemporaryDirectory(dir=folder) as name:
        found = setup(own("Blocks"), (SIDE, SIDE), BATCH, Path(name), args, "device=cpu")
        with closing(found.inputs), closing(trainer(found, Path(name), SilentDisplay())) as loop:
            loop.run(1)
            taken = []
            for _ in range(rounds):
                begun = perf_counter()
                loop.run(1)
                taken.append((perf_counter() - begun) / BATCH)
    return median(taken)[0]


def loader_s(folder: Path, seconds: float) -> float:
    """Seconds of an image in the loader alone, one thread."""
    with closing(headway.open(folder)) as dataset:
        how = {"seed": 1, "stop": math.inf, "size": (SIDE, SIDE), "crop": "random", "threads": 1}
        loader = headway.Loader(dataset, batch=BATCH, **how)
        stream, images = iter(loader), 0
        try:
            next(stream)
            begun = perf_counter()
            while (spent := perf_counter() - begun) < seconds:
                images += len(next(stream).images)
        finally:
            stream.close()  # type: ignore[attr-defined]
    return spent / images
