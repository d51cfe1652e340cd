"""The walk of docs/lifecycle.md: 300 photographs, half of them labelled, to a better network by documented commands.

The photographs are 30 of each class of CIFAR-10; 2,000 others are the evaluation split. A loop of two rounds asks for
75 labels each. The person who labels is played by this script, which writes the true classes into `picks.csv`;
everything else is a command of Headway.

    python -m bench._lifecycle.walk DEST [--pictures docs/images]
"""

from __future__ import annotations

import argparse
import csv
import json
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench._common import Claim
from bench._ladder.photographs import find_source

EACH, HELD_OUT, ROUNDS = 30, 200, 2
NAME = "things"

RECIPE = """\
name: things
augment: {flip: true, translate: 2}
model: {factory: "headway.model:small_net", args: {width: 16}}
optimizer: {name: adam, lr: 0.003}
schedule: {name: cosine, warmup_epochs: 1}
batch: 25
epochs: 24
precision: fp32
evaluate: {every_epochs: 24, batch: 500}
"""

LOOP = """\
name: things
data: store:store//things
recipe: things.yaml
members: 3
rounds: 2
mine: {count: 75}
export: null
"""

BEGIN = (
    "dataset create things --store store --by anna",
    "dataset add things labelled --split train --store store --by anna",
    "dataset add things held-out --split eval --store store --by anna",
    "dataset add things unlabelled --unlabelled --store store --by anna",
    "loop loop.yaml --once",
)
LABEL = (
    "dataset label things --list loops/things/rounds/{number}/mined/picks.csv --store store --by ben",
    "loop loop.yaml --once",
)
END = (
    "dataset log things --store store",
    "lineage loops/things/rounds/2/members/1/weights.safetensors",
)


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a walk has given: wall seconds of all commands, and the gain of the last round over the first networks."""

    seconds: float
    gain: dict[str, float]
    accepted: int


def measure_walk(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Walks; returns `walk_gain_points` and `walk_s`. None if there is no CIFAR-10, and none with --quick."""
    source = None if options.quick else find_source()
    if source is None:
        return []
    found = walk(source, folder)
    low, high = 100 * found.gain["low"], 100 * found.gain["high"]
    how = f"150 + 150 photographs of CIFAR-10, 3 members, 2,000 held out; 95 % {low:+.1f} to {high:+.1f}"
    return [
        Claim("walk_gain_points", 100 * found.gain["mean"], "points", how),
        Claim("walk_s", found.seconds, "s", "all commands"),
    ]


def walk(source: Path, folder: Path) -> Walk:
    """Does the walk in an empty folder, and prints the commands and what they say.

    Args:
        source: CIFAR-10 as train/CLASS/NAME and test/CLASS/NAME.
    """
    truth = write_photographs(source, folder)
    (folder / f"{NAME}.yaml").write_text(RECIPE)
    (folder / "loop.yaml").write_text(LOOP)
    began = time.monotonic()
    for command in BEGIN:
        run(folder, command)
    for number in range(1, ROUNDS + 1):
        fill_labels(folder / f"loops/{NAME}/rounds/{number}/mined/picks.csv", truth)
        for command in LABEL:
            run(folder, command.format(number=number))
    for command in END:
        run(folder, command)
    seconds = time.monotonic() - began
    print(f"\nAll commands took {seconds:.0f} s.")
    stages: list[dict[str, Any]] = json.loads((folder / f"loops/{NAME}/journal.json").read_text())["stages"]
    gates = [stage["facts"] for stage in stages if stage["name"] == "gate"]
    accepted = [stage["round"] for stage in stages if stage["name"] == "gate" and stage["facts"]["passed"]]
    return Walk(seconds=seconds, gain=gates[-1]["gain_in_all"], accepted=max(accepted, default=0))


def write_photographs(source: Path, folder: Path) -> dict[str, str]:
    """Writes labelled/CLASS, held-out/CLASS and unlabelled/. Returns the class of each photograph without a label."""
    truth = {}
    (folder / "unlabelled").mkdir(parents=True)
    for name in sorted(path.name for path in (source / "train").iterdir()):
        taken = sorted((source / "train" / name).iterdir())[:EACH]
        held_out = sorted((source / "test" / name).iterdir())[:HELD_OUT]
        # CIFAR-10 begins to count anew in its test set, and names in a data set are unique.
        for part, prefix, files in (("labelled", "", taken[::2]), ("held-out", "test-", held_out)):
            (folder / part / name).mkdir(parents=True)
            for file in files:
                shutil.copyfile(file, folder / part / name / f"{prefix}{file.name}")
        for file in taken[1::2]:
            # The class must not stand in the name.
            photograph = f"{len(truth):03d}-{file.stem}{file.suffix}"
            shutil.copyfile(file, folder / "unlabelled" / photograph)
            truth[photograph] = name
    return truth


def fill_labels(path: Path, truth: dict[str, str]) -> None:
    """Sets the column `label`, as a person does."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(row | {"label": truth[row["name"]]} for row in rows)


def run(folder: Path, command: str) -> None:
    """Runs a command of Headway, and shows it with what it says."""
    print(f"\n$ headway {command}", flush=True)
    subprocess.run([sys.executable, "-m", "headway", *shlex.split(command)], cwd=folder, check=True)


def take_picture(page: Path, picture: Path, size: tuple[int, int] = (1280, 1400)) -> None:
    """Writes a PNG of a page by a headless browser."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if browser is None:
        raise SystemExit("pictures need chromium or Google Chrome")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=5000"]
    options += [f"--window-size={size[0]},{size[1]}", f"--screenshot={picture.resolve()}"]
    subprocess.run([browser, *options, page.resolve().as_uri()], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dest", type=Path, metavar="DEST", help="an empty folder, or one to make")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write loop.png and picks.png there")
    options = parser.parse_args()
    source = find_source()
    if source is None:
        raise SystemExit(1)
    options.dest.mkdir(parents=True, exist_ok=True)
    print(walk(source, options.dest))
    if options.pictures is not None:
        loop = options.dest / f"loops/{NAME}"
        take_picture(loop / "loop.html", options.pictures / "loop.png")
        take_picture(loop / "rounds/1/mined/mine.html", options.pictures / "picks.png")


if __name__ == "__main__":
    main()
