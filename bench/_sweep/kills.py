"""kill -9 at random moments of a sweep, which is then continued: does it end as a sweep that nobody killed?

The sweep trains small networks on scikit-learn's digits, in two processes. A kill hits the coordinator, one of the
processes that train or decode, or all of them at once, at a moment drawn from the time that the whole sweep takes. Up
to three kills hit one sweep. Every second sweep has a feeder. At its end a sweep has to have the decisions of the first
one, which nobody killed, and the same weights of the winner and of its trainings with new seeds, bit for bit.

The order of results is that of their arrival, so decisions are compared without it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import psutil
import torch
import yaml
from safetensors.torch import load_file

from bench._arms import ROOT
from bench._common import Claim, table
from bench._sweep.halving import SPACE, build_recipe
from bench._sweep.recurrent import pack_digits
from headway.sweep import sweep

KILLS, KILLS_A_SWEEP, SLOTS = 20, 3, 2
CHANGES: dict[str, Any] = {"evaluate": {"every_epochs": 1, "batch": 450}, "checkpoint": {"every_steps": 10}}
"""Checkpoints lie within the rungs, so that a trial continues in the middle of its way."""


def compare_kills(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Kills and continues sweeps, prints what was hit, and returns `kills_survived`."""
    seed = Random().randrange(1 << 32) if options.seed is None else options.seed
    kills = 2 if options.quick else KILLS
    print(f"seed {seed}", file=sys.stderr)
    chance = Random(seed)
    recipe = build_recipe(str(pack_digits(folder, 0.5)), 1 if options.quick else 4) | CHANGES
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    began = time.monotonic()
    run(folder, "whole", feeds=False).wait()
    whole_s, expected = time.monotonic() - began, read_end(folder / "whole")
    hit, survived, failed = Counter[str](), 0, list[str]()
    number = 0
    while hit.total() < kills:
        name, feeds = f"killed-{number}", number % 2 == 1
        most = min(KILLS_A_SWEEP, kills - hit.total())
        own = kill_and_continue(folder, name, chance, feeds=feeds, most=most, whole_s=whole_s)
        is_equal = read_end(folder / name) == expected
        print(f"{name}: {', '.join(own) or 'ended before'}: {'equal' if is_equal else 'DIFFERS'}", file=sys.stderr)
        hit.update(own)
        if is_equal:
            survived += len(own)
            shutil.rmtree(folder / name)
        else:
            failed.append(name)
            shutil.copytree(folder / name, Path(f"{name}-of-seed-{seed}"))
        number += 1
    table([("killed", "times"), *((what, str(count)) for what, count in sorted(hit.items()))])
    how = f"of {hit.total()} kills at random moments of {number} sweeps, seed {seed}"
    return [Claim("kills_survived", survived / hit.total(), "", how + "".join(f"; {name} differs" for name in failed))]


def run(folder: Path, name: str, *, feeds: bool) -> subprocess.Popen[bytes]:
    """Starts or continues a sweep in a process of its own."""
    with open(folder / f"{name}.log", "ab") as log:
        program = [sys.executable, "-m", "bench._sweep.kills", str(folder), name, *["feeds"] * feeds]
        return subprocess.Popen(program, cwd=ROOT, stdout=log, stderr=log)


def kill_and_continue(folder: Path, name: str, chance: Random, *, feeds: bool, most: int, whole_s: float) -> list[str]:
    """Runs a sweep to its end, and kills parts of it on the way; returns what was hit."""
    own = list[str]()
    process = run(folder, name, feeds=feeds)
    while len(own) < most:
        try:
            process.wait(chance.uniform(0, whole_s))
            break
        except subprocess.TimeoutExpired:
            pass
        children = list_children(process.pid)
        part = chance.choice(["coordinator", "child", "all"])
        # A trial may lose its process twice; the third time it counts as its own fault, which is a decision.
        if part == "child" and (not children or own.count("worker") == 2):
            part = "coordinator"
        one = chance.choice(children) if part == "child" else None
        for victim in [*children] if part == "all" else [one] if one else []:
            with suppress(psutil.NoSuchProcess):
                victim.process.kill()
        own.append(one.what if one else part)
        if part != "child":
            process.kill()
            process.wait()
            process = run(folder, name, feeds=feeds)
    if process.wait() != 0:
        sys.stderr.write((folder / f"{name}.log").read_text())
    return own


@dataclass(frozen=True)
class Child:
    """A process of a sweep: a worker or a feeder."""

    what: str
    process: psutil.Process


def list_children(coordinator: int) -> list[Child]:
    """Lists the processes that train and decode."""
    found = list[Child]()
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(coordinator).children():
            # One that has just ended has no command line.
            with suppress(psutil.Error):
                words = [word for word in child.cmdline() if word.startswith("headway.sweep.")]
                found += [Child(word.rpartition(".")[2], child) for word in words]
    return found


def read_end(place: Path) -> Any:
    """Returns the decisions of a sweep, and the weights of its best networks by run; nothing if it did not end."""
    if not (place / "result.json").exists():
        return None
    result = json.loads((place / "result.json").read_text())
    rows = [json.loads(line) for line in (place / "decisions.jsonl").read_text().splitlines()]
    decisions = sorted(json.dumps({key: value for key, value in row.items() if key != "crc32"}) for row in rows)
    runs = [place / "trials" / str(result["winner"]["trial"]), *sorted((place / "retrained").iterdir())]
    weights = {
        f"{one.parent.name}/{one.name}/{name}": value.contiguous().view(torch.uint8).numpy().tobytes()
        for one in runs
        for name, value in load_file(one / "weights.safetensors").items()
    }
    return decisions, weights, result["retrained"], result["winner"]["score"]


def main(folder: Path, name: str, feeds: str = "") -> None:
    """Starts a sweep, or continues it."""
    place = folder / name
    choose = sweep.predict_sweep if not feeds else force_feeding
    with patch.object(sweep, "choose_feeding", choose):
        if (place / "sweep.yaml").exists():
            sweep.resume_sweep(place)
            return
        options = sweep.SweepOptions(budget=Fraction(3), smallest=Fraction(1, 9), slots=SLOTS, seeds=1)
        sweep.run_sweep(folder / "recipe.yaml", (), folder / "space.yaml", options, place)


def force_feeding(*arguments: Any, **options: Any) -> Any:
    """Predicts a sweep with a feeder, whether it pays or not."""
    return replace(sweep.predict_sweep(*arguments, **options), feeds=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
