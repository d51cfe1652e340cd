"""What Headway's own code gives beside the decks' rules: schedules, split images, counts."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
from pydantic import BaseModel

from bench._decks.figure import Ours
from headway.core.rows import Window, divide
from headway.observe.activations import PERCENTILES
from headway.optim.schedule import Schedule, read_schedule
from headway.report.step_anatomy import NETWORK_PARTS
from headway.setup.recipe import TrainRecipe

# The decks' layer, kernel and stride.
LAYER, GRID, KERNEL, STRIDE = 128, 2, 3, 1
# Clocks of the input, those of the doctor; the other parts of a step have theirs by `observe.layer_times`.
INPUT_CLOCKS = ("storage", "decode", "augment", "wait", "copy")
MILESTONES = (250, 750, 900)


def find_split(what: str) -> Ours:
    """Finds a size of the decks' layer as `parallel: spatial` divides it."""
    window = Window(KERNEL, STRIDE, padding=KERNEL // 2)
    first, second = divide(LAYER, GRID)
    need = window.find_need(first, LAYER)
    found = {
        "layer": first.length + second.length,
        "parts": GRID**2,
        "chunk": first.length,
        "kernel": KERNEL,
        "stride": STRIDE,
        "halo": need.rows.stop - first.stop,
        # At the border of the map padding stands in for the neighbour.
        "padded": need.before + need.rows.length + need.after,
    }
    return Ours("counted", float(found[what]), "`parallel: spatial`, 2 x 2")


@cache
def _build_schedule(name: str) -> Schedule:
    options: dict[str, dict[str, Any]] = {
        "factor": {"name": "step", "every_epochs": 250, "gamma": 0.5},
        "multi": {"name": "multi_step", "milestones_epochs": list(MILESTONES), "gamma": 0.5},
        "warmup": {"name": "constant", "warmup_epochs": 5, "warmup_start": 0.125},
    }
    # An epoch of one sample: positions count steps.
    return Schedule(read_schedule(**options[name]), total=1000, epoch=1)


def find_schedule(asked: str) -> Ours:
    """Finds a value of the decks' schedules, made by ours: factor/STEP, multi/STEP, a decay, the warm-up."""
    kind, _, place = asked.partition("/")
    if kind in ("factor", "multi"):
        return Ours(
            "counted", _build_schedule(kind)(int(place)), f"schedule `{'step' if kind == 'factor' else 'multi_step'}`"
        )
    if kind == "warmup":
        ends = next(epoch for epoch in range(1000) if _build_schedule("warmup")(epoch) == 1)
        return Ours("counted", float(ends), "`warmup_epochs: 5`, by a constant increment")
    schedule = _build_schedule("factor" if kind == "factor-step" else "multi")
    decays = [step for step in range(1, 1000) if schedule(step) < schedule(step - 1)]
    if kind == "multi-factor":
        return Ours("counted", schedule(decays[0]) / schedule(decays[0] - 1), "schedule `multi_step`")
    if kind == "factor-step":
        return Ours("counted", float(decays[1] - decays[0]), "schedule `step`")
    return Ours("counted", float(decays[int(place)]), "schedule `multi_step`")


def count_memory(what: str) -> Ours:
    """Counts the bytes of the arrays of the deck's two programs, as NumPy holds them."""
    a, b = np.ones(10), np.ones(10) * 2
    if what == "eager":
        c = b * a
        d = c + 1
        return Ours("counted", float(a.nbytes + b.nbytes + c.nbytes + d.nbytes), "NumPy")
    np.multiply(a, b, out=a)
    np.add(a, 1, out=a)
    return Ours("counted", float(a.nbytes + b.nbytes), "NumPy, results written over a")


def _list_leaves(kind: Any, seen: frozenset[Any] = frozenset()) -> Iterator[tuple[Any, str]]:
    """Yields the keys of a part of a recipe and of the parts below it that are no parts themselves."""
    for name, field in kind.model_fields.items():
        parts = [one for one in _list_types(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel)]
        if not parts:
            yield kind, name
        for part in parts:
            if part not in seen:
                yield from _list_leaves(part, seen | {part})


def _list_types(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, tuple):
        for one in typing.get_args(annotation):
            yield from _list_types(one)
    else:
        yield annotation


def _count_keys() -> Ours:
    keys = {name for _, name in _list_leaves(TrainRecipe)}
    # Hundreds, so that a new key does not change the page.
    return Ours("counted", float(len(keys) // 100 * 100), "or more keys of a recipe with different names")


def _count_stages() -> Ours:
    clocks = dict.fromkeys((*INPUT_CLOCKS, *(name for name, *_ in NETWORK_PARTS)))
    return Ours("counted", float(len(clocks)), f"clocks with `observe.layer_times`: {', '.join(clocks)}")


def _find_percentile() -> Ours:
    within = [one for one in PERCENTILES if 15 <= one <= 85]
    return Ours("counted", float(within[-1]), f"`observe.activations`: {', '.join(map(str, PERCENTILES))}")


_COUNTS: Mapping[str, Callable[[], Ours]] = {
    "recipe-keys": _count_keys,
    "stages": _count_stages,
    "percentiles": _find_percentile,
}


def count_things(what: str) -> Ours:
    """Counts keys of a recipe, clocks of a step, or the percentiles of a chart."""
    return _COUNTS[what]()
