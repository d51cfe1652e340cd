"""Folders of sweeps that no training has made: a journal as the coordinator writes it, and run folders with clocks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests._support import write_recipe

from headway.core.recipe import read_recipe
from headway.core.recipe_override import collect_given_values
from headway.setup.recipe import TrainRecipe
from headway.sweep.budget import Method
from headway.sweep.halving import decide
from headway.sweep.journal import open_journal
from headway.sweep.population import perturb_values
from headway.sweep.records import Record, Values, build_result
from headway.sweep.space import Space
from headway.sweep.space_recipe import SpaceRecipe
from headway.sweep.state import State, Task, fold, list_tasks
from headway.sweep.sweep import SweepOptions, build_plan
from headway.sweep.sweep_folder import SweepFolder, SweepRecipe

# A parameter of each kind, and one that not every trial has.
PARAMETERS: dict[str, Any] = {
    "optimizer.lr": {"log": [0.0001, 1.0]},
    "optimizer.weight_decay": {"log": [1e-6, 0.01]},
    "optimizer.momentum": {"linear": [0.5, 0.99], "when": {"optimizer.name": "sgd"}},
    "optimizer.name": {"choice": ["sgd", "adamw", "lars"]},
    "model.args.width": {"log_integer": [4, 256]},
    "model.args.depth": {"integer": [1, 6]},
    "model.args.norm": {"choice": [None, True, "group", [1, 2], "</script><b>bold</b>"]},
    "schedule.warmup_epochs": {"linear": [0.0, 5.0]},
}


@dataclass(frozen=True)
class Draws:
    """The values of a space, as the coordinator draws them."""

    settings: SweepRecipe

    def draw(self, trial: int) -> Values:
        return Space(self.settings.space).draw(self.settings.seed, trial)

    def perturb(self, values: Values, trial: int, rung: int) -> Values:
        ranges = {key: one.bounds for key, one in self.settings.space.parameters.items() if one.choice is None}
        return perturb_values(values, ranges, self.settings.seed, trial, rung)


def score_by_rate(task: Task) -> float:
    """Returns a score that the learning rate and the length decide, with noise; rates near 1 diverge."""
    rate = math.log10(task.trial.values["optimizer.lr"])
    if rate > -0.1:
        return math.nan
    noise = Random(f"{task.trial.number}/{task.rung}").gauss(0, 0.01)
    return 1 - 0.1 * abs(rate + 2) - 0.2 * (1 - float(task.to)) + noise


def write_sweep(
    folder: Path,
    method: Method = "halving",
    budget: Fraction | int = 4,
    *,
    score: Callable[[Task], float] = score_by_rate,
    parameters: dict[str, Any] | None = None,
    has_runs: bool = False,
    results: int | None = None,
    **settings: Any,
) -> SweepFolder:
    """Writes the folder of a sweep.

    Args:
        score: the score of a task; NaN: it fails.
        has_runs: with run folders, in which a full training takes 10 seconds.
        results: stop after so many results, as if killed.
    """
    loaded = read_recipe(write_recipe(folder.parent / f"{folder.name}.yaml"), (), TrainRecipe)
    space = SpaceRecipe.model_validate({"parameters": parameters or PARAMETERS})
    whole: dict[str, Any] = vars(SweepOptions(budget=Fraction(budget), method=method, slots=1))
    whole |= {"objective": "accuracy", "higher_is_better": True, "samples": 1000} | settings
    made = SweepRecipe(recipe=collect_given_values(loaded), space=space, **whole)
    sweep = SweepFolder.create(folder)
    sweep.write_settings(made, loaded)
    plan = build_plan(made)
    records = _draw_records(State(plan), Draws(made), score, math.inf if results is None else results)
    # A thousand trials are thousands of records, and a power cut is no part of these tests.
    with patch("os.fsync"), open_journal(folder, plan) as journal:
        journal.append(*records)
        if has_runs:
            _write_runs(sweep, journal.state)
    return sweep


def _draw_records(state: State, draws: Draws, score: Callable[[Task], float], most: float) -> list[Record]:
    records = list[Record]()
    while True:
        decisions = decide(state, draws)
        state = fold(state, decisions)
        records += decisions
        # Rung by rung, as synchronous halving has them: deciding after each result would take seconds.
        for task in list_tasks(state):
            if most <= 0:
                return records
            result = build_result(task.trial.number, task.rung, score(task))
            state, most = fold(state, [result]), most - 1
            records.append(result)
        if not list_tasks(state) and not decide(state, draws):
            return records


def _write_runs(sweep: SweepFolder, state: State) -> None:
    for trial in state.trials:
        levels = state.plan.find_bracket(trial.number).levels
        lines = [
            json.dumps({"kind": "evaluate", "accuracy": score, "position": 0, "seconds": 10.0 * float(levels[rung])})
            for rung, score in enumerate(trial.scores, trial.first_rung)
            if score is not None
        ]
        run = sweep.find_trial(trial.number)
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
