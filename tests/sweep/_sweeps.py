"""Sweeps without training: scores are drawn from their trial and rung, and results arrive in a random order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

from headway.sweep.budget import Method, Plan, plan_brackets
from headway.sweep.halving import decide
from headway.sweep.journal import open_journal
from headway.sweep.population import perturb_values
from headway.sweep.records import Record, Result, Values, build_result
from headway.sweep.state import State, Task, fold, list_tasks

RANGES = {"lr": (1e-4, 1.0), "width": (1, 64)}


@dataclass(frozen=True)
class Source:
    """A space of two numbers and a choice."""

    seed: int = 0

    def draw(self, trial: int) -> Values:
        random = Random(f"{self.seed}/{trial}")
        return {"lr": 10 ** random.uniform(-4, 0), "width": random.randint(1, 64), "norm": random.choice("ab")}

    def perturb(self, values: Values, trial: int, rung: int) -> dict[str, Any]:
        return perturb_values(values, RANGES, self.seed, trial, rung)


@dataclass(frozen=True)
class Scores:
    """Scores of trials: one in ten fails, and many are equal."""

    seed: int = 0
    failing: float = 0.1

    def __call__(self, task: Task) -> float:
        random = Random(f"{self.seed}/{task.trial.number}/{task.rung}")
        return math.nan if random.random() < self.failing else random.randint(0, 30) / 10


def make_plan(method: Method, budget: Fraction | int, eta: int = 3, smallest: Fraction | int = 27, **more: Any) -> Plan:
    """Returns a plan; a whole `smallest` is the divisor of a full training."""
    fraction = Fraction(1, smallest) if isinstance(smallest, int) else smallest
    return plan_brackets(budget, eta, fraction, method, **more)


def go_on(
    plan: Plan,
    scores: Callable[[Task], float],
    records: Iterable[Record] = (),
    *,
    slots: int = 2,
    seed: int = 0,
    decided: Callable[[State, Sequence[Record]], None] = lambda *_: None,
) -> list[Record]:
    """Continues a sweep to its end as the coordinator does, and returns all records.

    Args:
        decided: called with the state and the decisions that were made in it.
    """
    records, source = list(records), Source(plan.seed)
    state = fold(State(plan), records)
    count = sum(isinstance(record, Result) for record in records)
    while True:
        decisions = decide(state, source, slots)
        decided(state, decisions)
        records += decisions
        state = fold(state, decisions)
        if not (tasks := list_tasks(state)):
            return records
        task = Random(f"{seed}/{count}").choice(tasks)
        result = build_result(task.trial.number, task.rung, scores(task))
        records.append(result)
        state, count = fold(state, [result]), count + 1


def run_sweep(folder: Path, plan: Plan, scores: Callable[[Task], float], *, slots: int = 2, seed: int = 0) -> None:
    """Begins or continues a sweep with its journal; the records are those of `go_on`."""
    with open_journal(folder, plan) as journal:
        while True:
            journal.append(*decide(journal.state, Source(plan.seed), slots))
            if not (tasks := list_tasks(journal.state)):
                return
            count = sum(len(trial.scores) for trial in journal.state.trials)
            task = Random(f"{seed}/{count}").choice(tasks)
            journal.append(build_result(task.trial.number, task.rung, scores(task)))
