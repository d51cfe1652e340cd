"""The trials that are measured before a sweep: few of them stand for all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from headway.sweep.space import Space

COST_KEYS = ("model", "batch", "data", "augment", "task", "transform", "epochs")
"""Parts of a recipe by which trials differ in what a step, or their whole training, costs."""
MEASURED_TRIALS = 3
"""Trials that are measured before the sweep if their costs differ."""


def choose_typical_trials(space: Space, seed: int, trials: int) -> dict[int, int]:
    """Returns numbers of trials to measure, and how many of a sweep's trials each stands for.

    Trials with equal values of all keys that change the cost are a kind. The most frequent kinds are measured, so a
    choice of three networks is measured three times, whichever networks the first trials have. If most trials are of
    other kinds, the first ones are measured instead, as a fair sample.

    Args:
        trials: trials that the sweep starts.
    """
    kinds = [_describe_cost(space.suggest(seed, trial)) for trial in range(trials)]
    common = Counter(kinds).most_common(MEASURED_TRIALS)
    if 2 * sum(count for _, count in common) < trials:
        return dict.fromkeys(range(MEASURED_TRIALS), 1)
    return {kinds.index(kind): count for kind, count in common}


def _describe_cost(values: Mapping[str, Any]) -> str:
    own = {key: value for key, value in values.items() if _changes_cost(key)}
    return json.dumps(own, sort_keys=True, default=str)


def _changes_cost(key: str) -> bool:
    return key.partition(".")[0] in COST_KEYS or key == "optimizer.name"
