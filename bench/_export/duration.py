"""How long `headway export` of a ResNet-18 takes, with its gate over 600 images of 224 pixels.

The run is a real one: photographs are drawn, packed, and trained for a few steps, so that there is a run folder. The
clock covers the command alone, from its start as a process to its end, and its CPU seconds stand beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from bench._arms import ROOT
from bench._common import Claim, count_children_s, table

HELD_OUT, TRAINED, SIDE = 600, 64, 224


def time_export(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Trains a run, times its export, prints the table, and returns `export_seconds`."""
    held_out, trained, side = (24, 16, 64) if options.quick else (HELD_OUT, TRAINED, SIDE)
    run = train_run(folder, held_out, trained, side)
    before, began = count_children_s(), time.perf_counter()
    answer = run_headway("export", str(run), "--out", str(folder / "export"), "--json")
    seconds, cpu_s = time.perf_counter() - began, count_children_s() - before
    manifest = answer["manifest"]
    # The first check starts from the same pixels, the second one from files.
    verdict = manifest["targets"]["onnx"]["gate"]["checks"][0]
    samples, flips = str(verdict["samples"]), str(verdict["flips"])
    rows = [("images", "side", "seconds", "CPU s", "flips")]
    table([*rows, (samples, str(side), f"{seconds:.1f}", f"{cpu_s:.1f}", flips)])
    how = f"`headway export` of a ResNet-18, {side} pixels, gate over {samples} images; {cpu_s:.1f} CPU seconds"
    return [Claim("export_seconds", seconds, "s", how)]


def train_run(folder: Path, held_out: int, trained: int, side: int) -> Path:
    """Draws images, packs them, and trains a ResNet-18 for two steps; returns the run folder."""
    draws = np.random.default_rng(0)
    for part, count in (("train", trained), ("eval", held_out)):
        for number in range(count):
            place = folder / "images" / part / f"class{number % 10}"
            place.mkdir(parents=True, exist_ok=True)
            # Blocks of 16 pixels: JPEG keeps them, unlike noise, and the file is of a photograph's size.
            small = draws.integers(0, 256, (side // 16, side // 16, 3), np.uint8)
            Image.fromarray(small.repeat(16, 0).repeat(16, 1)).save(place / f"{number}.jpg", quality=90)
    run_headway("pack", str(folder / "images"), str(folder / "packed"), as_json=False)
    recipe = {
        "data": {"train": str(folder / "packed/train"), "eval": str(folder / "packed/eval"), "size": side},
        "model": {"factory": "headway.model:resnet18"},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch": 16,
        "epochs": 0.5,
        "device": "cpu",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run_headway("train", str(folder / "recipe.yaml"), "--run", str(folder / "run"), as_json=False)
    return folder / "run"


def run_headway(*arguments: str, as_json: bool = True) -> dict[str, Any]:
    """Runs the command line as a user does; returns its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "headway", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True, env={**os.environ}
    )
    answer: dict[str, Any] = json.loads(done.stdout) if as_json else {}
    return answer
