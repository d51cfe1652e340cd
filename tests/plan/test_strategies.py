"""The menu of strategies: keys of recipes, rates, bytes and memory."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter
from tests.plan._workload import layer, workload

from headway.core.collectives import Link, Network, predict_seconds
from headway.core.errors import RecipeError
from headway.core.text_format import format_bytes
from headway.core.workload import Workload
from headway.data.batch_plan import BatchPlan
from headway.parallel.parallel_recipe import AnyParallelRecipe
from headway.plan.cluster import load_clusters
from headway.plan.compute import estimate_from_data_sheet
from headway.plan.dense_layers import find_dense_layers
from headway.plan.device_memory import estimate_memory
from headway.plan.job import build_job
from headway.plan.losses import StepLosses
from headway.plan.scaling import predict_scaling
from headway.plan.step import list_gradients
from headway.plan.strategies import Strategy, compare_strategies
from headway.plan.strips import SplitNetwork, choose_grid, describe_split, estimate_split_s
from headway.plan.workloads import find_workload
from headway.setup.local_steps import plan_rounds
from headway.setup.recipe import TrainRecipe


def test_fully_connected_layers_are_better_in_parts_where_they_hold_the_weights() -> None:
    """AlexNet's way: 100 million weights behind few convolutions, over a slow network."""
    heavy, light = workload(dense=100_000_000, convolutions=2), workload()
    slow = load_clusters()["p100-50gbe"]
    assert [one.name for one in find_dense_layers(heavy)] == ["head"]
    assert find_dense_layers(light) == []
    job = build_job(heavy, estimate_from_data_sheet(heavy, slow.device_spec), 10.0)
    found = compare_strategies(heavy, job, slow, 4)
    named = {one.name: one for one in found}
    divided = named["a fully connected layer in 32 parts"]
    assert divided.gain > 1.1
    assert [one.hours for one in found] == sorted(one.hours for one in found)
    # Half of the exchange waits for the step, and fewer bytes need less of the link.
    assert named["optimizer state by owner"].hours >= named["data parallel"].hours > divided.hours
    assert named["16 steps alone, then a mean"].sent_bytes == named["data parallel"].sent_bytes / 16
    assert {one.name for one in found} > {"data parallel", "gradients of 2 steps exchanged at once"}
    assert next(one for one in found if one.name == "data parallel").gain == 1
    assert divided.memory.weights < estimate_memory(heavy, 1, 1e9, 32).weights / 2


def test_every_recipe_of_the_menu_is_one() -> None:
    """Parsed as `headway train` parses it."""
    heavy, slow = workload(dense=100_000_000, convolutions=2), load_clusters()["p100-50gbe"]
    job = build_job(heavy, estimate_from_data_sheet(heavy, slow.device_spec), 10.0)
    menu = compare_strategies(heavy, job, slow, 4)
    keys = [yaml.safe_load(one.recipe) for one in menu]
    parsed = [TypeAdapter(AnyParallelRecipe).validate_python(one["parallel"]) for one in keys if "parallel" in one]
    assert {one.strategy for one in parsed} == {"data", "spatial", "hybrid", "sharded", "local", "async"}
    assert {key for one in keys for key in one} == {"parallel", "comm", "batch", "micro_batch"}
    hybrid = next(one for one in menu if "scheme: all" in one.recipe)
    convolutions, batch = 2 * 2_000_000 * 4, 32 * 32
    assert hybrid.sent_bytes == 2 * 31 / 32 * (convolutions + 4 * batch * (1000 + 1000 / 32))


def test_rows_of_all_weights_are_gathered_twice_and_their_gradients_sent_once() -> None:
    """On a link that counts, a step is as long as its compute and one and a half all-reduces."""
    known, where = workload(), load_clusters()["p100-50gbe"]
    job = replace(build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0), losses=StepLosses())
    menu = {one.recipe: one for one in compare_strategies(known, job, where, 4)}
    found, plain = menu["parallel: {strategy: sharded, what: all}"], menu["parallel: {strategy: data}"]
    total = sum(one.gradient_bytes for one in known.layers)
    assert found.sent_bytes == pytest.approx(3 * 31 / 32 * total) == pytest.approx(1.5 * plain.sent_bytes)
    samples = job.split_batch(32)
    exchange_s = predict_seconds("ring", 1.5 * total, where.build_network(4))
    assert 32 * samples / found.images_s == pytest.approx(job.compute.seconds(samples) + exchange_s, rel=0.01)
    # Ten convolutions in one module are a large block, and ten blocks are not.
    assert "no less memory" in found.note
    layers = tuple(one.model_copy(update={"name": f"{one.name}.conv"}) for one in known.layers)
    blocks = known.model_copy(update={"layers": layers})
    (found,) = (one for one in compare_strategies(blocks, job, where, 4) if "what: all" in one.recipe)
    assert found.memory.weights < plain.memory.weights / 3
    assert "less on each device" in found.note


def test_towers_halve_the_work_that_is_in_them_and_exchange_channels() -> None:
    """Two devices with one link and no gradients to sum: the work of one tower, of twice as many samples each."""
    layers = [
        layer(f"towers.{tower}.conv{number}", "Conv2d", 1_000_000, 10**9, 4 - number, (channels, 28, 28))
        for number, channels in ((1, 64), (2, 128))
        for tower in (0, 1)
    ]
    head = layer("head", "Linear", 1_000_000, 10**6, 0, (1000,))
    known = workload().model_copy(update={"layers": (*layers, head)})
    dgx = load_clusters()["dgx-1"]
    where = dgx.model_copy(update={"devices": 2})
    job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=16.0)
    job = replace(job, losses=StepLosses())
    menu = {one.name: one for one in compare_strategies(known, job, where, 1)}
    found, plain = menu["a tower on each of 2 devices"], menu["data parallel"]
    assert yaml.safe_load(found.recipe) == {"parallel": {"strategy": "towers"}}
    values = 32 * 4 * (2 * 64 * 28 * 28 + 1000 // 2)
    assert found.sent_bytes == values + 16 * known.input.decoded_bytes
    assert found.memory.weights < plain.memory.weights
    share = 4 * 10**9 / (4 * 10**9 + 10**6)
    alone_s = job.compute.fixed_s + 16 * job.compute.sample_s * (share + 2 * (1 - share))
    link = where.build_network(1).inside
    sent_s = sum(link.seconds(nbytes) for nbytes in (*2 * [32 * 4 * 64 * 28 * 28], 32 * 4 * 500, 16 * 150_528))
    assert 32 / found.images_s == pytest.approx(alone_s + sent_s, rel=0.01)
    # With a device on each of two nodes the channels cross the slower link, which the recipe has to allow.
    alone = load_clusters()["p100-50gbe"].model_copy(update={"devices": 1})
    (found,) = (one for one in compare_strategies(known, job, alone, 2) if "towers" in one.recipe)
    assert yaml.safe_load(found.recipe) == {"parallel": {"strategy": "towers", "across_hosts": True}}
    link = alone.build_network(2).between
    sent_s = sum(link.seconds(nbytes) for nbytes in (*2 * [32 * 4 * 64 * 28 * 28], 32 * 4 * 500, 16 * 150_528))
    assert 32 / found.images_s == pytest.approx(alone_s + sent_s, rel=0.01)


def test_images_are_shared_by_numbers_of_devices_that_a_node_has_a_multiple_of() -> None:
    known, cluster = workload(), load_clusters()["p100-50gbe"].model_copy(update={"devices": 6})
    job = build_job(known, estimate_from_data_sheet(known, cluster.device_spec), 10.0, per_device=16.0)
    menu = [one.recipe for one in compare_strategies(known, job, cluster, 2)]
    assert [one for one in menu if "spatial" in one] == ["parallel: {strategy: spatial, ranks: 2}"]


def test_sixteen_devices_share_an_image_in_a_grid_where_it_has_too_few_rows_for_strips() -> None:
    """ResNet-50's last maps have 7 rows: four devices have 1, 2, 2 and 2 of them, and all wait for 4 of 49 places."""
    known, where = find_workload("resnet50"), load_clusters()["dgx-2"]
    job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=16.0)
    menu = {one.name: one for one in compare_strategies(known, replace(job, losses=StepLosses()), where, 1)}
    assert {"each image in 2 strips", "each image in 4 strips", "each image in 4 x 4 parts"} <= set(menu)
    found, plain = menu["each image in 4 x 4 parts"], menu["data parallel"]
    parallel = TypeAdapter(AnyParallelRecipe).validate_python(yaml.safe_load(found.recipe)["parallel"])
    assert (parallel.sharing, parallel.shape) == (16, (4, 4))
    # A grid has shorter borders than as many strips would have, and the parts of the last maps are uneven.
    assert found.sent_bytes < menu["each image in 4 strips"].sent_bytes * 4
    assert find_largest_part(known, 7, (4, 4)) == pytest.approx(4 / 49 * 16)
    assert find_largest_part(known, 56, (4, 4)) == 1
    uneven_s = estimate_split_s(job.split, UNLIMITED, 256, (4, 4), job.compute)
    assert 0.05 < uneven_s / job.compute.seconds(16) < 16 * 4 / 49 - 1
    assert 256 / found.images_s > 256 / plain.images_s + uneven_s
    # One image for all of them: as few rows, as many columns.
    shared = replace(job, per_device=None, batch=1.0)
    assert predict_scaling(shared, where, [1])[0].strips == 16
    assert [one.name for one in compare_strategies(known, shared, where, 1)][-1] == "each image in 4 x 4 parts"


UNLIMITED = Network(1, 16, Link(0.0, math.inf), Link(0.0, math.inf), math.inf)


def find_largest_part(known: Workload, rows: int, grid: tuple[int, int]) -> float:
    """The largest part of the outputs of the first convolution of maps with so many rows and as many outputs."""
    windows = (window for layer in known.layers for window in layer.windows)
    return next(one for one in windows if one.rows == one.count_outputs() == rows).find_largest_part(grid)


def test_a_grid_needs_columns_and_a_place_of_each_map_for_every_device() -> None:
    split = describe_split(find_workload("resnet50"))
    assert [choose_grid(split, ranks) for ranks in (2, 7, 8, 16, 64)] == [(2, 1), (7, 1), (4, 2), (4, 4), None]
    # Files of before tell rows alone, and what has no windows is not split.
    assert [choose_grid(describe_split(workload()), ranks) for ranks in (28, 32)] == [(28, 1), None]
    assert choose_grid(SplitNetwork(), 2) is None


def test_what_the_recipe_refuses_is_not_on_the_menu() -> None:
    """As its workload says; one without the lists, of an earlier version, refuses nothing."""
    heavy, slow = workload(dense=100_000_000, convolutions=2), load_clusters()["p100-50gbe"]

    def list_named(refused: tuple[str, ...] = (), parted: tuple[str, ...] = (), **changes: Any) -> str:
        lists = {"refused_strategies": refused, "refused_with_micro_batches": parted}
        known = heavy.model_copy(update={"step": heavy.step.model_copy(update=lists)})
        job = build_job(known, estimate_from_data_sheet(known, slow.device_spec), 10.0)
        return " ".join(one.recipe for one in compare_strategies(known, replace(job, **changes), slow, 4))

    old = heavy.model_dump(mode="json")
    del old["step"]["refused_strategies"], old["step"]["refused_with_micro_batches"]
    assert Workload.model_validate(old) == heavy
    every = ("spatial", "hybrid", "what: optimizer", "what: all", "local", "async")
    assert all(name in list_named() for name in every)
    found = list_named(("hybrid", "sharded all", "async"))
    assert [name for name in every if name not in found] == ["hybrid", "what: all", "async"]
    found = list_named(("async",), ("spatial", "hybrid"), accumulate=2)
    assert [name for name in every if name not in found] == ["spatial", "hybrid"]
    assert "spatial" not in list_named(split=SplitNetwork())


def test_micro_batches_multiply_the_exchanges_between_layers_alone() -> None:
    """On a link that counts, the extra seconds of a step are once its weights, however many parts it has."""
    known, where = workload(), load_clusters()["p100-50gbe"]

    def find_extra_s(parts: int) -> dict[str, float]:
        job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=8.0)
        job = replace(job, losses=StepLosses(), accumulate=parts)
        menu = compare_strategies(known, job, where, 4)
        compute_s = parts * job.compute.seconds(8.0)
        return {one.name: 32 * 8 * parts / one.images_s - compute_s for one in menu}

    once, twice = find_extra_s(1), find_extra_s(2)
    assert twice["16 steps alone, then a mean"] == pytest.approx(once["16 steps alone, then a mean"], rel=0.01)
    # Forward and backward gather the weights, as many bytes as an all-reduce; gradients are half as many.
    assert twice["rows of all weights"] / once["rows of all weights"] == pytest.approx(2.5 / 1.5, rel=0.01)
    # The second part hides as much of the gradients as the only one did.
    assert twice["optimizer state by owner"] == pytest.approx(once["optimizer state by owner"], rel=0.2)


def test_asynchronous_training_waits_for_nothing_but_the_link_of_the_server() -> None:
    known = workload()

    def bound(gbit_s: float) -> tuple[float, float]:
        between = load_clusters()["p100-50gbe"].between.model_copy(update={"gbit_s": gbit_s, "latency_us": 0.0})
        where = load_clusters()["p100-50gbe"].model_copy(update={"between": between})
        job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=32.0)
        job = replace(job, losses=StepLosses())
        alone = 32 / job.compute.seconds(32)
        (found,) = (one for one in compare_strategies(known, job, where, 4) if "async" in one.recipe)
        assert found.memory.weights == estimate_memory(known, 1, 1.0, 1).weights
        gradients = sum(one.nbytes for one in job.gradients)
        assert f"{format_bytes(3 * 33 * gradients)} of host memory for the server" in found.note
        fed = 32 * between.bytes_s / gradients
        return found.images_s / alone, fed / alone

    # 32 devices without a network that counts; and the server's own, with as many others as its link feeds.
    assert bound(1e6)[0] == pytest.approx(32, rel=1e-3)
    rate, fed = bound(1.0)
    assert rate == pytest.approx(1 + fed)


@pytest.mark.parametrize("asked", [{"per_device": 2.0}, {"batch": 64.0}])
def test_rarer_exchange_is_of_a_larger_batch_of_as_many_samples_each(asked: dict[str, float]) -> None:
    where = load_clusters()["p40-100gbe"]
    job = build_job(workload(), estimate_from_data_sheet(workload(), where.device_spec), 10.0, **asked)
    named = {one.name: one for one in compare_strategies(workload(), job, where, 4)}
    twice = named["gradients of 2 steps exchanged at once"]
    plain = predict_scaling(replace(job, per_device=2.0, batch=None, accumulate=2), where, [4])[0]
    assert (twice.images_s, twice.note) == (pytest.approx(plain.images_s), "2 times the batch")
    assert twice.gain > 1


def test_only_a_narrow_wire_halves_the_exchange() -> None:
    where = load_clusters()["p40-100gbe"]
    name = "gradients sent in 16 bits between nodes"

    def list_named(precision: str, nodes: int = 4, **changes: Any) -> dict[str, Strategy]:
        known = workload()
        known = known.model_copy(update={"step": known.step.model_copy(update={"precision": precision})})
        job = build_job(known, estimate_from_data_sheet(known, where.device_spec), 10.0, per_device=2.0)
        return {one.name: one for one in compare_strategies(known, replace(job, **changes), where, nodes)}

    for precision in ("fp32", "bf16"):
        assert list_named(precision)[name].gain > 1
    # On one node, with such messages, and with 16-bit weights there is nothing left to halve.
    halves = tuple(replace(one, nbytes=one.nbytes / 2) for one in list_gradients(workload()))
    assert name not in {
        *list_named("bf16", 1),
        *list_named("bf16", wire_ratio=0.5),
        *list_named("bf16", gradients=halves),
    }


def test_a_batch_of_strips_has_choices_too() -> None:
    where = load_clusters()["dgx-1"]
    job = build_job(workload(), estimate_from_data_sheet(workload(), where.device_spec), 10.0, batch=8.0)
    assert predict_scaling(job, where, [4])[0].strips == 4
    assert {one.name for one in compare_strategies(workload(), job, where, 4)} > {
        "gradients of 4 steps exchanged at once"
    }


def test_where_a_step_finds_no_room_what_takes_less_is_named() -> None:
    """11 MB for each of 200 samples; and an image that finds none."""
    where = load_clusters()["dgx-1"]

    def found(gigabytes: float, samples: float) -> dict[str, Strategy]:
        small = where.model_copy(update={"device": where.device_spec.model_copy(update={"memory_gb": gigabytes})})
        job = build_job(workload(), estimate_from_data_sheet(workload(), small.device_spec), 10.0, per_device=samples)
        return {one.name: one for one in compare_strategies(workload(), job, small, 2)}

    tight = found(1.5, 200.0)
    assert not tight["data parallel"].memory.fits
    (name,) = (name for name in tight if "micro-batches" in name)
    assert tight[name].memory.fits
    assert tight[name].gain < 1.01
    assert tight[name].note == "the same batch"
    weights = estimate_memory(workload(), 1, 1.0, 16).weights
    tiny = found((weights + 6e6) / 0.9e9, 1.0)
    assert tiny["each image in 4 strips"].memory.fits
    assert tiny["each image in 4 strips"].note == "a batch of 4"
    assert not any("micro" in name for name in tiny)
    roomy = found(16.0, 200.0)
    assert not any("micro-batches" in name for name in roomy)
    # The same batch and the same memory: strips are no gain then.
    assert roomy["each image in 2 strips"].memory == roomy["data parallel"].memory
    assert roomy["each image in 2 strips"].gain < 1


@pytest.mark.parametrize(("samples", "steps"), [(100_000, 16), (1_280, 10), (256, 2), (255, None)])
def test_a_round_takes_no_more_than_train_allows(samples: int, steps: int | None) -> None:
    """32 samples a step on 32 devices: a quarter of an epoch, and no round of a single step."""
    where = load_clusters()["p100-50gbe"]
    job = build_job(workload(), estimate_from_data_sheet(workload(), where.device_spec), 10.0, batch=32.0)
    job = replace(job, samples=samples)
    menu = {one.recipe: one for one in compare_strategies(workload(), job, where, 4)}
    local = [yaml.safe_load(one)["parallel"]["every_steps"] for one in menu if "local" in one]
    assert local == ([] if steps is None else [steps])
    if steps is not None:
        recipe = _read_recipe(local={"every_steps": steps})
        assert plan_rounds(recipe, BatchPlan(32), 1000, samples).length == steps
        with pytest.raises(RecipeError, match="more than a quarter of an epoch"):
            plan_rounds(_read_recipe(local={"every_steps": samples // 128 + 1}), BatchPlan(32), 1000, samples)


def _read_recipe(*, local: dict[str, Any]) -> TrainRecipe:
    return TrainRecipe.model_validate(
        {
            "data": "synthetic",
            "model": {"factory": "small_net"},
            "optimizer": {"name": "sgd", "lr": 0.1},
            "batch": 32,
            "epochs": 1,
            "parallel": {"strategy": "local", "from_epoch": 0, **local},
        }
    )
