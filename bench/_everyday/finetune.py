"""Fine-tuning against training from scratch, on 360 images of two classes of CIFAR-10.

A network is trained on the other eight classes, on a part of their images. Then each seed is a pair on the same 360
images, 180 of each class, and the same 2,000 test images: `recipes/finetune.yaml` from those weights, and the same
network from random numbers by `recipes/cifar10.yaml`, which was made for it, in as small batches and for twice as many
epochs. The accuracy is that of the last epoch in both arms. Without --quick each run is appended to
bench/results/finetune.jsonl.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from bench._accuracy.results import FOLDER, Results, commit, this_machine
from bench._arms import ROOT
from bench._common import Claim, table
from bench._ladder.photographs import find_source
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.core.statistics import compute_interval
from headway.data.pack import pack
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer

TWO = ("deer", "horse")
"""Classes that the first network never sees. They were chosen before any run: neither the easiest pair nor cats and
dogs, the hardest."""


@dataclass(frozen=True)
class Sizes:
    """How much is trained: by default, what a figure is quoted of."""

    pretraining: int = 2500
    held_out: int = 1000
    few: int = 180
    widths: str = "[24, 64, 64]"
    pretraining_epochs: float = 6
    epochs: float = 20
    scratch_epochs: float = 40
    seeds: int = 3


QUICK = Sizes(
    pretraining=20, held_out=10, few=18, widths="[8, 8, 8]", pretraining_epochs=1, epochs=1, scratch_epochs=1, seeds=1
)


def compare_finetuning(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Trains all of it in a folder, prints a table of all runs, and returns the claim; none if there is no CIFAR-10."""
    sizes, source = QUICK if options.quick else Sizes(), find_source()
    if source is None:
        return []
    claim, rows = _measure(source, folder, sizes, None if options.quick else Results(FOLDER / "finetune.jsonl"))
    table(rows)
    return [claim]


def _measure(source: Path, folder: Path, sizes: Sizes, results: Results | None) -> tuple[Claim, list[list[str]]]:
    names = sorted(one.name for one in (source / "train").iterdir())
    eight = [one for one in names if one not in TWO]
    others = _pack(source, folder / "eight", eight, sizes.pretraining, sizes.held_out // 10)
    two = _pack(source, folder / "two", list(TWO), sizes.few, sizes.held_out)
    shared = [f"model.args={{widths: {sizes.widths}}}", "evaluate={every_epochs: 1000, batch: 500}"]
    rows = [["network", "seed", "accuracy", "seconds"]]

    def run(kind: str, recipe: str, data: Path, seed: int, *overrides: str) -> float:
        began = time.perf_counter()
        values = [*shared, f"data.train={data}/train", f"data.eval={data}/eval", f"seed={seed}", *overrides]
        accuracy = _train(ROOT / "recipes" / recipe, values, folder / kind / str(seed))
        taken = time.perf_counter() - began
        rows.append([kind, str(seed), f"{accuracy:.4f}", f"{taken:.0f}"])
        print(f"{kind}, seed {seed}: {accuracy:.4f} in {taken:.0f} s", file=sys.stderr)
        if results is not None:
            about = {"machine": this_machine(), "commit": commit(), "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
            results.add({"arm": kind, "seed": seed, "accuracy": accuracy, "seconds": taken, **about})
        return accuracy

    # A batch of 512 in place of 1,024, as there are fewer images; the rate follows it.
    small = ["batch=512", "optimizer.lr=0.75"] if sizes.pretraining > 100 else ["batch=32", "optimizer.lr=0.047"]
    run("eight classes", "cifar10.yaml", others, 1, f"epochs={sizes.pretraining_epochs}", *small)
    weights = f"model.weights={folder / 'eight classes/1/weights.safetensors'}"
    points = []
    for seed in range(1, sizes.seeds + 1):
        tuned = run("fine-tuned", "finetune.yaml", two, seed, weights, f"epochs={sizes.epochs}")
        # The best of three rates that were tried: 0.02, 0.047 (the recipe's, in proportion to the batch) and 0.1.
        length = f"epochs={sizes.scratch_epochs}"
        scratch = run("from scratch", "cifar10.yaml", two, seed, length, "batch=32", "optimizer.lr=0.1")
        points.append(100 * (tuned - scratch))
    half = compute_interval(points)[1]
    images = f"{2 * sizes.few} images, {2 * sizes.held_out} of test"
    how = f"mean of {len(points)} pairs, 95 % interval +- {half:.1f}; {images}"
    return Claim("finetune_vs_scratch_points", statistics.fmean(points), "points", how), rows


def _pack(source: Path, folder: Path, classes: list[str], per_class: int, held_out: int) -> Path:
    """Packs the first images of some classes as pixels, training and evaluation set."""
    links = folder.with_suffix(".images")
    for part, count in (("train", per_class), ("test", held_out)):
        for name in classes:
            (links / part / name).mkdir(parents=True)
            for file in sorted((source / part / name).iterdir())[:count]:
                (links / part / name / file.name).symlink_to(file)
    pack(links, folder, mode="raw")
    return folder


def _train(recipe: Path, overrides: list[str], folder: Path) -> float:
    """Trains a recipe and returns the accuracy of its last evaluation."""
    setup = build_setup(read_recipe(recipe, overrides, TrainRecipe))
    with closing(setup.inputs), closing(Trainer(setup, RunFolder.create(folder), SilentDisplay())) as trainer:
        trainer.run()
        assert trainer.metrics is not None
        return float(trainer.metrics["accuracy"])
