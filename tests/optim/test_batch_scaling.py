"""Numbers that follow the batch: the rules, and how a recipe shows what came of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import write_recipe
from tests.optim._cases import OPTIMIZER_NAMES

from headway.core.errors import RecipeError
from headway.core.recipe import read_recipe
from headway.optim import build_optimizer, read_optimizer
from headway.optim.batch_scaling import BatchScaledRecipe, require_number
from headway.setup.rates import find_batch_warnings, plan_steps, resolve_rates
from headway.setup.recipe import TrainRecipe

LBSGD = {"name": "lbsgd", "lr": 0.1, "warmup_epochs": 1}
RMSPROP_SGD = {"name": "rmsprop_sgd", "lr": 0.1, "center_epochs": 1, "period_epochs": 1}

positive = st.floats(1e-6, 1e6)
batches = st.integers(1, 10**6)


@given(positive, batches, batches, st.integers(1, 64))
def test_the_rules(base: float, per: int, batch: int, k: int) -> None:
    linear, root, none = (BatchScaledRecipe(base=base, per=per, scale=scale) for scale in ("linear", "sqrt", "none"))
    assert linear.compute_value(per) == root.compute_value(per) == none.compute_value(batch) == base
    assert linear.compute_value(k * batch) == pytest.approx(k * linear.compute_value(batch))
    assert root.compute_value(k * batch) == pytest.approx(math.sqrt(k) * root.compute_value(batch))
    # lr / batch: the noise of a step's direction. lr^2 / batch: the variance of a step.
    assert linear.compute_value(batch) / batch == pytest.approx(base / per)
    assert root.compute_value(batch) ** 2 / batch == pytest.approx(base**2 / per)


def test_the_rules_in_words() -> None:
    assert BatchScaledRecipe(base=0.1, per=256).explain(8192) == "0.1 x 8,192 / 256"
    assert BatchScaledRecipe(base=0.1, per=256, scale="sqrt").explain(8192) == "0.1 x sqrt(8,192 / 256)"
    assert BatchScaledRecipe(base=0.1, per=256, scale="none").explain(8192) == "0.1, whatever the batch"


def test_what_follows_a_batch_needs_one() -> None:
    import torch

    assert require_number(0.25, "optimizer.lr") == 0.25
    recipe = read_optimizer(name="sgd", lr={"base": 0.1, "per": 256})
    with pytest.raises(
        RecipeError, match=r"optimizer\.lr: it follows the batch \(0\.1 per 256\), and no batch is known"
    ):
        build_optimizer(recipe, torch.nn.Linear(2, 2))


def resolved(tmp_path: Path, *overrides: str, **changes: Any) -> tuple[TrainRecipe, dict[str, str]]:
    path = write_recipe(tmp_path / "recipe.yaml", **changes)
    loaded = resolve_rates(read_recipe(path, overrides, TrainRecipe))
    return loaded.recipe, dict(loaded.origins)


def test_a_resolved_recipe_has_the_number_and_says_how(tmp_path: Path) -> None:
    """Goyal et al. 2017: 0.1 for 256 becomes 3.2 for 8,192, reached from 0.1 in five epochs."""
    changes: dict[str, Any] = {
        "optimizer": {"name": "sgd", "lr": {"base": 0.1, "per": 256}},
        "schedule": {"name": "cosine", "warmup_epochs": 5, "warmup_start": "base"},
        "batch": 8192,
        "epochs": 90,
    }
    recipe, origins = resolved(tmp_path, **changes)
    assert recipe.optimizer.lr == pytest.approx(3.2)
    assert recipe.schedule.warmup_start == pytest.approx(1 / 32)
    assert origins["optimizer.lr"] == "auto: 0.1 x 8,192 / 256"
    assert origins["schedule.warmup_start"] == "auto: base 0.1 of a learning rate of 3.2"
    assert not [key for key in origins if key.startswith("optimizer.lr.")]
    small, _ = resolved(tmp_path, "batch=64", **changes)
    assert (small.optimizer.lr, small.schedule.warmup_start) == (0.025, 1.0)  # nothing to rise to


def test_one_override_changes_the_rule(tmp_path: Path) -> None:
    recipe, _ = resolved(tmp_path, "optimizer.lr.scale=sqrt", optimizer={"lr": {"base": 0.1, "per": 256}}, batch=1024)
    assert recipe.optimizer.lr == pytest.approx(0.2)


@given(st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]), st.integers(1, 7))
def test_regime_adaptation_keeps_the_steps_of_every_part(
    tmp_path_factory: pytest.TempPathFactory, k: float, tenths: int
) -> None:
    """Hoffer et al. 2017: as many iterations as the small batch has, and the falls at the same ones."""
    samples, per = 6400, 64
    folder = tmp_path_factory.mktemp("regime")
    first, second = tenths / 10, tenths / 10 + 2
    recipe, origins = resolved(
        folder,
        schedule={"name": "multi_step", "milestones_epochs": [first, second], "warmup_epochs": 0.1},
        batch_growth={"milestones_epochs": [2.5], "factor": 2},
        batch=int(per * k),
        epochs={"base": 4, "per": per},
    )
    plan, steps = plan_steps(recipe, samples)
    small, its_steps = plan_steps(recipe.model_copy(update={"batch": per, "epochs": 4.0}), samples)
    assert require_number(recipe.epochs, "epochs") == 4 * k
    for milestone, before in zip(recipe.schedule.milestones_epochs, (first, second), strict=True):
        assert milestone == pytest.approx(before * k)
    assert recipe.schedule.warmup_epochs == pytest.approx(0.1 * k)
    assert plan.starts.tolist() == [0, 2.5 * samples * k]
    assert steps == 2.5 * samples / per + 1.5 * samples / (2 * per)
    assert origins["epochs"] == f"auto: 4 x {int(per * k):,} / 64"
    if k != 1:
        assert origins["schedule.milestones_epochs"] == f"auto: x {k:g}, as the epochs of the run"
    assert its_steps > 0
    assert not small.grows or k != 1 or steps == its_steps


def test_what_is_frozen_and_the_size_of_images_keep_their_steps_too(tmp_path: Path) -> None:
    recipe, origins = resolved(
        tmp_path,
        "model.freeze_after=[{match: bias, after_epochs: 1.5}, {match: norm, after_epochs: 3}]",
        data={"progressive": {"start": 4, "from_epoch": 0.5, "until_epoch": 2}},
        epochs={"base": 4, "per": 32},
        batch=64,
    )
    assert [part.after_epochs for part in recipe.model.freeze_after] == [3, 6]
    assert recipe.data.progressive is not None
    assert (recipe.data.progressive.from_epoch, recipe.data.progressive.until_epoch) == (1, 4)
    for key in ("model.freeze_after.0.after_epochs", "data.progressive.until_epoch"):
        assert origins[key] == "auto: x 2, as the epochs of the run"


@pytest.mark.parametrize(
    ("optimizer", "scaled"),
    [
        (
            {"name": "rmsprop_sgd", "center_epochs": 0.75, "period_epochs": 0.5},
            {"center_epochs": 1.5, "period_epochs": 1},
        ),
        ({"name": "lbsgd", "warmup_epochs": 1, "batch_scale": 2}, {"warmup_epochs": 2}),
        ({"name": "sgd"}, {}),
    ],
)
def test_what_the_optimizer_counts_by_itself_keeps_its_steps_too(
    tmp_path: Path, optimizer: dict[str, Any], scaled: dict[str, float]
) -> None:
    changes: dict[str, Any] = {"optimizer": {"lr": 0.1, **optimizer}, "epochs": {"base": 3, "per": 32}, "batch": 64}
    recipe, origins = resolved(tmp_path, **changes)
    assert recipe.optimizer.epoch_fields == scaled
    for field in scaled:
        assert origins[f"optimizer.{field}"] == "auto: x 2, as the epochs of the run"
    changes |= {"optimizer": {"name": "rmsprop_sgd", "lr": 0.1}, "epochs": {"base": 30, "per": 32}}
    default, _ = resolved(tmp_path, **changes)
    assert default.optimizer.epoch_fields == {"center_epochs": 20, "period_epochs": 10}


def test_exponential_and_step_keep_their_steps_too(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": {"base": 10, "per": 32}, "batch": 64}
    recipe, origins = resolved(tmp_path, schedule={"name": "step", "every_epochs": 3}, **changes)
    assert (recipe.epochs, recipe.schedule.every_epochs) == (20, 6)
    assert origins["schedule.every_epochs"] == "auto: x 2, as the epochs of the run"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch": 1024}, []),
        ({"batch": 1025}, ["A batch of 1,025 trains at one learning rate throughout: above 1,024 that often diverges"]),
        ({"batch": 2048, "schedule": {"name": "constant", "warmup_epochs": 1}}, []),
        ({"batch": 4096, "schedule": {"name": "cosine"}}, []),
        (
            {"batch": 4097, "schedule": {"name": "cosine"}},
            ["A batch of 4,097 is taken by sgd, which treats all layers alike: above 4,096 that often loses accuracy."],
        ),
        ({"batch": 5000}, ["A batch of 5,000 trains at one", "A batch of 5,000 is taken by sgd"]),
        (
            {"batch": 2048, "batch_growth": {"milestones_epochs": [1], "factor": 4}},
            ["A batch of 8,192 is taken by sgd"],
        ),
        ({"batch": 256, "optimizer": {**LBSGD, "batch_scale": 4}}, []),
        ({"batch": 2048, "optimizer": {**LBSGD, "batch_scale": 2}}, []),
        (
            {"batch": 256, "optimizer": {**LBSGD, "batch_scale": 8, "warmup": "lars"}},
            ["A batch of 2,048 (8 steps of 256) trains at one learning rate throughout"],
        ),
        (
            {"batch": 256, "optimizer": {**LBSGD, "batch_scale": 32}},
            ["A batch of 8,192 (32 steps of 256) is taken by lbsgd, which treats all layers alike"],
        ),
        ({"batch": 8192, "schedule": {"name": "cosine"}, "optimizer": {**LBSGD, "warmup": "lars"}}, []),
        ({"batch": 8192, "schedule": {"name": "cosine"}, "optimizer": {"name": "soap", "lr": 0.003}}, []),
        ({"batch": 2048, "optimizer": RMSPROP_SGD}, []),
        ({"batch": 8192, "optimizer": RMSPROP_SGD}, ["A batch of 8,192 is taken by rmsprop_sgd"]),
    ],
)
def test_a_large_batch_is_warned_of(tmp_path: Path, changes: dict[str, Any], said: list[str]) -> None:
    recipe, _ = resolved(tmp_path, **changes)
    found = find_batch_warnings(recipe)
    assert len(found) == len(said)
    for text, beginning in zip(found, said, strict=True):
        assert text.startswith(beginning)
        assert ". Set " in text


def test_the_layer_wise_optimizers_are_there_and_are_not_warned_of(tmp_path: Path) -> None:
    recipe, _ = resolved(tmp_path, batch=8192, schedule={"name": "cosine"})
    layer_wise = {"lars", "lamb", "novograd", "muon"}
    assert layer_wise < set(OPTIMIZER_NAMES)
    for name in OPTIMIZER_NAMES:
        optimizer = read_optimizer(name=name, lr=0.1)
        assert optimizer.is_layer_wise == (name in layer_wise)
        is_warned = bool(find_batch_warnings(recipe.model_copy(update={"optimizer": optimizer})))
        # SOAP has coordinates for each layer.
        assert is_warned == (name not in layer_wise | {"soap"})
    lars = read_optimizer(name="lbsgd", lr=0.1, warmup="lars")
    assert not find_batch_warnings(recipe.model_copy(update={"optimizer": lars}))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("optimizer.lr={base: 0.1, pr: 256}",), "there is no key 'optimizer.lr.pr'. Did you mean 'optimizer.lr.per'?"),
        (("optimizer.lr={base: 0.1}",), "the key 'optimizer.lr.per' is missing."),
        (("optimizer.lr={base: 0, per: 256}",), "optimizer.lr.base must be more than 0, not 0."),
        (("optimizer.lr={base: 1, per: 0}",), "optimizer.lr.per must be at least 1"),
        (("optimizer.lr={base: 1, per: 2, scale: cubic}",), "optimizer.lr.scale must be 'linear', 'sqrt'"),
        (("optimizer.lr=fast",), "optimizer.lr must be a number, not 'fast'"),
        (("epochs={base: 1}",), "the key 'epochs.per' is missing."),
        (
            ("schedule={name: cosine, warmup_epochs: 1, warmup_start: base}",),
            "schedule.warmup_start: base needs a learning rate that follows the batch: write for example "
            "optimizer.lr: {base: 0.1, per: 256}",
        ),
        (("schedule={name: step, every_epochs: 2}",), "schedule.every_epochs has 2, and the run ends at epoch 2"),
        (
            ("batch_growth={milestones_epochs: [2], factor: 2}",),
            "batch_growth.milestones_epochs has 2, and the run ends at epoch 2: remove it, or train for longer",
        ),
        (
            ("epochs={base: 3, per: 10}", "schedule={name: cosine, warmup_epochs: 4}"),
            "schedule.warmup_epochs 4 is longer than the run of 3 epochs",
        ),
        (
            ("optimizer={name: rmsprop_sgd, lr: 0.1}",),
            "optimizer.center_epochs + optimizer.period_epochs / 2 is 12.5, and the run ends at epoch 2: set it to at "
            "most that, or train for longer",
        ),
        (
            ("optimizer={name: lbsgd, lr: 0.1, batch_scale: 2, warmup_epochs: 2.5}",),
            "optimizer.warmup_epochs is 2.5, and the run ends at epoch 2",
        ),
        (
            ("epochs={base: 3, per: 10}", "optimizer={name: lbsgd, lr: 0.1, batch_scale: 2, warmup_epochs: 4}"),
            "optimizer.warmup_epochs is 4, and the run ends at epoch 3",
        ),
        (
            ("data.progressive={start: 4, until_epoch: 3}",),
            "data.progressive.until_epoch is 3, and the run ends at epoch 2: set it to at most that",
        ),
        (("micro_batch=61", "batch_growth={milestones_epochs: [1], factor: 2}"), "micro_batch 61 is larger than batch"),
    ],
)
def test_impossible_rates(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        resolved(tmp_path, *overrides)
    assert message in str(caught.value)
