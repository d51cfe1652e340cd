"""Trains recipes from standard input, one JSON line each, and prints the result of each as a JSON line.

Run it by `python -m bench._accuracy.batch_worker`. The process stays alive, so that imports happen once and the pixels
stay in the page cache.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from headway.core.errors import TrainingError
from headway.core.messages import mute_messages
from headway.core.recipe import read_recipe
from headway.core.run_folder import RunFolder
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.progress import SilentDisplay
from headway.training.trainer import Trainer


def train(tree: dict[str, Any]) -> dict[str, Any]:
    """One run by Headway's Trainer. A run whose loss or weights were not finite has `diverged`, and the accuracy of its
    last evaluation or of chance."""
    return run_recipe(tree)[0]


def run_recipe(tree: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result of a run, as `train` has it, and the records of its metrics."""
    with tempfile.TemporaryDirectory(prefix="headway-batch-") as name:
        path = Path(name) / "recipe.yaml"
        path.write_text(yaml.safe_dump(tree), encoding="utf-8")
        with mute_messages():
            setup = build_setup(read_recipe(path, (), TrainRecipe))
        run, started, diverged = RunFolder.create(Path(name) / "run"), perf_counter(), False
        with closing(setup.inputs), closing(Trainer(setup, run, SilentDisplay())) as trainer:
            try:
                trainer.run()
            except TrainingError:
                diverged = True
        lines = (run.folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        found = [(one["step"], one["accuracy"]) for one in records if one["kind"] == "evaluate"]
        chance = 1 / len(setup.target.classes)
        result = {
            "accuracy": found[-1][1] if found and not diverged else chance,
            "evaluations": found,
            "diverged": diverged,
            "steps": trainer.step,
            "seconds": perf_counter() - started,
        }
        return result, records


def main() -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else is written where answers are read
    for line in sys.stdin:
        print(json.dumps(train(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
