"""The tuning ladder: from a tutorial's loop to all of Headway's settings, one measured change per rung.

The lowest rung is PyTorch alone (bench/_ladder/tutorial.py): loose JPEG files of CIFAR-10, opened by Pillow in one
worker of a DataLoader, batches of 64, fp32, eager. The next rungs are `headway train`, and a rung keeps all changes
below it. If the device has no units for bf16, that rung says so and keeps fp32; if compilation makes the run slower,
the last rung is without it.

ladder_total         images/s of the last rung over the lowest one's, a network as small as LeNet (0.65 million
                     multiply-adds an image)
ladder_total_cifar   the same with the network of recipes/cifar10.yaml
tune_gain            images/s of the recipe that `headway tune --allow precision,batch` writes for the tutorial's loop,
                     over that loop as a recipe; both measured here, not by tune
tune_gain_exact      the same without changes of the mathematics

Then a table of the claims that two sets of slides make about the same steps (bench/_ladder/decks.py), beside the ratio
measured here. A claim is reproduced if the whole interval of the ratio is within it, refuted if it is outside, and open
otherwise; fewer than six rounds conclude nothing. SAID has the claim names of these ratios.

Each arm is a process of its own. They take turns, and the others are stopped meanwhile. Ratios are computed within a
round; a claim is the median over rounds. Steps on random images take turns in one process. Files are in the page cache:
the speed of the disk is not measured.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

import headway
from bench._arms import Comparison
from bench._common import Claim, parser, report, table
from bench._family import run_bench
from bench._ladder import decks, feeding, rungs, steps, tuned
from bench._ladder.lenet import MOST_MULTIPLY_ADDS, lenet
from bench._ladder.photographs import cifar
from headway.core.messages import show_messages
from headway.model.model_size import measure_model_size
from headway.setup.precision import list_candidates

PARTS = ("ladder", "tune", "decks")
PACE, QUICK_PACE = (7, 4.0), (2, 0.3)
QUICK_PER_CLASS = 110


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--only", choices=PARTS, help="one part of it (default: all; --quick: the ladder)")
    options = asked.parse_args()
    show_messages()
    parts = (options.only,) if options.only else PARTS[:1] if options.quick else PARTS
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as name:
        report(measure(Path(name), parts, options), options)


def measure(folder: Path, parts: tuple[str, ...], options: argparse.Namespace) -> list[Claim]:
    """The claims of these parts; their tables are printed."""
    counted = measure_model_size(lenet(), torch.zeros(1, 3, 32, 32))
    assert counted.multiply_adds is not None
    assert counted.multiply_adds <= MOST_MULTIPLY_ADDS
    print(f"LeNet: {counted.describe()} an image")
    loose = cifar(folder / "loose", QUICK_PER_CLASS if options.quick else None)
    if loose is None:
        return []
    headway.open(loose).close()  # scanned here, once for all arms
    packed = folder / "packed"
    headway.pack(loose, packed)
    pace = QUICK_PACE if options.quick else PACE
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    networks = (rungs.LENET,) if options.quick else (rungs.LENET, rungs.CIFAR_NET)
    recipes = {one.name: rungs.write_recipe(folder / f"{one.name}.yaml", one, loose) for one in networks}
    recipe = recipes[rungs.LENET.name]
    claims: list[Claim] = []
    if "ladder" in parts:
        for network in networks:
            ladder = rungs.rungs(device.type, list_candidates(device), packed)
            ladder = rungs.shorten(ladder) if options.quick else ladder
            claims += climbed(network, recipes[network.name], loose, ladder, device, folder, pace)
    if "tune" in parts:
        claims += tuned.measure(recipe, rungs.LENET, loose, folder, pace)
    if "decks" in parts:
        found = feeding.workers(loose, recipe, folder, pace, options.quick)
        found |= feeding.alone(loose, packed, folder, pace)
        found |= feeding.pixels(folder, pace)
        found |= steps.measure(folder / "steps", steps.QUICK if options.quick else steps.FULL, device)
        table(decks.rows(found))
        claims += decks.claims(found)
    return claims


def climbed(
    network: rungs.Network,
    recipe: Path,
    loose: Path,
    ladder: Sequence[rungs.Rung],
    device: torch.device,
    folder: Path,
    pace: feeding.Pace,
) -> list[Claim]:
    """The ladder of a network."""
    rounds, seconds = pace
    with Comparison(folder) as arms:
        rungs.start(arms, ladder, network, recipe, loose)
        arms.run(rounds, seconds)
        print(f"\n{network.name}, median of {rounds} rounds of {seconds:g} s:")
        table(rungs.rows(arms, ladder))
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        return rungs.claims(arms, ladder, network, f"median of {rounds} rounds of {seconds:g} s; {where}")


if __name__ == "__main__":
    run_bench(main)
