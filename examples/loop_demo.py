"""Runs a loop on scikit-learn's digits: train, mine, labels by POST, a new version, train again, gate, export.

It writes everything into the folder DEST: images, a store, a recipe, LOOP.yaml, the loop, and what the commands say.
A thread plays the labeller: it waits for picks, and sends their labels to `headway serve-data`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from headway.lifecycle import Client

LABELLED, HELD_OUT = 60, 500
"""Digits that are labelled at the beginning, and those of the evaluation split. All others are the pool."""

RECIPE = """\
# A small convolutional network on digits of 8 x 8 pixels.
name: digits
seed: 1
data: {threads: 1}
model: {factory: "headway.model:small_net", args: {width: 16}}
optimizer: {name: adam, lr: 0.005}
batch: 20
epochs: 40
precision: fp32
evaluate: {every_epochs: 10, batch: 500}
checkpoint: {every_epochs: 10}
log_every_steps: 50
"""

LOOP = """\
# Two rounds of 60 labels; three networks choose the images.
name: digits
data: store:store//digits
recipe: recipe.yaml
members: 3
rounds: 2
mine: {strategy: margin, count: 60}
labels: {poll_s: 0.2}
gate: {drop: 1.0}
export: {to: [onnx]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dest", type=Path, metavar="DEST", help="the folder to write: new, or empty")
    parser.add_argument("--quick", action="store_true", help="one small network and one round, to see that it works")
    options = parser.parse_args()
    dest: Path = options.dest
    if dest.exists() and (not dest.is_dir() or any(dest.iterdir())):
        parser.error(f"{dest} exists and is not an empty folder. Name another one, or remove it.")
    began = time.monotonic()
    truth = write_images(dest)
    recipe, loop = RECIPE, LOOP
    if options.quick:
        recipe = recipe.replace("epochs: 40", "epochs: 2")
        loop = loop.replace("members: 3", "members: 1").replace("rounds: 2", "rounds: 1")
        loop = loop.replace("{to: [onnx]}", "null").replace("drop: 1.0", "drop: 100")
    (dest / "recipe.yaml").write_text(recipe)
    (dest / "loop.yaml").write_text(loop)
    run(dest, "dataset create digits --store store --splits train=0.8,eval=0.2 --classes 0,1,2,3,4,5,6,7,8,9 --by anna")
    run(dest, "dataset add digits labelled --store store --split train --by anna")
    run(dest, "dataset add digits eval --store store --split eval --by anna")
    run(dest, "dataset add digits pool --store store --unlabelled --by anna")
    show("serve-data store --bind 127.0.0.1:0 --json")
    server = start(dest, "serve-data", "store", "--bind", "127.0.0.1:0", "--json")
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        print(f"Serving the store at {url}.", flush=True)
        threading.Thread(target=label, args=(dest / "loops/digits", truth, url), daemon=True).start()
        run(dest, "loop loop.yaml")
    finally:
        server.terminate()
        server.wait()
    run(dest, f"lineage loops/digits/rounds/{1 if options.quick else 2}/members/1/weights.safetensors")
    print(f"All of it took {time.monotonic() - began:.0f} s. Page: {dest / 'loops/digits/loop.html'}")


def write_images(dest: Path) -> dict[str, str]:
    """Writes labelled/CLASS/NAME, eval/CLASS/NAME and pool/NAME. Returns the true label of each image of the pool."""
    digits, truth = load_digits(), dict[str, str]()
    order = np.random.default_rng(0).permutation(len(digits.target)).tolist()
    for place, number in enumerate(order):
        part = "labelled" if place < LABELLED else "eval" if place < LABELLED + HELD_OUT else "pool"
        label, name = str(digits.target[number]), f"{number:04d}.png"
        folder = dest / part / ("" if part == "pool" else label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(digits.images[number] * (255 / 16)).astype(np.uint8)).save(folder / name)
        if part == "pool":
            truth[name] = label
    return truth


def label(loop: Path, truth: dict[str, str], url: str) -> None:
    """Sends the labels of each round as soon as its picks are there."""
    client, done = Client(url), set[Path]()
    while True:
        for path in sorted(set(loop.glob("rounds/*/picks.json")) - done):
            picks = json.loads(path.read_text())["picks"]
            changes = [
                {"op": "label", "sha256": pick["sha256"], "label": truth[Path(pick["name"]).name], "by": "carla"}
                for pick in picks
            ]
            answer = client.change("digits", changes, if_match=client.describe("digits")["version"])
            print(f"POST /datasets/digits: {answer['relabelled']} labels, version {answer['number']}.", flush=True)
            done.add(path)
        time.sleep(0.1)


def run(dest: Path, arguments: str) -> None:
    """Runs a command of Headway in the folder, and shows it."""
    show(arguments)
    subprocess.run([sys.executable, "-m", "headway", *shlex.split(arguments)], cwd=dest, check=True)


def show(arguments: str) -> None:
    print(f"\n$ headway {arguments}", flush=True)


def start(dest: Path, *arguments: str) -> subprocess.Popen[str]:
    """Starts a command whose output is read."""
    command = [sys.executable, "-m", "headway", *arguments]
    return subprocess.Popen(command, cwd=dest, stdout=subprocess.PIPE, text=True, env=os.environ)


if __name__ == "__main__":
    main()
