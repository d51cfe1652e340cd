"""`batch: {per_device: 64}`: the global batch that it stands for, in words, and in a run that equals one with it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests._support import finished, headway, packed_digits, records, refused, write_recipe

import headway as library
from headway.core.errors import RecipeError
from headway.core.recipe import build_recipe
from headway.core.workload import Workload
from headway.doctor.measurement_job import MeasurementJob
from headway.report.dry_run_text import format_dry_run
from headway.setup.rates import describe_batch, plan_steps, resolve_batch, resolve_rates
from headway.setup.recipe import TrainRecipe
from headway.training.dry_run import dry_run
from headway.training.runs import load_recipe

LR = {"name": "sgd", "lr": {"base": 0.1, "per": 16}}
WARM_UP = {"name": "cosine", "warmup_epochs": 0.5, "warmup_start": "base"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("per_device")
    packed_digits(folder)
    return write_recipe(folder / "recipe.yaml", batch={"per_device": 15}, optimizer=LR, schedule=WARM_UP)


def build(batch: Any, **changes: Any) -> Any:
    tree = {
        "data": {"train": "synthetic"},
        "model": {"factory": "resnet18"},
        "optimizer": LR,
        "epochs": 2,
        "batch": batch,
        **changes,
    }
    return build_recipe(tree, (), TrainRecipe)


@given(st.integers(1, 512), st.integers(1, 300), st.integers(1, 10_000))
def test_it_is_the_product_and_all_rules_follow_it(per_device: int, ranks: int, samples: int) -> None:
    mine = resolve_rates(resolve_batch(build({"per_device": per_device}), ranks))
    other = resolve_rates(resolve_batch(build(per_device * ranks), ranks))
    assert mine.recipe == other.recipe
    assert mine.recipe.global_batch == per_device * ranks
    assert mine.origins["batch"] == f"auto: {describe_batch(per_device, ranks)}"
    assert not [key for key in mine.origins if key.startswith("batch.")]
    (plan, steps), (same, number) = (plan_steps(one.recipe, samples) for one in (mine, other))
    assert (plan.largest_batch, steps) == (same.largest_batch, number)
    # A second resolution, by other ranks, changes nothing.
    assert resolve_batch(mine, ranks + 1) is mine


def test_a_batch_is_said_in_both_ways() -> None:
    assert describe_batch(64, 4) == "64 a device, 256 in all"
    assert describe_batch(64, 1) == "64 a device, 64 in all"


def test_what_depends_on_the_whole_batch_is_checked_with_it() -> None:
    for changes in ({"micro_batch": 65}, {"model": {"factory": "resnet18", "batch_norm": {"ghost": 64}}}):
        small = build({"per_device": 64}, **changes)
        assert resolve_batch(small, 2).recipe.global_batch == 128
        with pytest.raises(RecipeError, match="64"):
            resolve_batch(small, 1)
    with pytest.raises(RecipeError, match="is 3: set it to 4 or more"):
        resolve_batch(build({"per_device": 1}, observe={"noise_scale": True}), 3)
    with pytest.raises(RecipeError, match="batch: it is 8 per device, and the number of devices is not known here"):
        _ = build({"per_device": 8}).recipe.largest_batch


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"per_device": 0}, "batch.per_device"),
        ({"per_device": 1.5}, "batch.per_device"),
        ({"per_device": "many"}, "batch.per_device"),
        ({"per_devise": 8}, "Did you mean 'batch.per_device'"),
        ({"per_device": 8, "devices": 2}, "there is no key 'batch.devices'"),
        ({}, "the key 'batch.per_device' is missing"),
        (0, "batch must be at least 1, not 0"),
        ("64 each", "batch must be a whole number, not"),
    ],
)
def test_wrong_values_are_sentences(batch: Any, said: str) -> None:
    with pytest.raises(RecipeError) as error:
        build(batch)
    assert said in str(error.value)
    assert str(error.value).endswith((".", "?"))


def test_advice_to_enlarge_it_keeps_its_form(recipe: Path) -> None:
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, ()))) as job:
        assert job.batch == 15
        larger = job.loaded.recipe.enlarge_batch(4)
        assert larger == {"batch.per_device": 60}
        with closing(job.build_variant(larger)) as other:
            assert other.batch == 60
    assert build(8).recipe.enlarge_batch(4) == {"batch": 32}


def test_the_name_of_other_libraries_leads_to_it() -> None:
    with pytest.raises(RecipeError, match=r"Did you mean 'batch\.per_device'"):
        build(8, per_device_train_batch_size=8)


def test_a_dry_run_says_both_and_is_that_of_the_global_batch(recipe: Path) -> None:
    found = dry_run(recipe, procs=4, compiles=False)
    other = dry_run(recipe, ["batch=60"], procs=4, compiles=False)
    assert "batch        15 a device, 60 in all: 15 in a micro-batch x 1 accumulated x 4 ranks" in format_dry_run(found)
    assert (found.workload.step.batch, found.workload.step.per_device) == (60, 15)
    # With `async` each process takes whole batches, so it refuses a batch per device.
    refused = {key: getattr(other.workload.step, key) for key in ("refused_strategies", "refused_with_micro_batches")}
    for key, names in refused.items():
        assert set(getattr(found.workload.step, key)) - set(names) == {"async"}
    step = found.workload.step.model_copy(update={"per_device": None, **refused})
    assert found.workload.model_copy(update={"step": step}) == other.workload
    assert found.rates == other.rates
    assert Workload.model_validate(found.workload.model_dump(mode="json")) == found.workload


def test_a_schedule_is_drawn_for_so_many_processes(recipe: Path) -> None:
    drawn = headway("schedule", recipe, "--procs", "3", "--json").json()
    whole = headway("schedule", recipe, "batch=45", "--json").json()
    assert drawn["curve"] == whole["curve"]
    assert headway("schedule", recipe, "--procs", "0", status=2).err


def test_from_python_one_device_is_counted(recipe: Path, tmp_path: Path) -> None:
    run = library.train(recipe, {"epochs": 1, "batch.per_device": 20}, run=tmp_path / "run")
    assert run.recipe["batch"] == 20
    assert run.finished


@pytest.mark.check
def test_ranks_train_as_with_the_global_batch_and_a_resumed_run_keeps_it(recipe: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    said = finished("train", recipe, "--run", run, "--procs", "2")
    finished("train", recipe, "--run", whole, "--procs", "2", "batch=30")
    assert "The batch of a step: 15 a device, 30 in all." in said.err
    assert [one["loss"] for one in records(run, "train")] == [one["loss"] for one in records(whole, "train")]
    assert yaml.safe_load((run / "recipe.yaml").read_text()) == yaml.safe_load((whole / "recipe.yaml").read_text())
    headway("report", run)
    assert "auto: 15 a device, 30 in all" in (run / "report.html").read_text()
    # On one device, the longer run makes steps of the same samples.
    on = headway("train", "--resume", run, "epochs=3").err
    assert "goes on with 1 device: the global batch stays 30, now 30 a device" in on
    assert {one["batch"] for one in records(run, "train")} == {30}
    assert "the global batch stays" not in headway("train", "--resume", whole, "epochs=3").err
    assert "a run that goes on cannot change batch" in refused(
        "train", "--resume", run, "batch={per_device: 9}", status=2
    )
