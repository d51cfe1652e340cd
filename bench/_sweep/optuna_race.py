"""`headway sweep` against Optuna over a plain PyTorch loop, at equal core seconds, on JPEG files.

Both search learning rate, momentum and weight decay of SGD for one network, with trainings of nine epochs of 1,920
images, cosine schedule, random crop and flip, an evaluation after each epoch, one thread of torch, two cores, no cache
of decoded images. No labelled set of whole photographs is at hand that is large enough: the images are CIFAR-10,
enlarged to 256 pixels and saved as JPEG of quality 90, 8 kB each. OpenCV decodes one in 0.37 ms, and a photograph of
ImageNet in 1.6 ms, so decoding is cheaper here than it usually is.

headway   the command line, halving with rungs at 1, 3 and 9 epochs, 2 slots; no new seeds of the winner. The images are
          packed (seekable) before, once: the table has its core seconds.
optuna    bench/_peers/optuna_study.py: TPE with SuccessiveHalvingPruner, DataLoader with persistent worker, OpenCV. It
          runs in .venv-peers until it has taken the core seconds of Headway's sweep with the same seed.

Core seconds are those of all processes from their start to their end, imports and the measurement before the sweep
included. Best accuracy: the weights with the best accuracy on 500 images of validation, tested on 2,500 others, after
the clock has stopped. Epochs count once they are trained and evaluated.

Each finished pair is kept in bench/results/optuna.jsonl, and a later call does the missing ones; a pair takes four
minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image

from bench._accuracy import cifar
from bench._accuracy.results import FOLDER, Results, commit, digest, made_by
from bench._arms import PEERS_PYTHON, ROOT
from bench._common import Claim, count_children_s, median, table
from headway.core.recipe import read_recipe
from headway.core.statistics import compute_interval
from headway.data.pack import pack
from headway.setup.recipe import TrainRecipe
from headway.sweep.costs import measure_costs
from headway.sweep.journal import read_journal
from headway.training import runs

SEEDS = range(1, 6)
"""The pruner was chosen with seed 100: halving, Hyperband and the median rule found the same best network in 55 core
seconds, and halving made most trials (7, 4, 4) and epochs (32, 29, 28)."""
SIDE, PIXELS, QUALITY, BATCH, EPOCHS, BUDGET = 256, 32, 90, 64, 9, 6
SCALE = (0.35, 1.0)
"""Share of the image in a crop."""
PARTS = {"train": ("train", 0, 192), "val": ("train", 192, 242), "test": ("test", 0, 250)}
"""Folder of CIFAR-10, first and last image of each class. 1,920 images are 30 whole batches."""
NETWORK, WIDTH = "plain", 24
STUDY = {"pruner": "halving", "sampler": "tpe"}
SPACE: dict[str, Any] = {
    "parameters": {
        "optimizer.lr": {"log": [0.001, 1.0]},
        "optimizer.momentum": {"linear": [0.5, 0.98]},
        "optimizer.weight_decay": {"log": [1e-6, 0.01]},
    }
}
"""That of the study: `SPACE` in bench/_peers/optuna_study.py."""
SETTINGS = digest([SIDE, PIXELS, QUALITY, BATCH, EPOCHS, BUDGET, SCALE, PARTS, NETWORK, WIDTH, STUDY, SPACE])


def write_images(folder: Path, parts: Mapping[str, tuple[str, int, int]] = PARTS, side: int = SIDE) -> None:
    """Writes the images as JPEG files into folders of their classes."""
    for name, (which, first, last) in parts.items():
        for kind in sorted((cifar.find_source() / which).iterdir()):
            target = folder / name / kind.name
            target.mkdir(parents=True)
            for file in sorted(kind.iterdir())[first:last]:
                with Image.open(file) as image:
                    large = image.convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
                large.save(target / file.name, quality=QUALITY)


def pack_images(folder: Path) -> float:
    """Packs the images; returns core seconds."""
    began = time.process_time()
    for name in PARTS:
        pack(folder / "images" / name, folder / "packed" / name, mode="seekable", threads=1)
    return time.process_time() - began


def build_recipe(folder: Path, seed: int, epochs: float) -> dict[str, Any]:
    """Builds the recipe that the trials share."""
    packed = folder / "packed"
    return {
        "data": {
            "train": f"{packed}/train",
            "eval": f"{packed}/val",
            "size": PIXELS,
            "crop": {"name": "random", "scale": list(SCALE)},
            "threads": 1,
            "cache": "none",
        },
        "augment": {"flip": True, "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
        "model": {"factory": f"bench._sweep.networks:{NETWORK}", "args": {"width": WIDTH}},
        "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9},
        "schedule": "cosine",
        "batch": BATCH,
        "epochs": epochs,
        "seed": seed,
        "device": "cpu",
        "precision": "fp32",
        "evaluate": {"batch": 250},
        "observe": {"on_divergence": "ignore"},
    }


def run_headway(
    folder: Path, seed: int, *, epochs: float = EPOCHS, budget: int = BUDGET, slots: int = 2
) -> dict[str, Any]:
    """Runs the sweep; returns its epochs, seconds and accuracies."""
    own = folder / f"headway-{seed}"
    own.mkdir()
    recipe, space, sweep = own / "recipe.yaml", own / "space.yaml", own / "sweep"
    recipe.write_text(yaml.safe_dump(build_recipe(folder, seed, epochs)), encoding="utf-8")
    space.write_text(yaml.safe_dump(SPACE), encoding="utf-8")
    smallest = Fraction(1, EPOCHS) if epochs == EPOCHS else Fraction(1)
    options = {"budget": budget, "smallest": smallest, "seed": seed, "seeds": 0, "slots": slots, "out": sweep}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    core_s, wall_s, _ = run_command([sys.executable, "-m", "headway", "sweep", recipe, "--space", space, *arguments])
    found = json.loads((sweep / "result.json").read_text(encoding="utf-8"))
    run, test = sweep / "trials" / str(found["winner"]["trial"]), folder / "packed/test"
    return {
        "epochs": count_epochs(sweep, epochs),
        "core_s": core_s,
        "wall_s": wall_s,
        "score": found["winner"]["score"],
        "test": runs.evaluate(run, str(test))["accuracy"],
        "trials": found["trials"],
        "predicted_s": found["predicted"] and found["predicted"]["core_s"],
    }


def count_epochs(sweep: Path, epochs: float) -> float:
    """Counts the epochs of all trials that were trained and evaluated."""
    state = read_journal(sweep)
    reached = [
        state.plan.find_bracket(trial.number).levels[rung]
        for trial in state.trials
        for rung in [max((rung for rung, score in enumerate(trial.scores) if score is not None), default=None)]
        if rung is not None
    ]
    return float(sum(reached)) * epochs


def run_optuna(folder: Path, seed: int, core_s: float, **changes: Any) -> dict[str, Any]:
    """Runs the study for so many core seconds; returns its epochs, seconds and accuracies."""
    found = ask_study({**describe_study(folder, seed), "core_s": core_s, **changes})
    return {name: value for name, value in found.items() if name != "history"}


def describe_study(folder: Path, seed: int) -> dict[str, Any]:
    """Describes the task to the peer."""
    data = {"images": str(folder / "images"), "side": PIXELS, "scale": SCALE, "batch": BATCH, "epochs": EPOCHS}
    return {**data, "network": NETWORK, "width": WIDTH, "seed": seed, **STUDY}


def ask_study(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the peer."""
    core_s, wall_s, said = run_command([PEERS_PYTHON, "-m", "bench._peers.optuna_study", json.dumps(asked)])
    return {**json.loads(said), "whole_core_s": core_s, "wall_s": wall_s}


def run_command(command: Sequence[str | Path]) -> tuple[float, float, str]:
    """Runs a command; returns core seconds of it and its children, wall seconds, and what it printed."""
    before, began = count_children_s(), time.monotonic()
    found = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, check=True, text=True)
    return count_children_s() - before, time.monotonic() - began, found.stdout


def compare_optuna(folder: Path, options: argparse.Namespace, results: Results | None = None) -> list[Claim]:
    """Runs the missing pairs, prints the table, and returns `sweep_vs_optuna` and `sweep_vs_optuna_accuracy`.

    Args:
        folder: an empty folder.
        options: `quick` makes one tiny sweep without a peer; `minutes`: no pair begins later.
        results: kept pairs; by default bench/results/optuna.jsonl.
    """
    if options.quick:
        write_images(folder / "images", {name: (which, 0, 13) for name, (which, _, _) in PARTS.items()}, 64)
        pack_images(folder)
        tiny = run_headway(folder, 0, epochs=1, budget=1, slots=1)
        print(
            f"headway: {tiny['epochs']:g} epoch in {tiny['core_s']:.1f} core s; the peer takes part in whole runs only"
        )
        return []
    results = results or Results(FOLDER / "optuna.jsonl")
    race(folder, results, getattr(options, "minutes", None))
    kept = results.where(settings=SETTINGS)
    if kept:
        table(build_rows(kept))
        table(build_part_rows(kept))
        print(f"{kept[-1]['version']}; {made_by(one['commit'] for one in kept)}\n")
    return build_claims(kept)


def race(folder: Path, results: Results, minutes: float | None) -> None:
    """Runs the missing pairs, and keeps them."""
    missing = [seed for seed in SEEDS if not results.where(seed=seed, settings=SETTINGS)]
    if not missing or minutes == 0:
        return
    if not can_ask():
        print(f"no peer: {PEERS_PYTHON} has no Optuna and OpenCV (`make peers` installs them)")
        return
    began, code = time.monotonic(), commit()
    write_images(folder / "images")
    pack_s = pack_images(folder)
    for seed in missing:
        if minutes is not None and time.monotonic() - began >= 60 * minutes:
            return
        load = os.getloadavg()[0]
        ours = run_headway(folder, seed)
        peer = run_optuna(folder, seed, ours["core_s"])
        version, parts = peer.pop("version"), time_parts(folder, seed)
        found = {"seed": seed, "headway": ours, "optuna": peer, "parts": parts, "pack_s": pack_s, "load": load}
        results.add({**found, "version": version, "settings": SETTINGS, "commit": code})
        print(f"seed {seed}: headway {describe_arm(ours)}; optuna {describe_arm(peer)}", file=sys.stderr)


def can_ask() -> bool:
    """Returns True if the peer's Python has what it needs."""
    if not PEERS_PYTHON.exists():
        return False
    command = [PEERS_PYTHON, "-c", "import cv2, optuna, psutil"]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def describe_arm(one: Mapping[str, Any]) -> str:
    """Describes the result of an arm in words."""
    return f"{one['epochs']:g} epochs in {one['core_s']:.0f} core s, accuracy {one['test']:.1%}"


def time_parts(folder: Path, seed: int) -> dict[str, float]:
    """Measures core seconds of a batch from each loader alone, and of each step on a kept batch."""
    peer = ask_study({**describe_study(folder, seed), "parts": True, "rounds": 1})
    path = folder / f"parts-{seed}.yaml"
    path.write_text(yaml.safe_dump(build_recipe(folder, seed, EPOCHS)), encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours = measure_costs(read_recipe(path, (), TrainRecipe))
    finally:
        torch.set_num_threads(threads)
    return {
        "headway_decode_s": ours.decode_s,
        "headway_step_s": ours.step_s,
        "optuna_decode_s": peer["decode_s"],
        "optuna_step_s": peer["step_s"],
    }


def compute_rate(one: Mapping[str, Any]) -> float:
    """Computes the epochs per core second of an arm."""
    return float(one["epochs"] / one["core_s"])


def build_rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Builds the table of all arms."""
    head = ("seed", "arm", "trials", "epochs", "core s", "wall s", "epochs / core s", "best in validation", "test")
    rows: list[tuple[str, ...]] = [head]
    for pair in kept:
        for name in ("headway", "optuna"):
            one = pair[name]
            cells = (str(one["trials"]), f"{one['epochs']:g}", f"{one['core_s']:.1f}", f"{one['wall_s']:.0f}")
            rates = (f"{compute_rate(one):.2f}", f"{one['score']:.1%}", f"{one['test']:.1%}")
            rows.append((str(pair["seed"]), name, *cells, *rates))
    return rows


def build_part_rows(kept: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Builds the table of where the gain comes from: medians of core milliseconds."""
    rows: list[tuple[str, ...]] = [("core ms of 64 images", "loader alone", "step alone")]
    for name in ("headway", "optuna"):
        both = (statistics.median(pair["parts"][f"{name}_{part}_s"] for pair in kept) for part in ("decode", "step"))
        rows.append((name, *(f"{1e3 * seconds:.1f}" for seconds in both)))
    return rows


def build_claims(kept: Sequence[Mapping[str, Any]]) -> list[Claim]:
    """Builds the claims, if there are two pairs or more."""
    if len(kept) < 2:
        return []
    ratios = [compute_rate(pair["headway"]) / compute_rate(pair["optuna"]) for pair in kept]
    middle, low, high = median(ratios)
    how = f"{len(kept)} seeds, 95 % [{low:.2f}, {high:.2f}]; {STUDY['sampler']}, {STUDY['pruner']}"
    gains = [100 * (pair["headway"]["test"] - pair["optuna"]["test"]) for pair in kept]
    mean, half = compute_interval(gains)
    means = [statistics.fmean(pair[name]["test"] for pair in kept) for name in ("headway", "optuna")]
    points = f"{means[0]:.1%} and {means[1]:.1%} on test images, +- {half:.1f} (95 %, {len(kept)} seeds)"
    return [
        Claim("sweep_vs_optuna", middle, "", how),
        Claim("sweep_vs_optuna_accuracy", mean, "points", points),
    ]
