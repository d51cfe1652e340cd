"""The rungs of the ladder: a tutorial's loop, then one change after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import yaml

from bench._arms import Comparison
from bench._common import Claim, median
from bench._ladder.contestants import BATCH, train, tutorial
from headway.core.cpu_count import choose_thread_count

LARGE = 1024
COMPILE, LAST, LAST_COMPILED = "compile", "batch", "batch, compiled"
"""The last rung is compiled where the rung of that name was faster than the one before it."""
QUICK = ("tutorial", "packed", "bf16", LAST)
"""Without a compiled rung: compiling takes longer than all else, and bench.compile tries it."""
PIXELS = [127.5, 127.5, 127.5]
"""Mean and standard deviation of each channel: bytes as -1..1, as the tutorial has them."""


@final
@dataclass(frozen=True)
class Network:
    """What is trained, and the claim that the ladder makes of it."""

    name: str
    factory: str
    claim: str


LENET = Network("LeNet", "bench._ladder.lenet:lenet", "ladder_total")
CIFAR_NET = Network("cifar_net", "headway.model:cifar_net", "ladder_total_cifar")
"""The network of recipes/cifar10.yaml."""


@final
@dataclass(frozen=True)
class Rung:
    """One change.

    Attributes:
        overrides: of the recipe, besides those of the rungs below. None changes nothing; the rung then has no arm.
        above: the rung whose changes it keeps; empty: the one before.
    """

    name: str
    change: str
    overrides: tuple[str, ...] = ()
    above: str = ""


def rungs(device_type: str, precisions: Sequence[str], packed: Path) -> tuple[Rung, ...]:
    """From the tutorial up; the first is no recipe.

    Args:
        precisions: that the device has units for.
        packed: the same images, by `headway pack`.
    """
    threads = f"{choose_thread_count()} decoding thread{'s'[: choose_thread_count() > 1]}"
    cache, graphs = ("device", "graphs") if device_type == "cuda" else ("memory", "true")
    bf16 = Rung("bf16", "precision: bf16", ("precision=bf16",))
    return (
        Rung("tutorial", f"loose files by Pillow, 1 worker, batch {BATCH}, fp32, contiguous, eager, SGD"),
        Rung("workers", f"headway train, {threads}, same files", ("data.threads=null", "data.prefetch_batches=3")),
        Rung("packed", "headway pack", (f"data.train={packed}",)),
        Rung("resident", f"decoded once, data.cache: {cache}", (f"data.cache={cache}",)),
        Rung("channels-last", "channels_last: true", ("channels_last=true",)),
        bf16 if "bf16" in precisions else Rung("bf16", "no units for bf16 here: fp32 is kept"),
        Rung(COMPILE, f"compile: {graphs}", (f"compile={graphs}",)),
        Rung(LAST, f"batch {BATCH} -> {LARGE}, not compiled", (f"batch={LARGE}",), bf16.name),
        Rung(LAST_COMPILED, f"batch {BATCH} -> {LARGE}, compiled", (f"batch={LARGE}",), COMPILE),
    )


def shorten(ladder: Sequence[Rung]) -> tuple[Rung, ...]:
    """Returns the rungs of a quick run, as each rung is a process."""
    return tuple(rung for rung in ladder if rung.name in QUICK)


def write_recipe(path: Path, network: Network, images: Path) -> Path:
    """The tutorial's loop as a recipe."""
    tree = {
        # one worker of a DataLoader decodes alone, and has two batches ready
        "data": {"train": str(images), "threads": 1, "prefetch_batches": 2, "cache": "none"},
        "augment": {"mean": PIXELS, "std": PIXELS},
        "model": {"factory": network.factory},
        "optimizer": {"name": "sgd", "lr": 0.001, "momentum": 0.9},
        "batch": BATCH,
        "epochs": 10,
        "precision": "fp32",
        "channels_last": False,
    }
    path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return path


def start(arms: Comparison, ladder: Sequence[Rung], network: Network, recipe: Path, images: Path) -> None:
    """Starts an arm for each rung that changes something."""
    arms.add(ladder[0].name, tutorial(images, network.factory))
    for name, overrides in recipes(ladder):
        arms.add(name, train(recipe, *overrides))


def recipes(ladder: Sequence[Rung]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(rung, all overrides up to it)."""
    made: dict[str, tuple[str, ...]] = {ladder[0].name: ()}
    before = ladder[0].name
    for rung in ladder[1:]:
        made[rung.name] = made[rung.above or before] + rung.overrides
        before = rung.name
        if rung.overrides:
            yield rung.name, made[rung.name]


def rows(arms: Comparison, ladder: Sequence[Rung]) -> list[tuple[str, ...]]:
    """The table: one row a rung, those without an arm too."""
    first, before = ladder[0].name, ""
    table: list[tuple[str, ...]] = [
        ("rung", "change", "images/s (95 %)", "ms a step", "over the rung before", "over the tutorial", "waiting")
    ]
    for rung in ladder:
        batch = LARGE if f"batch={LARGE}" in rung.overrides else BATCH
        below = rung.above if rung.above in arms.arms else before
        if rung.name not in arms.arms:
            table.append((rung.name, rung.change, *"-----"))
            continue
        arm = arms.arms[rung.name]
        middle, low, high = median([turn.images_s for turn in arm.turns])
        waits = arm.facts.get("waiting")
        table.append(
            (
                rung.name,
                rung.change,
                f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]",
                f"{batch / middle * 1e3:.3g}",
                times(arms.ratio(rung.name, below)),
                times(arms.ratio(rung.name, first) if before else None),
                f"{waits:.1%}" if isinstance(waits, float) else "-",
            )
        )
        before = rung.name
    return table


def times(ratio: tuple[float, float, float] | None) -> str:
    """`2.31 [2.28, 2.35]`, or a dash where there is none."""
    return "-" if ratio is None else "{:.3g} [{:.3g}, {:.3g}]".format(*ratio)


def claims(arms: Comparison, ladder: Sequence[Rung], network: Network, how: str) -> list[Claim]:
    """The last rung over the first; nothing, where one of them is missing."""
    last = ladder[-1].name
    if last == LAST_COMPILED:
        names = [rung.name for rung in ladder]
        below = [name for name in names[: names.index(COMPILE)] if name in arms.arms][-1]
        helps = arms.ratio(COMPILE, below)
        last = LAST_COMPILED if helps is not None and helps[0] >= 1 else LAST
    ratio = arms.ratio(last, ladder[0].name)
    if ratio is None:
        return []
    what = f"{network.name}, images/s of the last rung ({last}) over the tutorial's"
    return [Claim(network.claim, ratio[0], "", f"{what}; {how}; 95 % [{ratio[1]:.3g}, {ratio[2]:.3g}]")]
