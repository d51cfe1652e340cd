"""Claims of the slides about the input: workers, prefetching, binary files, data in memory, image sizes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import headway
from bench._arms import Comparison, ours
from bench._common import table
from bench._data import images
from bench._ladder.contestants import BATCH, Command, rows, train, tutorial
from bench._ladder.decks import Found, Ratio
from bench._ladder.photographs import squares
from bench._ladder.rungs import LARGE, LENET
from headway.core.cpu_count import count_usable_cores

SIDES = (352, 480)
Pace = tuple[int, float]
"""(rounds, seconds of a turn)."""


def workers(loose: Path, recipe: Path, folder: Path, pace: Pace, quick: bool) -> dict[str, Found]:
    """LeNet, trained with more and fewer workers."""
    cores = count_usable_cores()
    fewer, usual = cores - 3, max(1, cores - 1)  # the slides' number, and what Headway takes of itself
    memory = ("data.cache=memory", "data.threads=null", f"batch={LARGE}")
    asked: dict[str, Command] = {_workers(1): tutorial(loose, LENET.factory)}
    for count in {0, cores, usual, *([fewer] if fewer >= 0 else [])} if not quick else {cores}:
        asked[_workers(count)] = tutorial(loose, LENET.factory, workers=count)
    if not quick:
        asked[_threads(1)] = train(recipe, "data.threads=1")
        asked[_threads(cores)] = train(recipe, f"data.threads={cores}")
        asked[f"1 worker, batch {LARGE}"] = tutorial(loose, LENET.factory, batch=LARGE)
        asked[f"in memory, batch {LARGE}"] = train(recipe, *memory)
    arms, how = _compared(asked, folder, pace)
    rounds = pace[0]
    pairs = {
        "prefetch_gain": (_workers(1), _workers(0)),
        "workers_gain": (_workers(cores), _workers(1)),
        "threads_gain": (_threads(cores), _threads(1)),
        "starved": (f"1 worker, batch {LARGE}", f"in memory, batch {LARGE}"),
    }
    found = _found(arms, pairs, f"LeNet, {how}, {cores} cores", rounds)
    if fewer < 0:
        found["workers_minus_3"] = Found(None, f"{fewer} workers of {cores} cores: a DataLoader refuses that")
    else:
        pair = {"workers_minus_3": (_workers(fewer), _workers(usual))}
        found |= _found(arms, pair, f"{fewer} and {usual} workers, {how}", rounds)
    return found


def _workers(count: int) -> str:
    return f"{count} worker{'s'[: count != 1]}"


def _threads(count: int) -> str:
    return f"Headway, {count} thread{'s'[: count != 1]}"


def alone(loose: Path, packed: Path, folder: Path, pace: Pace) -> dict[str, Found]:
    """Batches that nobody trains on, of the same images in each form."""
    asked: dict[str, Command] = {
        "DataLoader, 1 worker": tutorial(loose),
        "loose": _loader(loose),
        "packed": _loader(packed),
        "decoded": _loader(packed, {"cache": "memory"}),
    }
    arms, how = _compared(asked, folder, pace)
    pairs = {"binary_gain": ("packed", "loose"), "decoded_gain": ("decoded", "packed")}
    return _found(arms, pairs, f"files in the page cache, {how}", pace[0])


def pixels(folder: Path, pace: Pace) -> dict[str, Found]:
    """Photographs as squares of two sizes."""
    source = images(folder / "photographs")
    count = squares(source, folder / "squares", SIDES) if source else 0
    if not count:
        return {"pixels_gain": Found(None, f"no photograph of {max(SIDES)} pixels or more")}
    asked: dict[str, Command] = {}
    for side in SIDES:
        headway.pack(folder / "squares" / str(side), folder / f"{side}.packed")
        asked[f"{side} px"] = _loader(folder / f"{side}.packed")
    arms, how = _compared(asked, folder, pace)
    small, large = SIDES
    ratio = arms.ratio(f"{small} px", f"{large} px")
    if ratio is None:
        return {}
    expected = (large / small) ** 2
    scaled: Ratio = (ratio[0] / expected, ratio[1] / expected, ratio[2] / expected)
    text = f"{ratio[0]:.3g} where 1/pixels is {expected:.3g}; {count} photographs; {how}"
    return {"pixels_gain": Found(scaled, text, pace[0])}


def _loader(data: Path, how: Mapping[str, Any] | None = None) -> Command:
    """Headway's Loader alone."""
    return ours("headway", {"pack": str(data), "batch": BATCH, "threads": None, "how": how or {}, "kernel": "none"})


def _compared(asked: Mapping[str, Command], folder: Path, pace: Pace) -> tuple[Comparison, str]:
    """Lets them take turns, and shows what they did."""
    rounds, seconds = pace
    with Comparison(folder) as arms:
        for name, command in asked.items():
            arms.add(name, command)
        arms.run(rounds, seconds)
        table(rows(arms))
    return arms, f"median of {rounds} rounds of {seconds:g} s"


def _found(arms: Comparison, pairs: Mapping[str, tuple[str, str]], how: str, rounds: int) -> dict[str, Found]:
    """One over the other; what has an arm that was not asked for is left out."""
    ratios = {name: arms.ratio(one, other) for name, (one, other) in pairs.items()}
    return {name: Found(ratio, how, rounds) for name, ratio in ratios.items() if ratio is not None}
