"""A search for learning rates without any training, of a made-up network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.core.errors import HeadwayError, TrainingError
from headway.sweep import rate_search
from headway.sweep.range_test import RangeTest
from headway.sweep.rate_curve import RateCurve, list_rates

Work = tuple[str, str, int]
"""Range test or training, optimizer, batch."""


def fake_search(monkeypatch: pytest.MonkeyPatch, note: Callable[[Work], None] = lambda work: None) -> None:
    """Makes searches that train nothing.

    Args:
        note: called before each range test and each sweep; it may raise an error in its place.
    """

    def measure_ranges(recipes: Sequence[Any], steps: Sequence[int]) -> list[RangeTest | HeadwayError]:
        for one in recipes:
            note(("test", one.recipe.optimizer.name, one.recipe.global_batch))
        return fake_tests(recipes)

    def start_sweep(loaded: Any, space: Any, options: Any, folder: Path, probe: Any) -> Any:
        note(("train", loaded.recipe.optimizer.name, loaded.recipe.global_batch))
        return fake_sweep(loaded, space)

    monkeypatch.setattr(rate_search, "measure_ranges", measure_ranges)
    monkeypatch.setattr(rate_search, "start_sweep", start_sweep)


def fake_tests(recipes: Sequence[Any]) -> list[RangeTest | HeadwayError]:
    """Curves of a made-up network: AdamW needs a hundredth of the rate of SGD, and LAMB does not train."""
    tests = list[RangeTest | HeadwayError]()
    for loaded in recipes:
        name = loaded.recipe.optimizer.name
        start = {"sgd": 1e-4, "adamw": 1e-6}.get(name)
        if start is None:
            tests.append(TrainingError("the loss falls at no learning rate from 1 to 2"))
            continue
        losses = (*(2.3 - 2 / (1 + math.exp((50 - step) / 4)) for step in range(90)), 99.0)
        tests.append(RangeTest(RateCurve(list_rates(start, 1e6 * start, 100), losses), 1.0, 92))
    return tests


def fake_sweep(loaded: Any, space: Any) -> Any:
    """Scores by how near the rate is to 0.1 for SGD at a batch of 30, and in proportion to the batch."""
    recipe = loaded.recipe
    best = (0.1 if recipe.optimizer.name == "sgd" else 0.001) * recipe.global_batch / 30
    rates = space.parameters["optimizer.lr"].choice
    scores = [1 / (1 + abs(math.log(rate / best))) - (0.1 if recipe.optimizer.name == "sgd" else 0) for rate in rates]
    trials = [
        SimpleNamespace(values={"optimizer.lr": rate}, scores=(score,))
        for rate, score in zip(rates, scores, strict=True)
    ]
    top = max(zip(scores, rates, strict=True))
    return SimpleNamespace(state=SimpleNamespace(trials=trials), values={"optimizer.lr": top[1]}, score=top[0])
