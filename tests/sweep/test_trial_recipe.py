from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from tests.sweep._spaces import BASE, OPTIMIZERS, build_space, read_base

from headway.core.errors import RecipeError
from headway.core.recipe import read_recipe
from headway.core.recipe_yaml import format_overrides
from headway.setup.rates import resolve_rates
from headway.setup.recipe import TrainRecipe
from headway.sweep.trial_recipe import build_trial_recipe, check_space

TRIAL = "sweep: trial 12"


def test_a_trial_is_the_recipe_with_its_values_as_overrides(tmp_path: Path) -> None:
    """Identity, as long as the optimizer stays."""
    base = read_base(tmp_path)
    space = build_space(
        {
            "optimizer.lr": {"log": [1e-8, 1]},
            "optimizer.lookahead.every_steps": {"integer": [2, 9]},
            "augment.rotation": {"choice": [None, 15, {"degrees": 5, "p": 0.5}]},
            "model.args.width": {"choice": [8, "1e-3", True, [1, 2]]},
            "schedule.warmup_epochs": {"linear": [0.1, 1]},
            "task.args.label_smoothing": {"linear": [0, 0.2]},
        }
    )
    schedule = BASE + "schedule: {name: cosine}\n"
    for trial in range(8):
        values = space.draw(0, trial)
        found = build_trial_recipe(read_base(tmp_path, schedule), trial, values)
        (tmp_path / "again.yaml").write_text(schedule)
        expected = read_recipe(tmp_path / "again.yaml", format_overrides(values), TrainRecipe)
        assert found.recipe == expected.recipe
        assert found.base == base.base
        assert found.path == base.path
        given = [key for key, origin in expected.origins.items() if origin == "command line"]
        assert [key for key, origin in found.origins.items() if origin == f"sweep: trial {trial}"] == given
        assert found.origins.keys() == expected.origins.keys()


def test_values_count_as_the_users(tmp_path: Path) -> None:
    """A rate that a trial gives is no rate that follows the batch, and no value of it was resolved."""
    scaled = BASE.replace("lr: 0.1", "lr: {base: 0.1, per: 32}")
    whole = resolve_rates(build_trial_recipe(read_base(tmp_path, scaled), 12, {"optimizer.lr": 0.3}))
    assert (whole.recipe.optimizer.lr, whole.origins["optimizer.lr"]) == (0.3, TRIAL)
    inner = build_trial_recipe(read_base(tmp_path, scaled), 12, {"optimizer.lr.base": 0.3})
    assert inner.origins["optimizer.lr.base"] == TRIAL
    assert resolve_rates(inner).recipe.optimizer.lr == 0.6
    assert not any(origin.startswith("auto") for origin in inner.origins.values())
    batch = resolve_rates(build_trial_recipe(read_base(tmp_path, scaled), 12, {"batch": 16}))
    assert batch.recipe.optimizer.lr == 0.05


@pytest.mark.parametrize("base", ["sgd", "adamw", "lars", "lamb", "muon"])
def test_every_optimizer_can_take_the_place_of_every_other(base: str, tmp_path: Path) -> None:
    """The trial's optimizer is the one that a recipe without the keys it lacks would have."""
    own = {"adamw": "betas: [0.8, 0.9]", "lamb": "eps: 0.0001"}.get(base, "momentum: 0.7")
    loaded = read_base(tmp_path, BASE.replace("sgd", base).replace("momentum: 0.8", own))
    for name in OPTIMIZERS["optimizer.name"]["choice"]:
        trial = build_trial_recipe(loaded, 12, {"optimizer.name": name, "optimizer.lr": 0.5})
        kept = own if own.partition(":")[0] in type(trial.recipe.optimizer).model_fields else ""
        alone = BASE.replace("sgd", name).replace("momentum: 0.8", kept or "clip_norm: null").replace("0.1", "0.5")
        assert trial.recipe.optimizer == read_base(tmp_path, alone).recipe.optimizer
        lacks = "" if kept else f", without {own.partition(':')[0]}, which {name} lacks"
        assert trial.origins["optimizer.name"] == TRIAL + lacks
        assert trial.origins["optimizer.weight_decay"] == "base.yaml:4"


def test_defaults_follow_the_optimizer_also_in_a_resolved_recipe(tmp_path: Path) -> None:
    """`no_decay` is true by default for LARS alone, and once values are resolved, every key is spelled out."""
    for loaded in (
        read_base(tmp_path),
        read_base(tmp_path).resolve("data.synthetic.samples", 100, "tried"),
        read_base(tmp_path, BASE, "optimizer={name: sgd, lr: 0.1}"),
    ):
        trial = build_trial_recipe(loaded, 12, {"optimizer.name": "lars"})
        assert trial.recipe.optimizer.no_decay
        assert trial.origins["optimizer.no_decay"] == "default"
    given = read_base(tmp_path, BASE, "optimizer.no_decay=false")
    assert not build_trial_recipe(given, 12, {"optimizer.name": "lars"}).recipe.optimizer.no_decay
    own = BASE.replace("name: sgd, lr: 0.1, momentum: 0.8", "factory: 'mine:Mine', args: {a: 1}, lr: 0.1")
    sgd = build_trial_recipe(read_base(tmp_path, own), 12, {"optimizer.name": "sgd"})
    assert sgd.origins["optimizer.name"] == f"{TRIAL}, without factory, args, which sgd lacks"


def test_a_part_that_the_recipe_leaves_to_its_default_can_vary(tmp_path: Path) -> None:
    trial = build_trial_recipe(read_base(tmp_path), 12, {"schedule.warmup_epochs": 1})
    assert (trial.recipe.schedule.name, trial.recipe.schedule.warmup.epochs) == ("constant", 1)
    assert trial.origins["schedule.name"] == "default"
    cosine = build_trial_recipe(read_base(tmp_path), 12, {"schedule.name": "cosine", "schedule.end": 0.1})
    assert (cosine.recipe.schedule.name, cosine.origins["schedule.end"]) == ("cosine", TRIAL)


def test_a_whole_part_and_a_key_of_it_can_both_vary(tmp_path: Path) -> None:
    values = {"optimizer.weight_decay": 0.1, "optimizer": {"name": "adamw", "lr": 0.01}}
    before = copy.deepcopy(values)
    optimizer = build_trial_recipe(read_base(tmp_path), 12, values).recipe.optimizer
    assert (optimizer.name, optimizer.lr, optimizer.weight_decay) == ("adamw", 0.01, 0.1)
    assert values == before, "the choices of a space are not changed"


def test_a_refusal_names_the_trial_and_its_values(tmp_path: Path) -> None:
    base = read_base(tmp_path)
    with pytest.raises(RecipeError) as refused:
        build_trial_recipe(base, 12, {"optimizer.momentum": 1.5, "batch": 8})
    assert str(refused.value) == (
        "the recipe refuses trial 12 of the sweep (optimizer.momentum=1.5 batch=8): sweep: trial 12: "
        "optimizer.momentum must be less than 1, not 1.5. Narrow the space, or add a `when`, so that no trial has such "
        "values."
    )
    with pytest.raises(
        RecipeError, match=r"^the recipe refuses trial 3 of the sweep \(schedule.warmup_epochs=9\): base"
    ):
        build_trial_recipe(base, 3, {"schedule.warmup_epochs": 9})
    with pytest.raises(RecipeError, match=r"trial 4 .*optimizer\.lr is a single value and has no 'base'"):
        build_trial_recipe(base, 4, {"optimizer.lr.base": 9})
    with pytest.raises(RecipeError, match=r"trial 5 .*'optimizer.trust' belongs to lars; sgd has momentum"):
        build_trial_recipe(base, 5, {"optimizer.trust": 0.1})


@pytest.mark.parametrize(
    ("parameters", "what"),
    [
        (
            {"optimizer.momentum": {"linear": [0.8, 1.0]}},
            "space.yaml:7: optimizer.momentum must be less than 1, not 1.0",
        ),
        (
            {"optimizer": {"choice": ["sgd", "adamw"]}},
            "space.yaml:7: optimizer",
        ),
        (
            {"batch": {"linear": [8, 64.5]}},
            "space.yaml:7: batch must be ",
        ),
        (
            {**OPTIMIZERS, "optimizer.trust": {"linear": [-1, 1], "when": {"optimizer.name": "lars"}}},
            "space.yaml:7: optimizer.trust must be m",
        ),
    ],
)
def test_values_that_no_trial_can_have_are_refused_at_the_start(
    parameters: dict[str, Any], what: str, tmp_path: Path
) -> None:
    space = build_space(parameters)
    lines = {f"parameters.{key}.{one.kind}": "space.yaml:7" for key, one in space.recipe.parameters.items()}
    with pytest.raises(RecipeError) as refused:
        check_space(space, read_base(tmp_path), lines)
    assert str(refused.value).startswith(what)
    assert "Take it out" not in str(refused.value)


def test_values_that_some_trials_can_have_pass_the_check(tmp_path: Path) -> None:
    """A warm-up of 6 epochs needs a run of 8, which one of two draws has."""
    parameters = {"epochs": {"choice": [4, 8]}, "schedule.warmup_epochs": {"choice": [1, 6]}}
    check_space(build_space(parameters), read_base(tmp_path))
    check_space(build_space(OPTIMIZERS), read_base(tmp_path))
