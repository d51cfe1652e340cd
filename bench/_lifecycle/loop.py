"""`make loop-demo`: a loop on digits with labels by POST, from its first command to the lineage of its network."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench._common import Claim, count_children_s, table

ROOT = Path(__file__).resolve().parents[2]


def measure_loop(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Runs the demo; returns `loop_demo_s`, `loop_demo_cpu_s`, `loop_gain_points` and `loop_lineage`."""
    dest = folder / "loop-demo"
    command = [sys.executable, str(ROOT / "examples/loop_demo.py"), str(dest), *["--quick"] * options.quick]
    rounds, labels = (1, 60) if options.quick else (2, 120)
    began, cpu = time.monotonic(), count_children_s()
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    seconds, cpu_s = time.monotonic() - began, count_children_s() - cpu
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    stages = {
        (stage["round"], stage["name"]): stage["facts"]
        for stage in json.loads((dest / "loops/digits/journal.json").read_text())["stages"]
    }
    gain = stages[rounds, "gate"]["gain_in_all"]
    names = names_labels(dest, rounds, stages[rounds, "label"]["version"], labels)
    accuracies = [stages[number, "train"]["accuracy"] for number in range(rounds + 1)]
    rows = [("round", "images", "accuracy of the members, %")]
    rows += [
        (str(number), str(stages[number, "train"]["images"]), ", ".join(f"{100 * one:.1f}" for one in found))
        for number, found in enumerate(accuracies)
    ]
    table(rows)
    how = "digits, 3 members, 2 rounds of 60 labels by POST, 2 exports"
    if options.quick:
        how = "digits, 1 member, 1 round of 60 labels by POST, no export"
    interval = f"{100 * gain['low']:+.1f} to {100 * gain['high']:+.1f}"
    return [
        Claim("loop_demo_s", seconds, "s", how),
        Claim("loop_demo_cpu_s", cpu_s, "s", how),
        Claim("loop_gain_points", 100 * gain["mean"], "points", f"accuracy over round 0, 500 digits; 95 % {interval}"),
        Claim("loop_lineage", float(names), "", "lineage of the weights names version, labels and who set them"),
    ]


def names_labels(dest: Path, number: int, version: str, labels: int) -> bool:
    """Tells whether the lineage of a round's network names its version and who set how many labels."""
    network = f"loops/digits/rounds/{number}/members/1/weights.safetensors"
    command = [sys.executable, "-m", "headway", "lineage", network, "--json"]
    done = subprocess.run(command, cwd=dest, capture_output=True, text=True, check=True)
    origins: list[dict[str, Any]] = json.loads(done.stdout)["origins"]
    trained = next(one for one in origins[0]["data"] if one["role"] == "train")
    setters = {one["by"]: one["labels"] for one in trained["labels"]}
    return bool(trained["version"] == version and setters == {"anna": 560, "carla": labels})
