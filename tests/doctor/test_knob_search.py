"""Knobs: each is what the recipe takes, and what it promises is what the model gives with the stage that was tried."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests._support import packed_digits, write_recipe

from headway.core.errors import UsageError
from headway.core.profile import Profile, Throughput
from headway.doctor import knob_search
from headway.doctor.budget import Budget
from headway.doctor.examination import examine_job
from headway.doctor.knob_search import KnobSearch
from headway.doctor.loader_measurement import (
    LoaderMeasurement,
    measure_augmentation,
    measure_by_threads,
    measure_loader,
)
from headway.doctor.loop_measurement import LoopMeasurement
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.memory_cache_estimate import fits_in_memory, measure_memory_loader
from headway.doctor.stalls import Stall, measure_checkpoint, measure_evaluation
from headway.doctor.sync_counter import SyncCounts
from headway.doctor.throughput_model import ThroughputModel
from headway.doctor.tune import parse_changes
from headway.training.runs import load_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("knobs")
    packed_digits(where, per_class=60, mode="seekable")
    return write_recipe(where / "plain.yaml", data={"cache": "none"}, log_every_steps=50, batch=60)


@pytest.fixture(scope="module")
def found(recipe: Path) -> Profile:
    slow = [
        "channels_last=false",
        "checkpoint.every_steps=1",
        "checkpoint.asynchronous=false",
        "model.factory=net.py:wide",
    ]
    short = Budget(each=0.4, passes=0.2, side=0.1, whole=0.4, tries=3.0)
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, slow))) as job:
        return examine_job(job, short, quick=True)


@pytest.mark.check
def test_every_knob_is_taken_by_the_recipe(recipe: Path, found: Profile) -> None:
    assert found.knobs
    for knob in found.knobs:
        if knob.override:
            loaded = load_recipe(recipe, knob.override.split(" "))
            for key, value in parse_changes(knob.override).items():
                assert dict(loaded.list_leaves())[key] == value


@pytest.mark.check
def test_checkpoints_at_every_step_are_in_the_way(found: Profile) -> None:
    rarer = next(knob for knob in found.knobs if knob.override == "checkpoint.every_steps=4")
    stall = found.find_ceiling("checkpoint")
    assert stall is not None
    saved = 0.75 * stall.seconds
    assert rarer.gain == pytest.approx(1 / (1 - saved * found.predicted), rel=1e-6)


def stated(value: float) -> Throughput:
    return Throughput(value=value, low=value, high=value, windows=1)


def fed_at(value: float) -> LoaderMeasurement:
    stages = {"storage": 0.1, "decode": 0.8, "augment": 0.0, "collate": 0.1}
    return LoaderMeasurement(stated(value), {name: share / value for name, share in stages.items()}, 100, 1, 3)


def test_what_stalls_is_offered_rarer_times_and_checkpoints_a_thread(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stated seconds of a sample: 1 of the loop, 60 of evaluations, 39 of checkpoints, of which a thread leaves
    3. The best comes first."""

    def copied(job: MeasurementJob, limit_s: float) -> Stall:
        assert job.loaded.recipe.checkpoint.asynchronous
        return Stall(3.0 * job.batch, job.batch, "stated")

    monkeypatch.setattr(knob_search, "measure_checkpoint", copied)
    model = ThroughputModel(
        {"input": {}, "loop": {"compute": 1.0}, "stall": {"evaluate": 60.0, "checkpoint": 39.0}}, 1.0, 1.0
    )
    loop = LoopMeasurement(stated(1.0), {"compute": 1.0}, {60: 60.0}, SyncCounts())
    waits = ["checkpoint.every_steps=1", "checkpoint.asynchronous=false"]
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, waits))) as job:
        offered = KnobSearch(job, model, None, None, None, loop, 0.1, 600).search(torch.device("cpu"), quick=True)
    assert [(one.override, one.cures, one.measured) for one in offered] == [
        ("evaluate.every_epochs=4.0", "evaluate", False),
        ("checkpoint.asynchronous=true", "checkpoint", True),
        ("checkpoint.every_steps=4", "checkpoint", False),
    ]
    taken = [1 + 60 / 4 + 39, 1 + 60 + 3, 1 + 60 + 39 / 4]
    assert [one.gain for one in offered] == pytest.approx([100 / seconds for seconds in taken])
    assert [one.images_s for one in offered] == pytest.approx([1 / seconds for seconds in taken])


@pytest.mark.parametrize(
    ("strategy", "tried"), [("data", {"channels_last", "compile"}), ("spatial", {"channels_last"})]
)
def test_what_the_recipe_refuses_is_not_tried(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, tried: set[str]
) -> None:
    """And it is no setting that failed."""
    seen = set[str]()

    def build_variant(job: MeasurementJob, changes: Mapping[str, Any]) -> MeasurementJob:
        seen.update(changes)
        raise UsageError("it is not measured here")

    monkeypatch.setattr(MeasurementJob, "build_variant", build_variant)
    model = ThroughputModel({"input": {}, "loop": {"compute": 1.0}, "stall": {}}, 1.0, 1.0)
    loop = LoopMeasurement(stated(1.0), {"compute": 1.0}, {}, SyncCounts())
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, [f"parallel={strategy}"]))) as job:
        search = KnobSearch(job, model, None, None, None, loop, 0.1, 600)
        search.search(torch.device("cpu"), quick=False)
    assert seen & {"channels_last", "compile"} == tried
    assert any("compile" in one for one in search.missing) == ("compile" in tried)


@pytest.mark.parametrize(
    ("values", "tried"),
    [
        (("model.factory=headway.model:small_net",), True),
        (("model.factory=headway.model:small_net", "precision=bf16"), False),
        (("model.factory=headway.model:small_net", "compile=true"), False),
        (("model={factory: headway.model:small_net, args: {width: 4}}",), False),
    ],
)
def test_winograds_filtering_is_tried_where_it_changes_something(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, values: Sequence[str], tried: bool
) -> None:
    """And what it costs is said."""
    monkeypatch.setattr(KnobSearch, "_measure_ratio", lambda search, text, changes: 0.5)
    model = ThroughputModel({"input": {}, "loop": {"compute": 1.0}, "stall": {}}, 1.0, 1.0)
    loop = LoopMeasurement(stated(1.0), {"compute": 1.0}, {}, SyncCounts())
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, ["precision=fp32", "device=cpu", *values]))) as job:
        offered = KnobSearch(job, model, None, None, None, loop, 0.1, 600).search(torch.device("cpu"), quick=True)
    costs = [one.cost for one in offered if one.override == "winograd=true"]
    assert costs == (["rounding: a relative error of up to 7e-5 in 3x3 convolutions"] if tried else [])


def test_what_feeds_the_loop_adds_up(recipe: Path) -> None:
    """As it is, and as memory would feed it: records of which nothing is read or decoded."""
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, []))) as job:
        assert fits_in_memory(job)
        decoded, kept = measure_loader(job, limit_s=0.3), measure_memory_loader(job, limit_s=0.3)
        for found in (decoded, kept):
            assert sum(found.seconds.values()) == pytest.approx(1 / found.rate.value)
        assert measure_augmentation(job, decoded, limit_s=0.1) == 0
        threads = measure_by_threads(job, decoded, 2, limit_s=0.1)
        assert threads.threads == (1, 2)
        assert threads.images_s[0] == decoded.rate.value


@pytest.mark.parametrize(("cold_s", "offered"), [(0.0, [5.0]), (1e-3, [])])
def test_memory_is_offered_where_images_are_decoded_again_and_again(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, cold_s: float, offered: list[float]
) -> None:
    """Which the first epoch does not do. At stated rates."""
    monkeypatch.setattr(knob_search, "measure_memory_loader", lambda job, limit_s: fed_at(500))
    now = fed_at(100)
    sides = {
        "input": {**now.seconds, "storage": now.seconds["storage"] + cold_s},
        "loop": {"compute": 1e-9},
        "stall": {},
    }
    loop = LoopMeasurement(stated(1e9), {"compute": 1e-9}, {60: 6e-8}, SyncCounts())
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, []))) as job:
        tried = KnobSearch(job, ThroughputModel(sides, 1.0, 1.0), None, now, None, loop, 0.1, 60)
        found = tried.search(torch.device("cpu"), quick=True)
    gains = [one.gain for one in found if one.override == "data.cache=memory"]
    assert gains == pytest.approx(offered)


def test_a_set_of_many_sizes_has_no_place_in_memory(recipe: Path) -> None:
    job = MeasurementJob.from_recipe(load_recipe(recipe, ["data.size=8", "data.scaled=true"]))
    try:
        assert not fits_in_memory(job)
    finally:
        job.close()


def test_stalls_are_of_one_event_and_its_interval(recipe: Path) -> None:
    often = ["checkpoint.every_steps=3", "evaluate.every_epochs=0.5"]
    job = MeasurementJob.from_recipe(load_recipe(recipe, often))
    try:
        evaluated, saved = measure_evaluation(job, limit_s=5), measure_checkpoint(job, limit_s=1)
    finally:
        job.close()
    assert evaluated is not None
    assert evaluated.every == 225
    assert evaluated.seconds == pytest.approx(evaluated.once_s / 225)
    assert "all 150 images" in evaluated.how
    assert saved.every == 180
    assert saved.seconds == pytest.approx(saved.once_s / 180)
    without = MeasurementJob.from_recipe(load_recipe(recipe, ["data.eval=null"]))
    try:
        assert measure_evaluation(without, limit_s=1) is None
    finally:
        without.close()
