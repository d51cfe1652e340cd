"""`headway doctor RECIPE`: small real jobs whose limit is known are named, and the profile is what was measured."""

from __future__ import annotations

import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest
import torch
from bench._doctor.around import served
from tests._support import files, headway, packed_digits, refused, write_recipe
from tests.data.tiers._server import make_pack

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.doctor.budget import Budget
from headway.doctor.contention import measure_contention, measure_handover
from headway.doctor.examination import examine_job
from headway.doctor.loader_measurement import measure_loader
from headway.doctor.loop_measurement import measure_loop_rate, measure_passes
from headway.doctor.measurement_job import MeasurementJob, format_override, resize_batch
from headway.doctor.sync_counter import count_syncs
from headway.training.runs import load_recipe

HOLDERS = """
import time
import torch

def waits(images, labels, keys):
    time.sleep(0.02)
    return images, labels

def reads(images, labels, keys):
    total = 0.0
    for value in images.flatten()[:4000]:
        total += value.item()
    return images, labels

def works(images, labels, keys):
    flipped = torch.rand(64, 64).mean().item() > 2  # one value, as mixup draws one
    for _ in range(40):
        images = torch.nn.functional.avg_pool2d(images, 3, 1, 1)
    return images, labels
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Evaluations and checkpoints, of which one is measured, are too rare to count: a busy disk makes no verdict."""
    where = tmp_path_factory.mktemp("doctor")
    packed_digits(where, per_class=60, mode="seekable")
    (where / "holders.py").write_text(HOLDERS)
    write_recipe(where / "plain.yaml", evaluate={"every_epochs": 1e6}, checkpoint={"every_epochs": 1e6})
    return where


ANY_SIZE = ["model={factory: 'headway.model:small_net', args: {width: 4}}"]

SHORT = Budget(each=0.4, passes=0.4, side=0.1, whole=0.4, tries=1.0)
"""Seconds. What is made slow here is so by far, and shows at once."""


def examined(folder: Path, *overrides: str, cold: bool = False) -> Profile:
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", overrides))) as job:
        return examine_job(job, SHORT, quick=True, cold=cold)


@pytest.mark.check
def test_a_wait_in_the_transform_is_named_with_what_it_costs(folder: Path) -> None:
    found = examined(folder, "transform=holders.py:waits")
    assert found.verdict.kind == "host/IO limited"
    assert found.verdict.stage == "transform"
    assert found.verdict.code is not None
    assert (Path(found.verdict.code.file).name, found.verdict.code.what) == ("holders.py", "sleep")
    row = found.find_ceiling("transform")
    assert row is not None
    # A sleep can only be longer; but a stage's mean is scaled to the median step, and other work falls upon some alone.
    assert row.seconds >= 0.25 * 0.02 / 30
    assert found.verdict.most > 1


@pytest.mark.check
def test_reading_values_one_by_one_is_named(folder: Path) -> None:
    found = examined(folder, "transform=holders.py:reads")
    assert found.find_ceiling("sync").seconds > 0  # type: ignore[union-attr]
    assert found.facts["syncs a step"] == 30 * 64


@pytest.mark.check
def test_one_value_that_is_read_does_not_make_a_wait_of_all_that_is_done(folder: Path) -> None:
    found = examined(folder, "transform=holders.py:works")
    assert found.facts["syncs a step"] == 1
    sync, transform = found.find_ceiling("sync"), found.find_ceiling("transform")
    assert sync is not None
    assert transform is not None
    assert sync.seconds < 0.5 * transform.seconds
    assert found.verdict.stage == "transform"


@pytest.mark.check
def test_a_slow_loader_is_measured_beside_the_loop(folder: Path) -> None:
    """A batch of it takes many steps of the loop."""
    loaded = load_recipe(folder / "plain.yaml", [*ANY_SIZE, "data.size=128", "data.cache=none"])
    with closing(MeasurementJob.from_recipe(loaded)) as job:
        alone = measure_loader(job, limit_s=0.3).rate.value
        loop = measure_loop_rate(job, limit_s=0.3).value
        found = measure_contention(job, 1 / alone, 1 / loop, limit_s=3)
    assert found.input_beside != found.input_alone, "too few batches came to tell what they take beside the loop"


@pytest.mark.check
def test_handing_batches_over_costs_short_steps_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a thread that takes 0.1 s for each round of a ring of three, which is at least twice in ten steps."""
    monkeypatch.setattr("headway.doctor.contention.PRODUCER_PAUSE_S", 0.1)
    with closing(
        MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", ["batch=2", "log_every_steps=50"]))
    ) as job:
        assert measure_handover(job, 0.005, limit_s=0) > 0.1 / (10 * 2)
        assert measure_handover(job, 1.0, limit_s=0) == 0
    assert not [one for one in threading.enumerate() if one.name == "headway-doctor"]


def test_noise_is_never_learnt(folder: Path) -> None:
    """The same images with other labels each time."""
    with closing(MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", []))) as job:
        first, *others = job.make_noise()
        assert others
        assert all(torch.equal(first.images, one.images) for one in others)
        assert not all(torch.equal(first.labels, one.labels) for one in others)
        assert not torch.equal(first.images, job.load_batches()[0].images)


@pytest.mark.check
def test_what_comes_from_an_address_is_measured_as_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast its records are decoded, a server at so many bytes a second gives no more."""
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "columns"))
    monkeypatch.setattr("headway.data.tiers.prefetch.MAX_PREFETCH_BYTES", 200_000)
    pack = make_pack(tmp_path, 400, (96, 96), mode="raw")
    bytes_s = 1_500_000
    write_recipe(tmp_path / "far.yaml", batch=8, data={"eval": None})
    with served(pack, bytes_s) as address:
        there = [f"data.train={address}", "data.cache=none", "data.size=32", *ANY_SIZE]
        with closing(MeasurementJob.from_recipe(load_recipe(tmp_path / "far.yaml", there))) as job:
            found = measure_loader(job, limit_s=1.5)
    most = bytes_s / (96 * 96 * 3)
    assert found.rate.value < 1.3 * most
    assert found.seconds["storage"] > 0.5 / found.rate.value


@pytest.mark.check
def test_evaluations_at_every_step_are_stalls(folder: Path) -> None:
    found = examined(folder, "evaluate.every_epochs=0.05")
    assert found.verdict.kind == "stall limited"
    assert found.verdict.stage == "evaluate"
    assert any(knob.override == "evaluate.every_epochs=0.2" for knob in found.knobs)
    first = next(knob for knob in found.knobs if knob.cures == "evaluate")
    assert 1 < first.gain <= found.verdict.most * (1 + 1e-6)


@pytest.mark.check
def test_the_profile_adds_up_and_is_read_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    found = examined(folder)
    path = tmp_path / "profile.json"
    found.write(path)
    assert Profile.read(path) == found
    assert found.batch == 30
    assert found.facts["images of the batch's size"] == 1
    assert found.together is not None
    into = sum(one.seconds for one in found.ceilings if one.side == "input")
    loop = sum(one.seconds for one in found.ceilings if one.side == "loop")
    assert into == pytest.approx(found.together.input_alone, rel=1e-3)
    assert loop == pytest.approx(found.together.loop_alone, rel=1e-3)
    names = [one.name for one in found.runs]
    assert names == ["synthetic", "replay", "warm", "cold"]
    assert all(one.steps > 0 and one.images_s is not None and one.predicted is not None for one in found.runs[:3])


@pytest.mark.check
def test_nothing_of_the_users_is_touched(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    before = files(folder)
    said = headway("doctor", folder / "plain.yaml", "--quick", "--json")
    after = files(folder)
    assert {name: content for name, content in after.items() if "__pycache__" not in name} == {
        name: content for name, content in before.items() if "__pycache__" not in name
    }
    assert [one.name for one in tmp_path.iterdir()] == ["plain.profile.json"]
    (tmp_path / "said.json").write_text(said.out)
    assert Profile.read(tmp_path / "said.json") == Profile.read(tmp_path / "plain.profile.json")
    assert "Wrote plain.profile.json." in said.err


def test_the_first_epoch_of_what_is_kept_in_memory_is_like_the_others(folder: Path) -> None:
    with pytest.raises(UsageError, match="first epoch does not differ"):
        examined(folder, "data.cache=memory", cold=True)


@pytest.mark.check
def test_the_first_epoch_reads_from_the_disk(folder: Path) -> None:
    found = examined(folder, "data.cache=none", cold=True)
    assert found.regime == "first epoch"
    cold = next(one for one in found.runs if one.name == "cold")
    assert cold.images_s is not None
    assert "files from the disk" in cold.note


@pytest.mark.check
def test_synthetic_data_have_no_input(folder: Path) -> None:
    found = examined(folder, "data={train: synthetic, synthetic: {size: [8, 8], channels: 1}}")
    assert found.together is None
    assert not [one for one in found.ceilings if one.side == "input"]
    assert any("synthetic" in one for one in found.not_measured)
    warm = next(one for one in found.runs if one.name == "warm")
    assert warm.steps > 0
    assert warm.images_s is not None
    assert warm.predicted != warm.images_s.value, "the loop was not measured once and shown twice"


@pytest.mark.check
def test_syncs_are_counted_by_stage_and_by_line(folder: Path) -> None:
    profiling = sys.getprofile()
    loaded = load_recipe(folder / "plain.yaml", ["transform=holders.py:reads", "log_every_steps=50"])
    job = MeasurementJob.from_recipe(loaded)
    try:
        with job.open_trainer(batches=job.load_batches()) as trainer:
            found = count_syncs(trainer)
    finally:
        job.close()
    assert found.by_stage == {"augment": 1920}  # 30 images of 8 x 8: fewer than it would read
    (place,) = [place for place, line in found.lines.items() if line.reads]
    assert (place.within, Path(place.file).name, found.lines[place].reads) == ("transform", "holders.py", 1920)
    assert sys.getprofile() is profiling


@pytest.mark.check
def test_a_clean_step_has_no_syncs(folder: Path) -> None:
    job = MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", ["log_every_steps=50"]))
    try:
        with job.open_trainer(batches=job.load_batches()) as trainer:
            assert count_syncs(trainer).count == 0
        passes = measure_passes(job, limit_s=0.1)
        assert {2, 30} <= passes.keys()
    finally:
        job.close()


def test_batches_of_another_size_repeat_their_samples(folder: Path) -> None:
    job = MeasurementJob.from_recipe(load_recipe(folder / "plain.yaml", []))
    try:
        first = job.load_batches()[0]
        other = resize_batch(first, 70, torch.device("cpu"))
    finally:
        job.close()
    assert len(other.images) == len(other.labels) == len(other.positions) == 70
    assert torch.equal(other.images[:30], first.images)
    assert torch.equal(other.images[30:60], first.images)


def test_changes_are_said_as_the_command_line_takes_them() -> None:
    assert format_override({"data__threads": 2, "channels_last": False}) == "data.threads=2 channels_last=false"


def test_wrong_usage_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "needs a recipe" in refused("doctor", status=2)
    assert "--script" in refused("doctor", folder / "plain.yaml", "--steps", "3", status=2)
    assert "no key" in refused("doctor", folder / "plain.yaml", "nothing=3", status=2)
    assert "--cold measures one process" in refused("doctor", folder / "plain.yaml", "--cold", "--procs", "2", status=2)
    many = refused("doctor", folder / "plain.yaml", "--procs", "999", status=2)
    assert "cannot be shared by 999 processes. Set it to at least 999, or start at most" in many
