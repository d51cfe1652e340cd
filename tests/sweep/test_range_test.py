"""Range tests on digits: the rates suit every optimizer, and do not depend on what the test shares with others."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.errors import HeadwayError, RecipeError
from headway.core.recipe import LoadedRecipe
from headway.setup.recipe import TrainRecipe
from headway.setup.shared_inputs import SharedInputs
from headway.sweep import range_test
from headway.sweep.range_test import FIRST_CHANGE, LAST_CHANGE, RangeTest, measure_ranges
from headway.sweep.rate_curve import list_rates, propose_rate
from headway.training.runs import load_recipe

LOSSES = """
from torch.nn import functional as F

def scaled(outputs, labels):
    return 1024 * F.cross_entropy(outputs, labels, reduction="none")

def nothing(outputs, labels):
    return 0 * outputs.sum(1)

def undefined(outputs, labels):
    return outputs.sum(1) * float("nan")

def later(outputs, labels, calls=[]):
    calls.append(1)
    if len(calls) > 9:
        raise ValueError("the tenth batch")
    return F.cross_entropy(outputs, labels, reduction="none")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lr")
    packed_digits(folder)
    (folder / "losses.py").write_text(LOSSES)
    return folder


def load(folder: Path, **changes: Any) -> LoadedRecipe[TrainRecipe]:
    return load_recipe(write_recipe(folder / "recipe.yaml", **{"device": "cpu", **changes}), ())


def measure(*recipes: LoadedRecipe[TrainRecipe], steps: int = 40) -> list[RangeTest]:
    tests = measure_ranges(recipes, [steps] * len(recipes))
    assert all(isinstance(test, RangeTest) for test in tests), tests
    return [test for test in tests if isinstance(test, RangeTest)]


def test_every_optimizer_gets_a_range_of_its_own_in_which_its_loss_falls(folder: Path) -> None:
    names = ("sgd", "adamw", "lars", "lamb")
    recipes = [load(folder, optimizer={"name": name, "lr": 7.0}) for name in names]
    tests = measure(*recipes, steps=60)
    for name, test in zip(names, tests, strict=True):
        # LARS moves biases as SGD does, and its rates are too high for those of a network of one layer.
        assert name == "lars" or propose_rate(test.curve).rate < 1
        assert test.curve.rates[0] * test.change == pytest.approx(FIRST_CHANGE)
        assert test.curve.rates[-1] * test.change == pytest.approx(LAST_CHANGE)
        assert test.steps == 1 + len(test.curve.losses)
    # The definitions of the optimizers: a step of LAMB has the length of its layer, one of LARS `trust` times that.
    changes = {name: test.change for name, test in zip(names, tests, strict=True)}
    assert changes["lamb"] == pytest.approx(1, rel=0.05)
    assert changes["lars"] == pytest.approx(0.001, rel=0.05)
    # Together they train as each does alone.
    assert measure(recipes[2], steps=60)[0] == tests[2]


def test_the_scale_of_the_loss_moves_the_rates_of_sgd_and_not_its_losses(folder: Path) -> None:
    plain, scaled = load(folder), load(folder, task={"loss": "losses.py:scaled"})
    (one,), (other,) = measure(plain), measure(scaled)
    assert other.curve.rates == pytest.approx([rate / 1024 for rate in one.curve.rates], rel=1e-5)
    assert other.curve.losses == pytest.approx([loss * 1024 for loss in one.curve.losses], rel=1e-3)
    assert propose_rate(other.curve).rate == pytest.approx(propose_rate(one.curve).rate / 1024, rel=1e-5)


def test_a_schedule_without_a_peak_and_one_with_a_warm_up_have_the_same_test(folder: Path) -> None:
    warm = load(folder, schedule={"name": "cosine", "warmup_epochs": 1}, stop_at={"accuracy": 0.1})
    assert measure(load(folder), warm, steps=20)[0] == measure(warm, steps=20)[0]


def test_a_rate_beside_that_of_muon_stays_as_the_recipe_has_it(folder: Path) -> None:
    network = {"factory": "net.py:dropout"}
    loaded = load(folder, model=network, optimizer={"name": "muon", "lr": 0.5, "lr_rest": 0.03})
    rates = list_rates(0.01, 1, 5)
    with closing(SharedInputs()) as shared, closing(range_test._Test(loaded, rates, shared)) as test:
        for rate in rates:
            test.take_turn()
            groups = test.trainer.setup.optimizer.param_groups
            assert [group["lr"] for group in groups if group["filters"]] == pytest.approx([rate])
            assert {round(group["lr"], 9) for group in groups if not group["filters"]} == {0.03}


@pytest.mark.parametrize(
    ("loss", "said"),
    [("nothing", "moves no weight"), ("undefined", "not finite"), ("later", "the tenth batch"), ("missing", "missing")],
)
def test_a_network_that_cannot_train_is_told(folder: Path, loss: str, said: str) -> None:
    plain, bad = load(folder), load(folder, task={"loss": f"losses.py:{loss}"})
    good, failed = measure_ranges([plain, bad], [20, 20])
    assert isinstance(good, RangeTest)
    assert isinstance(failed, HeadwayError)
    assert said in str(failed)
    # The other test goes on to its end, as it does alone.
    assert good == measure(plain, steps=20)[0]


def test_an_optimizer_that_changes_its_rate_by_itself_is_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match="rmsprop_sgd changes its learning rate by itself"):
        measure(load(folder, optimizer={"name": "rmsprop_sgd", "lr": 0.1}, epochs=20))
