"""`headway sweep --lr`: its recipes, its choice, its files, and what it refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import finished, packed_digits, refused, write_recipe
from tests.sweep._rates import fake_search

from headway.core.errors import RecipeError, UsageError
from headway.sweep.learning_rate import RateOptions, build_variant, find_rates
from headway.sweep.rate_table import fit_exponent
from headway.training.runs import load_recipe

RULE = {"base": 0.1, "per": 64, "scale": "sqrt"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rates")
    packed_digits(folder)
    return folder


def write(folder: Path, **changes: Any) -> Path:
    return write_recipe(folder / "recipe.yaml", **{"device": "cpu", **changes})


@pytest.fixture
def without_training(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_search(monkeypatch)


@given(st.floats(-1, 2), st.floats(1e-6, 10), st.integers(1, 64))
def test_the_exponent_of_a_power_law_is_found(exponent: float, lr: float, batch: int) -> None:
    batches = [batch * factor for factor in (1, 4, 16)]
    fit = fit_exponent("sgd", batches, [lr * one**exponent for one in batches])
    assert fit.exponent == pytest.approx(exponent, abs=1e-6)
    wider = fit_exponent("sgd", [*batches, batch * 64], [lr * one**exponent for one in [*batches, batch * 64]])
    assert wider.interval < fit.interval
    # Candidates a factor of 3 apart tell a linear rule from a square root rule over a factor of 16 in the batch.
    assert fit.interval < 0.5


@given(st.floats(1.1, 100))
def test_rates_off_the_line_widen_the_interval(factor: float) -> None:
    batches, exact = (16, 64, 256), (0.1, 0.2, 0.4)
    bent = (exact[0], exact[1] * factor, exact[2])
    assert fit_exponent("sgd", batches, bent).exponent == pytest.approx(0.5)
    assert fit_exponent("sgd", batches, bent).interval >= fit_exponent("sgd", batches, exact).interval
    wild = fit_exponent("sgd", batches, (exact[0], exact[1] * 1000, exact[2]))
    assert "linear" in wild.describe()
    assert "none or sqrt" in wild.describe()


def test_a_variant_has_the_rate_of_the_rule_and_the_start_of_its_warm_up(folder: Path) -> None:
    schedule = {"name": "cosine", "warmup_epochs": 1, "warmup_start": "base"}
    loaded = load_recipe(write(folder, optimizer={"name": "sgd", "lr": RULE, "momentum": 0.8}, schedule=schedule), ())
    other = build_variant(loaded, "lars", 128).recipe
    assert (other.optimizer.name, other.batch, other.optimizer.lr) == ("lars", 128, pytest.approx(0.1 * math.sqrt(2)))
    assert other.schedule.warmup.start == pytest.approx(1 / math.sqrt(2))
    # Keys that both optimizers have stay, and defaults follow the new one.
    assert other.optimizer.momentum == 0.8  # type: ignore[union-attr]
    assert other.optimizer.no_decay
    # Below the batch of the rule there is nothing to rise to.
    assert build_variant(loaded, "sgd", 16).recipe.schedule.warmup.start == 1.0
    # A value that another optimizer refuses is named before anything trains.
    loaded = load_recipe(write(folder, optimizer={"name": "sgd", "lr": 0.1, "momentum": 0.0}), ())
    with pytest.raises(RecipeError, match="'nag' needs a momentum above 0"):
        build_variant(loaded, "nag", 30)


@pytest.mark.usefixtures("without_training")
def test_the_best_row_at_the_batch_of_the_recipe_becomes_its_recipe(folder: Path, tmp_path: Path) -> None:
    path = write(folder, optimizer={"name": "sgd", "lr": RULE})
    options = RateOptions(batches=(120, 30), optimizers=("sgd", "adamw", "lamb"))
    result = find_rates(path, ("epochs=15",), options, tmp_path / "out")
    rows = {(row.optimizer, row.batch): row for row in result.rows}
    assert [row.batch for row in result.rows] == [30, 30, 30, 120, 120, 120]
    assert (result.chosen.optimizer, result.chosen.batch) == ("adamw", 30)
    assert rows["sgd", 120].recipe_lr == pytest.approx(0.1 * math.sqrt(120 / 64))
    assert rows["adamw", 30].recipe_lr is None
    for (name, _), row in rows.items():
        rates = sorted(one.lr for one in row.candidates)
        if name == "lamb":
            assert row.failure
            assert not rates
            continue
        assert row.proposal is not None
        assert rates == pytest.approx([row.proposal / 3, row.proposal, row.proposal * 3], rel=0.01)
        assert row.lr in rates
        assert row.is_at_edge == (row.lr != rates[1])
        # 92 steps of the test, and three trainings.
        steps = 15 * 180 // row.batch
        assert row.work == pytest.approx(3 + 92 / steps, rel=0.2)
    assert [fit.optimizer for fit in result.fits] == ["sgd", "adamw"]
    # Overrides and the found rate are in the recipe, and its data are found from there.
    found = load_recipe(tmp_path / "out/recipe.yaml", ())
    assert (found.recipe.optimizer.name, found.recipe.optimizer.lr) == ("adamw", result.chosen.lr)
    assert (found.recipe.epochs, found.recipe.batch, found.base) == (15, 30, folder)
    assert f"lr {result.chosen.lr:.3g}" in (tmp_path / "out/recipe.yaml").read_text()
    assert json.loads((tmp_path / "out/lr.json").read_text()) == json.loads(json.dumps(result.to_json()))
    text = result.describe()
    assert "lamb at 30: the loss falls at no learning rate" in text
    assert "The recipe's rule is sqrt, exponent 0.5." in text
    assert "a grid of 16 rates takes 96" in text


@pytest.mark.usefixtures("without_training")
def test_a_recipe_whose_loss_falls_at_no_rate_is_told(folder: Path, tmp_path: Path) -> None:
    path = write(folder)
    result = find_rates(path, ("epochs=15",), RateOptions(optimizers=("lamb",)), tmp_path / "out")
    assert result.rows[0].failure.endswith("falls at no learning rate from 1 to 2.")
    assert result.chosen is None


@pytest.mark.usefixtures("without_training")
def test_a_full_folder_is_refused_before_anything_trains(folder: Path) -> None:
    with pytest.raises(UsageError, match="this folder is not empty"):
        find_rates(write(folder), (), RateOptions(), folder)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--optimizers", "sgd,adamww"), "there is no optimizer 'adamww'. Did you mean 'adamw'?"),
        (("--optimizers", "own"), "there is no optimizer 'own'"),
        (("--batches", "64,0"), "a batch of 0 has no sample"),
        (("--batches", "64,many"), "--batches many is not a whole number"),
        (("--budget", "8"), "Write headway sweep --lr RECIPE."),
        (("data.eval=null",), "trials are compared on an evaluation set"),
        (("--optimizers", "rmsprop_sgd", "epochs=20"), "rmsprop_sgd changes its learning rate by itself"),
    ],
)
def test_wrong_usage_is_refused(folder: Path, tmp_path: Path, more: tuple[str, ...], said: str) -> None:
    assert said in refused("sweep", "--lr", write(folder), "--out", tmp_path / "out", *more, status=2)


def test_its_options_are_refused_without_it(folder: Path) -> None:
    assert "--batches belongs to --lr" in refused("sweep", write(folder), "--batches", "64", status=2)


@pytest.mark.check
def test_the_rate_that_is_found_trains(folder: Path, tmp_path: Path) -> None:
    write(folder, optimizer={"name": "sgd", "lr": 1e-6}, epochs=4)
    arguments = ("--lr", "recipe.yaml", "--out", tmp_path / "out", "--slots", "1", "--json")
    said = finished("sweep", *arguments, cwd=folder)
    assert said.status == 0, said.err
    result = said.json()
    (row,) = result["rows"]
    assert row["score"] > 0.7
    assert row["work"] < 4.1
    again = finished("train", tmp_path / "out/recipe.yaml", "--run", tmp_path / "again")
    assert again.status == 0, again.err
    assert json.loads((tmp_path / "again/summary.json").read_text())["accuracy"] == row["score"]
