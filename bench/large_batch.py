"""Large batches on CIFAR-10: the accuracy that they lose, and the settings that win it back.

All runs train one small network (bench/_accuracy/narrow.py) for the same number of epochs, through Headway's Trainer.
At batches of 2,048 and 8,192 each arm adds one thing to plain SGD: linear scaling with a warm-up, LARS, no weight decay
of biases, beta and gamma, ghost batches. SGD, NAG and LBSGD stand side by side; so do Muon and SOAP, at 256 too. Each
arm has its own sweep of the learning rate, with one seed: four values by factors of two, and more if the best one lies
at the edge. Three other seeds, fixed in bench/_accuracy/batch_arms.py, make the table. Learning rates are chosen on the
10,000 images that the table uses too, with another seed.

gap_2048              points lost from batch 256 with SGD to batch 2,048 with the best arm; target at most -2
gap_2048_alike        the same among arms with the schedule of Muon and SOAP; SGD with it has no decay of b, beta, gamma
gap_2048_same         points lost from batch 256 to 2,048 by the best arm there; target at most 1.5
gap_2048_lars         points lost from batch 256 with SGD to batch 2,048 with LARS and all settings; target at most 0.5
accuracy_8192         accuracy of the best arm at 8,192; target 0.65
recovered_8192        share of the loss by linear scaling alone at 8,192 that all settings win back; target 0.5
epochs_to_equal_N     epochs that all settings need at batch N to be as accurate as SGD at 256

--curve: steps to a fixed accuracy by batch size, 64 to 16,384 (Shallue et al. 2018, arXiv 1811.03600), of SGD, LARS,
Muon and SOAP, and a page with the three regimes: perfect scaling, diminishing returns, none.

perfect_scaling_to_NAME  the largest batch up to which twice the batch takes half the steps; SGD's has no NAME
epochs_to_60_2048        epochs to 60 % at batch 2,048 by the fastest optimizer; target at most 4.6
sgd_steps_over_NAME_8192 how many times the steps of NAME SGD needs at 8,192; printed for every batch

--noise: the gradient noise scale of SGD at 256, which predicts the batch from which more samples save few steps.

critical_batch_noise  the noise scale when 60 % are right
critical_batch_curve  the same batch by SGD's curve of --curve

--error: evaluation error against the batch, 64 to 16,384, by linear scaling with a warm-up from the best rate of SGD at
256, and no sweep at any other batch (Goyal et al. 2017, arXiv 1706.02677, figure 1). It draws
docs/images/error-by-batch.svg.

--wide: Muon and SGD with a network of fifteen times the parameters, with fewer rates and one seed.

gap_2048_wide         points lost from batch 256 with SGD to batch 2,048 with Muon
gap_2048_same_wide    the same with Muon at both batches
gap_8192_wide         points lost from batch 256 with SGD to batch 8,192 with Muon

Every evaluation has batch norm statistics of the newest 8,192 samples or so: moving averages lag behind if steps are
few. A claim is void if a best learning rate that it needs lies at the edge of its sweep.

Accuracy does not depend on the machine. So every finished run is kept in the results file, and a later call does the
missing ones; the table lists the commits of the runs. --minutes M starts no run after that time. Two runs at once with
one thread each take less time than one after the other with two: --workers sets their number, --measure-workers
measures it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench._accuracy import batch_arms, batch_curve, batch_noise, batch_wide, cifar
from bench._accuracy.batch_arms import CELLS, SEEDS, TUNING_SEED, Cell, Job
from bench._accuracy.batch_error import ErrorCurve, write_errors
from bench._accuracy.batch_table import Tables
from bench._accuracy.results import FOLDER, Results, commit
from bench._accuracy.workers import WorkerEndedError, work
from bench._common import Claim, parser, report, table
from bench._family import run_bench


def main() -> None:
    asked = parser(__doc__ or "")
    asked.add_argument("--results", type=Path, default=FOLDER / "large_batch.jsonl", metavar="FILE")
    asked.add_argument("--minutes", type=float, metavar="M", help="begin no run after so long; 0 shows what is there")
    asked.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="runs at once")
    asked.add_argument("--curve", action="store_true", help="steps to a fixed accuracy against the batch")
    asked.add_argument(
        "--optimizers",
        nargs="+",
        choices=batch_curve.NAMES,
        default=list(batch_curve.NAMES),
        metavar="NAME",
        help="of --curve",
    )
    asked.add_argument("--page", type=Path, default=Path("large-batch.html"), metavar="FILE", help="of --curve")
    asked.add_argument("--noise", action="store_true", help="the gradient noise scale beside the curve")
    asked.add_argument("--error", action="store_true", help="error against the batch by linear scaling alone")
    asked.add_argument("--wide", action="store_true", help="a network of fifteen times the parameters")
    asked.add_argument("--measure-workers", action="store_true", help="two runs at once against one with two threads")
    options = asked.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="headway-batch-") as folder:
            run(options, Path(folder))
    except WorkerEndedError as error:
        sys.exit(str(error))


def run(options: argparse.Namespace, folder: Path) -> None:
    if options.measure_workers:
        measure_workers(str(cifar.part(folder, 200, 50)), options)
        return
    if options.quick:
        quick(str(cifar.part(folder, 120, 20)), options, folder)
        return
    results = Results(options.results)
    packed = "packed" if options.minutes == 0 else str(cifar.packed())
    if options.curve:
        batch_curve.run(results, packed, options)
        return
    if options.noise:
        batch_noise.run(results, packed, options)
        return
    if options.error:
        train_missing(lambda: ErrorCurve(results.all()).list_missing(), results, packed, options)
        write_errors(results)
        report([], options, ErrorCurve(results.all()).list_rows())
        return
    if options.wide:
        batch_wide.run(results, packed, options)
        return

    train_missing(lambda: Tables(results.all()).missing(), results, packed, options)
    tell(Tables(results.all()), options)


def train_missing(missing: Callable[[], list[Job]], results: Results, packed: str, options: argparse.Namespace) -> None:
    """Makes the runs that are missing, and keeps them."""

    def done(job: Job, found: dict[str, Any]) -> None:
        results.add({**job.key(), "commit": commit(), **found})
        left = len(missing())
        say = f"{time.strftime('%H:%M')} {job.cell.batch} {job.cell.arm} lr {job.lr:g} seed {job.seed}"
        print(f"{say}: {found['accuracy']:.2%} in {found['seconds']:.0f} s; {left} runs to go", file=sys.stderr)

    if options.minutes != 0:
        work(
            missing,
            lambda job: batch_arms.recipe(job.cell, job.lr, job.seed, packed),
            done,
            workers=options.workers,
            minutes=options.minutes,
        )


def tell(tables: Tables, options: argparse.Namespace) -> None:
    """Sweeps, tables, claims, and what is missing."""
    table(tables.sweeps())
    table(tables.rows())
    print(tables.made_by() + "\n")
    table(tables.decks())
    claims, lacking = tables.claims()
    for one in lacking:
        print(one)
    missing = tables.missing()
    if missing:
        cells = sorted({(job.cell.batch, job.cell.arm) for job in missing})
        print(f"missing: {len(missing)} runs of {', '.join(f'{arm} at {batch}' for batch, arm in cells)}")
    report(claims, options)


def quick(packed: str, options: argparse.Namespace, folder: Path) -> None:
    """One short run of every arm, on 1,200 images."""
    cells = {cell.arm: cell for cell in CELLS}.values()
    results, left = Results(folder / "results.jsonl"), [Job(cell, 0.0, TUNING_SEED) for cell in cells]

    def small(job: Job) -> dict[str, Any]:
        cell = job.cell
        tree = batch_arms.recipe(cell, batch_arms.first_grid(cell)[0], SEEDS[0], packed)
        tree["epochs"] = tree["evaluate"]["every_epochs"] = tree["checkpoint"]["every_epochs"] = 2
        tree["batch"] = tree["batch"] // 8
        for part in (tree["schedule"], tree["optimizer"]):
            if "warmup_epochs" in part:
                part["warmup_epochs"] = 1
        if "ghost" in tree["model"]["batch_norm"]:
            tree["model"]["batch_norm"]["ghost"] //= 8
        return tree

    def done(job: Job, found: dict[str, Any]) -> None:
        results.add({"cell": [job.cell.batch, job.cell.arm], **found})
        left.remove(job)

    work(lambda: list(left), small, done, workers=options.workers, minutes=None)
    rows = [("batch", "arm", "steps", "accuracy, two epochs of 1,200 images, an eighth of the batch")]
    for one in results.all():
        batch, arm = one["cell"]
        rows.append((str(batch), batch_arms.NAMES[arm], str(one["steps"]), f"{one['accuracy']:.1%}"))
    report([], options, rows)


def measure_workers(packed: str, options: argparse.Namespace) -> None:
    """Images a second of as many runs at once as there are cores, each with one thread, over one run with all."""
    cores, ratios = len(os.sched_getaffinity(0)), []
    tree = batch_arms.recipe(Cell(batch_arms.SMALL, "sgd"), 0.1, 0, packed)
    tree["epochs"] = tree["evaluate"]["every_epochs"] = tree["checkpoint"]["every_epochs"] = 4
    for _ in range(3):
        taken = {}
        for workers in (1, cores):
            left, seconds = list(range(2 * cores)), []
            work(
                lambda left=left: list(left),  # type: ignore[misc]
                lambda job: {**tree, "seed": job},
                lambda job, found, left=left, seconds=seconds: (left.remove(job), seconds.append(found["seconds"]))[0],  # type: ignore[misc]
                workers=workers,
                minutes=None,
            )
            taken[workers] = sum(seconds) / workers
        ratios.append(taken[1] / taken[cores])
    how = f"median of {len(ratios)} rounds of {2 * cores} runs each, from {min(ratios):.2f} to {max(ratios):.2f}"
    report(
        [Claim("workers_gain", sorted(ratios)[1], "", f"{how}; {cores} at once over one with {cores} threads")], options
    )


if __name__ == "__main__":
    run_bench(main)
