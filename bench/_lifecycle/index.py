"""The index of runs: 1,000 run folders with a million values, built, listed, read and built again.

The folders are as training writes them: a resolved recipe, a provenance, a summary, and 100 records of ten numbers.
Time is CPU time of this process; the files are in the page cache.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time

import yaml

from bench._common import Claim, table
from headway.core.recipe import flatten
from headway.core.recipe_yaml import RecipeDumper
from headway.core.run_folder import collect_provenance
from headway.lifecycle.experiments.listing import choose_columns
from headway.lifecycle.experiments.query import Selection, read_series, select_runs
from headway.lifecycle.experiments.run_index import open_index
from headway.lifecycle.experiments.scan import find_index, scan_folders
from headway.setup.recipe import TrainRecipe

SERIES = 100


def measure_index(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Builds the index of many runs, asks it, deletes it, and builds it again."""
    runs, records, rounds = (60, 20, 5) if options.quick else (1000, 100, 21)
    root = folder / "runs"
    write_runs(root, runs, records)
    size = f"{runs:,} runs with {runs * records * len(VALUES):,} values"
    path = find_index([root])
    began = perf_counter()
    built_s, first, listed = _build(root)
    wall_s = perf_counter() - began
    with open_index(path) as index:
        index.update(scan_folders([root]))
        columns = tuple(choose_columns(index))
        # As `headway runs` lists them. Without columns it is no list that a user sees.
        list_ms = _time_ms(lambda: select_runs(index, Selection(columns=columns)), rounds)
        bare_ms = _time_ms(lambda: select_runs(index, Selection()), rounds)
        numbers = [run.number for run in select_runs(index, Selection(limit=SERIES))]
        series_ms = _time_ms(lambda: read_series(index, numbers, "train/loss"), rounds)
        unchanged_ms = _time_ms(lambda: index.update(scan_folders([root])), 5)
        # One live run among the others.
        with (root / "run-0000/metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "train", "step": 10**6, "position": 0, "loss": 0.0}) + "\n")
        changed_s = process_time()
        result = index.update(scan_folders([root]))
        changed_ms = (process_time() - changed_s) * 1e3
        assert (result.read, result.runs) == (1, runs)
        first, listed = (
            index.compute_digest(),
            [run.to_json() for run in select_runs(index, Selection(columns=columns))],
        )
    size_mb = path.stat().st_size / 1e6
    path.unlink()
    again_s, second, relisted = _build(root, columns)
    table(
        [
            ("what", "CPU"),
            ("built", f"{built_s:.2f} s"),
            ("built again", f"{again_s:.2f} s"),
            ("list of all runs, usual columns", f"{list_ms:.2f} ms"),
            ("the same without columns", f"{bare_ms:.2f} ms"),
            (f"{min(SERIES, runs)} series", f"{series_ms:.2f} ms"),
            ("update, nothing changed", f"{unchanged_ms:.1f} ms"),
            ("update, one run changed", f"{changed_ms:.1f} ms"),
            ("size of the index", f"{size_mb:.1f} MB"),
        ]
    )
    how = f"{size}, CPU time of one process, files in the page cache"
    return [
        Claim(
            "index_rebuild_s",
            max(built_s, again_s),
            "s",
            f"{how}; the slower of two, the first {wall_s:.1f} s by the clock",
        ),
        Claim(
            "index_list_ms",
            list_ms,
            "ms",
            f"all runs: path, name, state, start and the {len(columns)} usual columns, median of {rounds}; "
            f"{bare_ms:.1f} ms without columns",
        ),
        Claim("index_series_ms", series_ms, "ms", f"{min(SERIES, runs)} series of {records} steps, median of {rounds}"),
        Claim("index_unchanged_ms", unchanged_ms, "ms", f"an update of {size} that finds nothing new, median of 5"),
        Claim(
            "index_identical",
            float(first == second and listed == relisted),
            "",
            "content and list after deletion and rebuild: 1 if both are equal",
        ),
    ]


VALUES = ("epoch", "loss", "accuracy", "lr", "batch", "images_s", "wait_share", "seconds", "grad_norm", "loss_scale")


def write_runs(root: Path, runs: int, records: int) -> None:
    """Writes run folders that no training has made."""
    draw = Random(0)
    given = {"data": {"train": "digits.packed/train", "eval": "digits.packed/eval"}, "epochs": 10}
    given |= {"model": {"factory": "headway.model:small_net"}, "optimizer": {"name": "sgd", "lr": 0.1}, "batch": 32}
    tree = TrainRecipe.model_validate(given).model_dump(mode="json")
    about = collect_provenance({key: "default" for key, _ in flatten(tree)}, Path.cwd(), fingerprint="0" * 64)
    # Dumped once: YAML takes longer to write than the index to read.
    tree["name"], tree["optimizer"]["lr"] = "NAME", "RATE"
    recipe = yaml.dump(tree, Dumper=RecipeDumper, sort_keys=False)
    for number in range(runs):
        run = root / f"run-{number:04}"
        for part in ("panels", "checkpoints"):
            (run / part).mkdir(parents=True)
        rate = 10 ** draw.uniform(-4, 0)
        accuracy = 0.95 - 0.1 * abs(2 + draw.gauss(0, 0.2)) + 0.05 * draw.random()
        (run / "recipe.yaml").write_text(recipe.replace("NAME", run.name).replace("RATE", f"{rate:.8f}"))
        (run / "provenance.json").write_text(
            json.dumps(about | {"started": f"2026-01-{1 + number % 28:02}T12:00:00+0000"})
        )
        (run / "summary.json").write_text(
            json.dumps(
                {
                    "finished": True,
                    "step": records,
                    "accuracy": accuracy,
                    "loss": 1 - accuracy,
                    "seconds": 60.0,
                    "images_s": 900.0,
                }
            )
        )
        lines = []
        for step in range(1, records + 1):
            numbers = {name: round(draw.random(), 6) for name in VALUES}
            lines.append(json.dumps({"kind": "train", "step": step, "position": step * 32, **numbers}))
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def _build(root: Path, columns: tuple[str, ...] = ()) -> tuple[float, str, list[dict[str, object]]]:
    """Returns the CPU seconds of a build, the digest of the index, and the list."""
    began = process_time()
    with open_index(find_index([root])) as index:
        index.update(scan_folders([root]))
        seconds = process_time() - began
        return (
            seconds,
            index.compute_digest(),
            [run.to_json() for run in select_runs(index, Selection(columns=columns))],
        )


def _time_ms(work: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = process_time()
        work()
        taken.append((process_time() - began) * 1e3)
    return median(taken)
