"""Injectors: each slows down one known stage of a job, by a random strength.

The strengths are chosen so that the stage takes most of the time on two cores of any speed. The bench checks this by
measuring the case without the injector.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, final

from bench._doctor import user
from bench._doctor.jobs import BASES, BIG, Job, network, own

Change = Callable[[Job], Job]

CROP = {"name": "random", "scale": [0.5, 1.0]}
"""Of at least half of an image, so that most of it is resized."""


@final
@dataclass(frozen=True)
class Injected:
    """An injector with a strength.

    Attributes:
        truth: the stages of which the doctor may name any: as few as can be told apart.
        on: puts it into a job. off: puts in its place what the same job has without it.
    """

    name: str
    strength: str
    truth: tuple[str, ...]
    on: Change
    off: Change = lambda job: job

    @property
    def text(self) -> str:
        return f"{self.name} ({self.strength})" if self.strength else self.name


@final
@dataclass(frozen=True)
class Injector:
    """Attributes:
    families: of bases that it can be put into.
    slots: what of a job it changes; two that share one cannot be put into the same job.
    draw: makes one of a strength, for a family.
    """

    name: str
    families: tuple[str, ...]
    slots: frozenset[str]
    draw: Callable[[Random, str], Injected]


def _log_uniform(random: Random, low: float, high: float) -> float:
    return float(f"{low * (high / low) ** random.random():.3g}")


# The input.


def _disk(random: Random, family: str) -> Injected:
    # Files of their own: of a pack, a page that is asked for brings up to megabytes of its neighbours, which serve a
    # later batch, so that a small set has no steady rate.
    mega = _log_uniform(random, 10, 40)

    def photos(job: Job) -> Job:
        return job.but({"data.size": 112, "log_every_steps": 4}, data="photos loose, many")

    def on(job: Job) -> Job:
        return photos(job).but(limits={"disk_bytes_s": mega * 1e6}, cold=True)

    return Injected("disk", f"{mega:g} MB/s", ("storage",), on, photos)


def _remote(random: Random, family: str) -> Injected:
    mega, data = _log_uniform(random, 50, 200), random.choice(("photos raw", "photos x 1"))

    def photos(job: Job) -> Job:
        return job.but({"log_every_steps": 2}, data=f"{data}, a great many")

    def on(job: Job) -> Job:
        return photos(job).but(limits={"remote_bits_s": mega * 1e6})

    return Injected("remote", f"{mega:g} Mbit/s", ("storage",), on, photos)


def _cold(random: Random, family: str) -> Injected:
    def loose(job: Job) -> Job:
        return job.but(network(own("Perceptron")), data="loose")

    return Injected("cold files", "", ("storage",), lambda job: loose(job).but(cold=True), loose)


def _decode(random: Random, family: str) -> Injected:
    scale, decoder = random.choice(("1", "1.5", "2")), random.choice(("native", "pillow"))
    return Injected(
        "decode",
        f"{decoder}, photographs x {scale}",
        ("decode",),
        lambda job: job.but({"data.decoder": decoder}, data=f"photos x {scale}"),
    )


def _augment(random: Random, family: str) -> Injected:
    # The resize of a random crop is a part of decoding where the pixels come of a JPEG; here they are pixels already.
    side, light = random.choice((384, 512, 768)), network(own("Perceptron"))
    return Injected(
        "augment",
        f"random crops of {side} x {side} pixels",
        ("augment", "decode"),
        lambda job: job.but({**light, "data.size": 32, "data.crop": CROP}, data=f"pixels {side}"),
        lambda job: job.but(light),
    )


def _thread(random: Random, family: str) -> Injected:
    cores = len(os.sched_getaffinity(0))

    def threads(count: int) -> Change:
        values = {"data.size": 112, "data.threads": count, "data.crop": "random"}
        return lambda job: job.but(values, data="photos x 1")

    return Injected("one thread", f"of {cores}", ("decode",), threads(1), threads(cores))


def _quota(random: Random, family: str) -> Injected:
    cores = round(random.uniform(0.35, 0.65), 2)
    heavy = network("headway.model:small_net", width=16)

    def whole(job: Job) -> Job:
        if family == "photos":
            return job.but({"data.size": 112}, data="photos x 1")
        return job.but({**heavy, "log_every_steps": 4})

    truth = "decode" if family == "photos" else "compute"
    return Injected("quota", f"{cores:g} cores", (truth,), lambda job: whole(job).but(limits={"cores": cores}), whole)


# The loop.


def _batch(random: Random, family: str) -> Injected:
    size, light = random.randint(1, 4), network(own("Perceptron"))
    return Injected(
        "tiny batch",
        f"{size}",
        ("launch",),
        lambda job: job.but({**light, "batch": size, "log_every_steps": 200}),
        lambda job: job.but(light),
    )


def _kernels(random: Random, family: str) -> Injected:
    layers = random.randint(100, 300)
    return Injected(
        "small kernels",
        f"{layers} layers",
        ("launch",),
        lambda job: job.but({**network(own("Chain"), layers=layers), "batch": 32}),
        lambda job: job.but({**network(own("Perceptron")), "batch": 32}),
    )


def _transform(random: Random, family: str) -> Injected:
    rounds = random.randint(1, 4) if family == "photos" else random.randint(5, 30)
    return Injected(
        "transform",
        f"{rounds} rounds",
        ("transform",),
        lambda job: job.but({"transform": own("smooth")}, {user.ROUNDS: str(rounds)}),
    )


def _sync(random: Random, family: str) -> Injected:
    reads = random.randint(200, 900) if family == "photos" else random.randint(60, 300)
    return Injected(
        "sync",
        f"{reads} values an image",
        ("sync",),
        lambda job: job.but({"transform": own("read")}, {user.READS: str(reads)}),
    )


def _items(random: Random, family: str) -> Injected:
    reads = random.randint(60, 300)
    return Injected(
        "loss in Python",
        f"{reads} values an image",
        ("sync",),
        lambda job: job.but({"task.factory": own("Reading"), "task.args": {"reads": reads}}),
    )


HEAVY: tuple[tuple[str, dict[str, Any]], ...] = (
    ("headway.model:small_net", {"width": 16}),
    ("headway.model:small_net", {"width": 24}),
    ("headway.model:cifar_net", {"widths": [16, 32, 32]}),
    ("headway.model:cifar_net", {"widths": [24, 48, 48]}),
    ("headway.model:resnet18", {}),
)


def _compute(random: Random, family: str) -> Injected:
    factory, args = random.choice(HEAVY)
    values = {**network(factory, **args), "log_every_steps": 4}
    wide = ", ".join(f"{name} {value}" for name, value in args.items())
    said = f"{factory.rpartition(':')[2]} {wide}".strip()
    return Injected("compute", said, ("compute",), lambda job: job.but(values))


def _none(random: Random, family: str) -> Injected:
    """A recipe as it should be: its network is what takes the time. Without that it has next to none."""
    values = network("headway.model:cifar_net", widths=[16, 32, 32]) | {"log_every_steps": 4, "augment.translate": 2}
    return Injected(
        "none", "", ("compute",), lambda job: job.but(values), lambda job: job.but(network(own("Perceptron")))
    )


# Several processes.


def _rank(random: Random, family: str) -> Injected:
    rounds = random.randint(8, 30)

    def two(job: Job) -> Job:
        return job.but({"transform": own("smooth_on_one")}, {user.ROUNDS: str(rounds)}, procs=2)

    return Injected(
        "slow rank", f"{rounds} rounds", ("slow rank",), lambda job: two(job).but(environ={user.SLOW_RANK: "1"}), two
    )


def _link(random: Random, family: str) -> Injected:
    mega = _log_uniform(random, 200, 1000)

    def two(job: Job) -> Job:
        return job.but({**network(own("Perceptron"), hidden=512), "batch": 64}, procs=2)

    return Injected(
        "slow link", f"{mega:g} Mbit/s", ("reduce",), lambda job: two(job).but(limits={"link_bits_s": mega * 1e6}), two
    )


# Stalls.


def _checkpoint(random: Random, family: str) -> Injected:
    steps = random.randint(2, 6)

    def wide(every: int) -> Change:
        values = {**network(own("Perceptron"), hidden=1024), "batch": 32}
        return lambda job: job.but({**values, "checkpoint.every_steps": every, "checkpoint.asynchronous": False})

    return Injected("checkpoint", f"every {steps} steps", ("checkpoint",), wide(steps), wide(BIG))


def _evaluate(random: Random, family: str) -> Injected:
    steps = random.randint(8, 40)

    def on(job: Job) -> Job:
        return job.but({"evaluate.every_epochs": steps * BASES["cifar"].recipe["batch"] / 50_000}, held_out=True)

    return Injected("evaluate", f"every {steps} steps", ("evaluate",), on)


def _injector(draw: Callable[[Random, str], Injected], families: str, slots: str) -> Injector:
    return Injector(draw.__name__.lstrip("_"), tuple(families.split()), frozenset(slots.split()), draw)


INJECTORS = (
    _injector(_disk, "photos", "place format"),
    _injector(_remote, "photos", "place format"),
    _injector(_cold, "cifar", "place format net procs"),
    _injector(_decode, "photos", "format"),
    _injector(_augment, "cifar", "place format net labels"),
    _injector(_thread, "photos", "format threads"),
    _injector(_quota, "cifar photos", "cores format net"),
    _injector(_batch, "cifar", "batch net procs"),
    _injector(_kernels, "cifar", "batch net"),
    _injector(_transform, "cifar photos", "transform"),
    _injector(_sync, "cifar photos", "transform"),
    _injector(_items, "cifar", "task"),
    _injector(_compute, "cifar", "net"),
    _injector(_rank, "cifar", "transform procs"),
    _injector(_link, "cifar", "batch net procs"),
    _injector(_checkpoint, "cifar", "batch net"),
    _injector(_evaluate, "cifar", "batch labels"),
)
NONE = _injector(_none, "cifar", "net")
