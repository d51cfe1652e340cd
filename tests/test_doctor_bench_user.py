"""`bench.doctor --user-code`: cases drawn by a seed, what they put into a recipe, and what is made of their records."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from bench import doctor
from bench._doctor import user_code
from bench._doctor.trial import steady
from bench._doctor.user_cases import INJECTORS, UserCase, user_draws
from bench._doctor.user_trial import error_of, right, user_claims, user_rows

from headway.core.recipe import read_recipe
from headway.core.user_code import import_user_object
from headway.setup.recipe import TrainRecipe
from headway.setup.task import TargetSpec

FIRST = list(itertools.islice(user_draws(1), 26))


def test_the_first_26_cases_have_every_injector_twice_with_other_strengths() -> None:
    assert len(INJECTORS) == 13
    assert list(itertools.islice(user_draws(1), 26)) == FIRST
    assert list(itertools.islice(user_draws(2), 26)) != FIRST
    for half in (FIRST[:13], FIRST[13:]):
        places = {(one.where, one.does) for one in half}
        assert len(places) == 13
        assert {does for _, does in places} == set(user_code.ALL)
        assert {where for where, does in places if does == "sleep"} == {"transform", "forward", "loss", "metrics"}
    assert len({one.settings() for one in FIRST}) == 26


@pytest.mark.parametrize("case", FIRST[:13], ids=lambda case: f"{case.number}-{case.text}")
def test_every_case_is_a_recipe_of_code_that_can_be_had(case: UserCase, tmp_path: Path) -> None:
    job = case.job()
    job.write(tmp_path / "recipe.yaml", "packed/train")
    recipe = read_recipe(tmp_path / "recipe.yaml", (), TrainRecipe).recipe
    for path in (recipe.model.factory, recipe.transform, recipe.task.factory):
        if path not in (None, "auto"):
            assert callable(import_user_object(path, base=tmp_path, what="test"))
    assert (recipe.log_every_steps == 1) == (case.where == "metrics")
    name, _, line = case.place.partition(":")
    text = Path(user_code.__file__).read_text().split("\n")[int(line) - 1]
    assert (name, text.endswith(f"# {case.does}")) == ("user_code.py", True)


def test_the_slow_code_of_users_can_be_drawn() -> None:
    """A sleep of 30 ms in the transform or the forward pass, and 800 reads of values in the forward pass."""
    drawn = list(itertools.islice(user_draws(1), 13 * 60))
    for where, does, amount in (("transform", "sleep", 30), ("forward", "sleep", 30), ("forward", "reads", 800)):
        near = [one for one in drawn if (one.where, one.does) == (where, does) and 0.9 <= one.amount / amount <= 1.1]
        assert near, (where, does)
    assert {(one.stage, one.job().recipe["batch"]) for one in drawn if one.does == "reads"} == {("sync", 8)}


def test_what_is_slow_leaves_the_numbers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels, keys = torch.rand(2, 3, 32, 32), torch.tensor([0, 1]), np.zeros(2, np.uint64)
    monkeypatch.setenv(user_code.DOES, "sleep")
    monkeypatch.setenv(user_code.AMOUNT, "0.1")
    assert user_code.transform(images, labels, keys)[0] is images
    for does, amount in (("numpy", 0.1), ("reads", 9)):
        model = user_code.Net(2, does=does, amount=amount)
        assert torch.equal(model(images), model.inner(images))
    target = TargetSpec(kind="class", classes=("a", "b"), numbers=1)
    outputs = torch.randn(2, 2)
    slow = user_code.Slow(target, where="loss", does="collect", amount=0.1)
    other = user_code.Slow(target, where="metrics", does="read", amount=1)
    assert torch.equal(slow.loss(outputs, labels), other.loss(outputs, labels))
    assert slow.metrics(outputs, labels).keys() == other.metrics(outputs, labels).keys() == {"accuracy"}
    assert len(slow.predict(outputs)) == 2


def record(number: int, said: dict[str, object], images_s: float = 100.0) -> dict[str, object]:
    case = FIRST[number]
    return {**case.to_json(), "said": said, "images_s": images_s, "calibration": [1.0, 1.0]}


def test_a_case_is_right_where_stage_and_line_are() -> None:
    case = FIRST[0]
    good = {"stage": case.stage, "place": case.place, "predicted": 104.0, "took_s": 30.0}
    records = [
        record(0, good),
        record(0, {**good, "place": "user_code.py:1"}, 80.0),
        record(0, {**good, "stage": "launch"}),
        record(0, {"failed": "it ended"}),
    ]
    assert [right(one) for one in records] == [True, False, False, False]
    assert error_of(records[0]) == pytest.approx(0.04)
    assert error_of(records[3]) is None
    claims = {one.name: one.value for one in user_claims(records)}
    assert claims == {"user_code_named": 0.25, "predict_median_error": pytest.approx(0.04)}
    rows = user_rows(records)
    assert len(rows) == 5
    assert len({len(row) for row in rows}) == 1
    assert user_claims([]) == []


def test_a_case_is_measured_again_until_the_machine_stays_as_it_was() -> None:
    def attempts(*times: float, most: int = 3) -> tuple[int, int]:
        """(attempt that is kept, attempts) where the fixed piece of work takes these times, before and after each."""
        clock = iter(times)
        found = steady(lambda number: {"number": number}, most=most, calibrate=lambda: next(clock))
        return found["number"], found["attempts"]

    assert attempts(1.0, 1.02) == (1, 1)
    assert attempts(1.0, 1.5, 1.0, 1.0) == (2, 2)
    assert attempts(1.0, 1.1, 1.0, 0.8, 1.0, 1.2) == (1, 3)
    assert attempts(1.0, 1.5, most=1) == (1, 1)


def test_cases_are_held_against_what_is_kept_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    now = {
        "seed": 41, "number": 9, "case": "loss in Python (75 values)", "code": "new", "machine": "here, 2 cores",
        "truth": {"items": ["sync"]}, "injected": ["items"], "said": {"stage": "sync"}, "at": "today",
        "images_s": {"case": [1.0], "without items": [3.0]},
    }  # fmt: skip
    old = {**now, "code": "old", "machine": "there, 2 cores", "at": "yesterday"}
    (claim,) = doctor.against([now], [old])
    assert (claim.name, claim.value) == ("records_agree", 1.0)
    assert "agrees with the record of yesterday" in capsys.readouterr().out
    (claim,) = doctor.against([{**now, "said": {"stage": "launch"}}], [old])
    assert claim.value == 0
    assert doctor.against([now], [now]) == []
    assert "nothing is kept of it" in capsys.readouterr().out
