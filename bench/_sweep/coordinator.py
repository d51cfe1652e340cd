"""CPU seconds of the process that decides a sweep, beside those of the processes that train.

The sweeps are those of `halving.py`: small networks on scikit-learn's digits, whose trials cost a quarter of a second
each, so that whatever the coordinator does for a trial weighs much. Each sweep is a program of its own, as a user's.

The share counts the coordinator from its first message, which follows the look at the recipe, to its end: decisions,
journal, recipes of the trials, and the page. Trials count from the moment when their process is ready. The table also
has the share of whole processes: most of both is Python that starts and imports torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from bench._arms import ROOT
from bench._common import Claim, count_children_s, median, table
from bench._sweep.halving import SLOTS, SPACE, build_recipe
from bench._sweep.recurrent import pack_digits
from headway.core.messages import mute_messages
from headway.sweep import sweep
from headway.sweep.slots import Slot

BUDGETS, EPOCHS, ROUNDS = (4, 8), 8.0, 3
"""Budgets of 4 and 8 full trainings have 40 and 80 trials."""


def compare_coordinator(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Measures sweeps, prints the table, and returns `coordinator_cpu_share` with the smaller budget."""
    packed = str(pack_digits(folder, 0.5))
    budgets, epochs, rounds, slots = ((2,), 0.25, 1, 1) if options.quick else (BUDGETS, EPOCHS, ROUNDS, SLOTS)
    found: dict[int, list[dict[str, float]]] = {budget: [] for budget in budgets}
    for number in range(rounds):
        for budget in budgets:
            place = folder / f"{number}-{budget}"
            place.mkdir()
            (place / "recipe.yaml").write_text(yaml.safe_dump(build_recipe(packed, epochs)), encoding="utf-8")
            (place / "space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")
            program = [sys.executable, "-m", "bench._sweep.coordinator", str(place), str(budget), str(slots)]
            done = subprocess.run(program, cwd=ROOT, check=True, stdout=subprocess.PIPE)
            found[budget].append(json.loads(done.stdout))
    rows = [("trials", "trials, CPU s", "coordinator, ms", "of it the page", "ms a trial", "share", "whole processes")]
    rows += [build_row(seconds) for seconds in found.values()]
    table(rows)
    return [build_claim(found[budgets[0]])]


def run_one(folder: Path, budget: int, slots: int) -> dict[str, float]:
    """Runs a sweep in this process; returns CPU seconds of its parts."""
    stamps, page_s = list[float](), 0.0
    write_page, summarise = sweep.write_page, sweep.summarise_sweep

    def clock(function: Any, argument: Any) -> Any:
        nonlocal page_s
        began = time.process_time()
        made = function(argument)
        page_s += time.process_time() - began
        return made

    def stamp(_: logging.LogRecord) -> bool:
        stamps.append(time.process_time())
        return False

    sweep.LOG.addFilter(stamp)
    sweep.LOG.setLevel(logging.INFO)
    options = sweep.SweepOptions(budget=Fraction(budget), slots=slots)
    with (
        mute_messages(),
        note_starts() as starts,
        patch.object(sweep, "write_page", lambda summary: clock(write_page, summary)),
        patch.object(sweep, "summarise_sweep", lambda place: clock(summarise, place)),
    ):
        result = sweep.run_sweep(folder / "recipe.yaml", (), folder / "space.yaml", options, folder / "sweep")
    return {
        "trials": len(result.state.trials),
        "coordinator_s": time.process_time() - stamps[0],
        "page_s": page_s,
        "trials_s": result.core_s - sum(starts.values()),
        "process_s": time.process_time(),
        "workers_s": count_children_s(),
    }


@contextmanager
def note_starts() -> Iterator[dict[int, float]]:
    """Collects the core seconds that the process of each slot has taken when it is ready."""
    starts, note_core_s = dict[int, float](), Slot.note_core_s

    def note(slot: Slot, seconds: float) -> None:
        starts.setdefault(slot.number, seconds)
        note_core_s(slot, seconds)

    with patch.object(Slot, "note_core_s", note):
        yield starts


def build_row(found: list[dict[str, float]]) -> tuple[str, ...]:
    """Builds a line of the table: medians of all rounds."""
    middle = {name: median([one[name] for one in found])[0] for name in found[0]}
    share, whole = middle["coordinator_s"] / middle["trials_s"], middle["process_s"] / middle["workers_s"]
    own_ms = 1e3 * middle["coordinator_s"]
    cells = [f"{middle['trials']:.0f}", f"{middle['trials_s']:.1f}", f"{own_ms:.0f}", f"{1e3 * middle['page_s']:.0f}"]
    return (*cells, f"{own_ms / middle['trials']:.1f}", f"{share:.2%}", f"{whole:.0%}")


def build_claim(found: list[dict[str, float]]) -> Claim:
    """Builds the claim `coordinator_cpu_share`."""
    middle, low, high = median([one["coordinator_s"] / one["trials_s"] for one in found])
    trials_s, whole = (
        median([one["trials_s"] for one in found])[0],
        median([one["process_s"] / one["workers_s"] for one in found])[0],
    )
    how = f"{len(found)} sweeps of {found[0]['trials']} trials that take {trials_s:.1f} CPU seconds; 95 %"
    how += f" [{low:.4f}, {high:.4f}]; of whole processes, with their start, {whole:.2f}"
    return Claim("coordinator_cpu_share", middle, "", how)


if __name__ == "__main__":
    print(json.dumps(run_one(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
