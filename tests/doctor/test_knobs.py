"""Knobs: each is what the recipe takes, and what it promises is what the model gives with the stage that was tried."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from tests._support import packed_digits, write_recipe

from headway.core.profile import Profile
from headway.doctor.doctor import Budget, examination
from headway.doctor.feed import augmentation, by_threads, fed
from headway.doctor.job import Job, quiet
from headway.doctor.kept import keeps, memory_fed
from headway.doctor.stalls import checkpoint, evaluation
from headway.doctor.tune import changes_of
from headway.train.runs import load_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("knobs")
    packed_digits(where, per_class=60)
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
    with closing(Job.of(load_recipe(recipe, slow), quiet)) as job:
        return examination(job, quiet, short, quick=True)


def test_every_knob_is_taken_by_the_recipe(recipe: Path, found: Profile) -> None:
    assert found.knobs
    for knob in found.knobs:
        if knob.override:
            loaded = load_recipe(recipe, knob.override.split(" "))
            for key, value in changes_of(knob.override).items():
                assert dict(loaded.leaves())[key] == value


def test_checkpoints_in_the_way_are_offered_a_thread_and_rarer_times(found: Profile) -> None:
    offered = {knob.override for knob in found.knobs}
    assert {"checkpoint.asynchronous=true", "checkpoint.every_steps=4"} <= offered
    rarer = next(knob for knob in found.knobs if knob.override == "checkpoint.every_steps=4")
    stall = found.ceiling("checkpoint")
    assert stall is not None
    saved = 0.75 * stall.seconds
    assert rarer.gain == pytest.approx(1 / (1 - saved * found.predicted), rel=1e-6)


def test_memory_is_offered_where_images_are_decoded_again_and_again(recipe: Path) -> None:
    with_memory = Job.of(load_recipe(recipe, []), quiet)
    try:
        assert keeps(with_memory)
        decoded = fed(with_memory, limit_s=0.3)
        kept = memory_fed(with_memory, limit_s=0.3)
        assert kept.rate.value > decoded.rate.value
        assert sum(decoded.seconds.values()) == pytest.approx(1 / decoded.rate.value)
        assert augmentation(with_memory, decoded, limit_s=0.1) == 0
        threads = by_threads(with_memory, decoded, 2, limit_s=0.1)
        assert threads.threads == (1, 2)
        assert threads.images_s[0] == decoded.rate.value
    finally:
        with_memory.close()


def test_a_set_of_many_sizes_has_no_place_in_memory(recipe: Path) -> None:
    job = Job.of(load_recipe(recipe, ["data.size=8", "data.scaled=true"]), quiet)
    try:
        assert not keeps(job)
    finally:
        job.close()


def test_stalls_are_of_one_event_and_its_interval(recipe: Path) -> None:
    often = ["checkpoint.every_steps=3", "evaluate.every_epochs=0.5"]
    job = Job.of(load_recipe(recipe, often), quiet)
    try:
        evaluated, saved = evaluation(job, limit_s=5), checkpoint(job, limit_s=1)
    finally:
        job.close()
    assert evaluated is not None
    assert evaluated.every == 225
    assert evaluated.seconds == pytest.approx(evaluated.once_s / 225)
    assert "all 150 images" in evaluated.how
    assert saved.every == 180
    assert saved.once_s > 0
    without = Job.of(load_recipe(recipe, ["data.eval=null"]), quiet)
    try:
        assert evaluation(without, limit_s=1) is None
    finally:
        without.close()
