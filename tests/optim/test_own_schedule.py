"""The user's own schedule: a pure function of the epoch, behind a warm-up if there is one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from headway.core.errors import RecipeError, UserCodeError
from headway.optim import Schedule, read_schedule

OWN = """
import math

def cosine(epochs, *, end=0.0):
    return lambda epoch: end + (1 - end) * (1 + math.cos(math.pi * epoch / epochs)) / 2

def bump(epochs):
    return lambda epoch: 3.0 if 2.0 <= epoch < 2.1 else 0.5

def counting(epochs):
    calls = []
    return lambda epoch: calls.append(epoch) or 1 / len(calls)

def negative(epochs):
    return lambda epoch: 1 - epoch

def words(epochs):
    return lambda epoch: "high"

def factor(epochs):
    return 0.5

def failing(epochs):
    return lambda epoch: {}["the user's own key"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    return folder


def schedule(folder: Path, name: str, **options: Any) -> Schedule:
    recipe = read_schedule(factory=f"own.py:{name}", **options).resolve_paths(folder)
    return Schedule(recipe, total=400, epoch=100)


def test_it_is_the_function_of_the_epoch(folder: Path) -> None:
    mine = schedule(folder, "cosine", args={"end": 0.1})
    built_in = Schedule(read_schedule(name="cosine", end=0.1), total=400, epoch=100)
    for position in (*range(0, 400, 7), 400, 500):
        assert mine(position) == pytest.approx(built_in(position), rel=1e-12)
    late = schedule(folder, "cosine", warmup_epochs=1)
    assert [late(0), late(50)] == [0, 0.5]
    assert late(250) == pytest.approx((1 + math.cos(math.pi * 2.5 / 4)) / 2)


def test_its_peak_is_among_the_turns(folder: Path) -> None:
    (turn,) = schedule(folder, "bump").list_turns()
    assert turn == (200, "peak")
    assert schedule(folder, "bump")(turn.position) == 3


REFUSED = {
    "counting": "at epoch 0. Let the factor depend on the epoch alone",
    "negative": "gives the factor -0.01 at epoch 1.01. Return a finite number of at least 0",
    "factor": "returned a float, no function of the epoch",
    "OWN": "has no 'OWN'",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_such_function_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=r"^schedule\.factory: ") as caught:
        schedule(folder, name)
    assert REFUSED[name] in str(caught.value)


def test_other_mistakes(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"schedule\.args\.ends: .* Did you mean 'end'\?"):
        schedule(folder, "cosine", args={"ends": 1})
    for name in ("failing", "words"):
        with pytest.raises(UserCodeError, match=r"failed: (KeyError|ValueError)"):
            schedule(folder, name)
