"""Other bytes for the same samples: what a pack would give, made by what packs, and the commands that make it."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests._support import write_recipe
from tests.data._jpegs import jpeg
from tests.data.tiers._server import serving

from headway.core.profile import Throughput
from headway.data import native
from headway.data.opening import open as open_dataset
from headway.data.order import Order
from headway.data.pack import pack
from headway.data.pack_mode import PackMode
from headway.doctor import knob_search, pack_estimate
from headway.doctor.knob_search import KnobSearch
from headway.doctor.loader_measurement import LoaderMeasurement
from headway.doctor.loop_measurement import LoopMeasurement, measure_loop_rate
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.pack_estimate import (
    FirstRecords,
    PackCommand,
    PackedSample,
    build_pack_command,
    choose_smaller_mode,
    fits_in_disk_cache,
    list_lossless_modes,
)
from headway.doctor.smaller_images import choose_smaller_side, shrink_batch
from headway.doctor.sync_counter import SyncCounts
from headway.doctor.throughput_model import ThroughputModel
from headway.training.runs import load_recipe

needs_native = pytest.mark.skipif(not native.is_available(), reason="the native core is not built")
NET = """
from torch import nn

class Talks(nn.Module):
    def forward(self, x):
        print(len(x))
        return x

def talks(num_classes):
    return nn.Sequential(Talks(), pooled(num_classes))

def pooled(num_classes):
    return nn.Sequential(
        nn.AvgPool2d(8), nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, num_classes)
    )

def heavy(num_classes):
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)
    )

def rigid(num_classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 12 * 12, num_classes))
"""


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe on loose JPEGs of 400 x 300, of which it takes random crops of 96 x 96."""
    where = tmp_path_factory.mktemp("photos")
    for label in ("one", "two"):
        (where / "photos" / label).mkdir(parents=True)
        for number in range(12):
            (where / "photos" / label / f"{number}.jpg").write_bytes(jpeg(400, 300, seed=number, quality=92))
    (where / "net.py").write_text(NET)
    data = {"train": "photos", "eval": None, "size": 96, "crop": "random", "cache": "none"}
    return write_recipe(where / "some.yaml", data=data, batch=8, model={"factory": "net.py:pooled"})


@pytest.fixture
def job(photos: Path) -> Iterator[MeasurementJob]:
    with closing(MeasurementJob.from_recipe(load_recipe(photos, []))) as made:
        yield made


def knobs_of(job: MeasurementJob, *, of_input: float = 1e-9, of_loop: float = 1e-9, cold_s: float = 0.0) -> KnobSearch:
    """With seconds of a sample on either side. A side that takes next to nothing is not looked at."""
    fed_warm = stated_fed(1 / of_input, 30_000)
    into = {**fed_warm.seconds, "storage": fed_warm.seconds["storage"] + cold_s}
    sides = {"input": into, "loop": {"compute": of_loop}, "stall": {}}
    loop = LoopMeasurement(rate(1 / of_loop), {"compute": of_loop}, {8: 8 * of_loop}, SyncCounts())
    return KnobSearch(job, ThroughputModel(sides, 1.0, 1.0), None, fed_warm, None, loop, 0.3, 60)


def rate(value: float) -> Throughput:
    return Throughput(value=value, low=value, high=value, windows=1)


def stated_fed(images_s: float, record_bytes: float) -> LoaderMeasurement:
    shares = {"storage": 0.1, "decode": 0.8, "augment": 0.0, "collate": 0.1}
    return LoaderMeasurement(
        rate(images_s), {name: share / images_s for name, share in shares.items()}, record_bytes, 1, 3
    )


@needs_native
@pytest.mark.parametrize("mode", ["keep", "seekable", "resize=128,quality=90"])
def test_records_are_those_that_pack_writes(job: MeasurementJob, photos: Path, tmp_path: Path, mode: str) -> None:
    pack(photos.parent / "photos", tmp_path / "packed", mode=mode, threads=1)
    packed = open_dataset(tmp_path / "packed")
    of_name = {packed.name(sample): sample for sample in range(len(packed))}
    made = FirstRecords(job).pack(PackMode.parse(mode), limit_s=60)
    assert made.count == len(packed) == 24
    tier, loose = made.build_tier(), job.setup.inputs.train
    assert loose is not None
    for sample in range(24):
        twin = of_name[loose.name(sample)]
        assert bytes(tier.read([sample])[0]) == bytes(packed.read([twin])[0])
        assert tier.width[sample] == packed.width[twin]
        assert tier.height[sample] == packed.height[twin]
        assert tier.flags[sample] == packed.flags[twin]


def test_a_few_records_stand_for_all(job: MeasurementJob) -> None:
    made = FirstRecords(job).pack(PackMode(kind="keep"), limit_s=0)
    assert made.count == 16
    tier, ids = made.build_tier(), Order(24, job.setup.recipe.seed)(np.arange(24))[1]
    train = job.setup.inputs.train
    assert train is not None
    own = [bytes(train.read([sample])[0]) for sample in range(24)]
    first = {own[sample] for sample in ids[:16]}
    for place, sample in enumerate(ids):
        record = bytes(tier.read([sample])[0])
        assert record in first
        assert place >= 16 or record == own[sample]
    lengths = [len(one) for one in first]
    assert min(lengths) <= made.measure_loader(limit_s=0.3).record_bytes <= max(lengths)


@needs_native
def test_what_a_set_has_already_is_not_offered(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    where = tmp_path_factory.mktemp("packs")
    source = photos.parent / "photos"
    for mode in ("keep", "seekable"):
        pack(source, where / mode, mode=mode, threads=1)

    def offered(*overrides: str) -> list[str]:
        with closing(MeasurementJob.from_recipe(load_recipe(photos, overrides))) as made:
            return [str(mode) for mode in (*list_lossless_modes(made), choose_smaller_mode(made)) if mode is not None]

    assert offered() == ["keep", "seekable", "resize=128,quality=90"]
    assert offered(f"data.train={where / 'keep'}") == ["seekable", "resize=128,quality=90"]
    assert offered(f"data.train={where / 'seekable'}") == ["resize=128,quality=90"]
    assert offered("data.decoder=pillow") == ["keep", "resize=128,quality=90"]
    assert offered("data.crop={name: random, scale: [0.9, 1]}") == ["keep", "resize=128,quality=90"]
    assert offered("data.size=224") == ["keep", "seekable"]  # which takes 256 of 300
    assert offered("data.size=96", "data.crop=center") == ["keep", "seekable", "resize=96,quality=90"]


def test_the_commands_are_those_that_pack_and_train(job: MeasurementJob, photos: Path) -> None:
    """They are run in the tests of `tune`; here they are read."""
    text = build_pack_command(job, PackMode(kind="seekable")).format_command(job.loaded)
    pack_words, train_words = (shlex.split(part) for part in text.split(" && "))
    base = photos.parent
    assert pack_words == ["headway", "pack", str(base / "photos"), str(base / "some.seekable"), "--mode", "seekable"]
    assert train_words == ["headway", "train", str(photos), "data.train=some.seekable"]
    assert PackCommand.parse(text) == build_pack_command(job, PackMode(kind="seekable"))
    assert PackCommand.parse("data.threads=2") is None


STATED = {"keep": (100, 30_000), "seekable": (200, 30_000), "encode": (500, 6_000)}
"""By the mode of a pack: images/s of the loader, and bytes of a record."""


@pytest.fixture
def at_stated_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs are made, and a loop with other values runs; how fast that goes is stated."""
    real, kinds = FirstRecords.pack, list[str]()

    def pack(self: FirstRecords, mode: PackMode, *, limit_s: float) -> PackedSample:
        kinds.append(mode.kind)
        return real(self, mode, limit_s=limit_s)

    def of_loop(job: MeasurementJob, *, limit_s: float) -> Throughput:
        measure_loop_rate(job, limit_s=0)  # raises where the network does not take the images
        return rate(250 if job.load_batches()[0].images.shape[1] == 64 else 100)

    monkeypatch.setattr(FirstRecords, "pack", pack)
    monkeypatch.setattr(pack_estimate, "measure_loader", lambda job, **options: stated_fed(*STATED[kinds[-1]]))
    monkeypatch.setattr(knob_search, "measure_loader", lambda job, **options: stated_fed(200, 30_000))
    monkeypatch.setattr(knob_search, "measure_loop_rate", of_loop)


@pytest.mark.check
@needs_native
@pytest.mark.usefixtures("at_stated_rates")
def test_packs_are_offered_with_what_they_cost(job: MeasurementJob) -> None:
    offered = {knob.name: knob for knob in knobs_of(job, of_input=1 / 100).search(torch.device("cpu"), quick=True)}
    stored = offered["images stored with a shorter side of 128"]
    assert stored.measured
    assert not stored.exact
    assert "accuracy" in stored.cost
    assert stored.cures == "decode"
    assert stored.gain == pytest.approx(5)
    seekable = offered["a seekable pack"]
    assert seekable.exact
    assert seekable.measured
    assert "--mode seekable" in seekable.override
    assert seekable.gain == pytest.approx(2)


@needs_native
@pytest.mark.usefixtures("at_stated_rates")
def test_a_pack_gives_the_first_epoch_no_more_than_its_bytes(job: MeasurementJob) -> None:
    """Of which smaller images have fewer. Reading them takes 20 times as long as all else."""
    found = knobs_of(job, of_input=1 / 100, cold_s=20 / 100).search(torch.device("cpu"), quick=True)
    assert {knob.name: knob.gain for knob in found} == {
        "images stored with a shorter side of 128": pytest.approx(21 / (1 / 5 + 20 / 5)),
        "a seekable pack": pytest.approx(21 / (1 / 2 + 20)),
        "smaller decodes": pytest.approx(21 / (1 / 2 + 20)),
        "images of 64 pixels": pytest.approx(21 / (1 / 2 + 20)),
    }  # and neither decoded images in memory, nor a pack of the files


@pytest.mark.usefixtures("at_stated_rates")
def test_smaller_images_are_offered_where_the_network_takes_them(photos: Path) -> None:
    with closing(MeasurementJob.from_recipe(load_recipe(photos, ["model.factory=net.py:heavy"]))) as job:
        offered = knobs_of(job, of_input=1 / 100, of_loop=1 / 100).search(torch.device("cpu"), quick=True)
    found = next(knob for knob in offered if knob.override == "data.size=64")
    assert found.measured
    assert not found.exact
    assert "accuracy" in found.cost
    assert found.gain == pytest.approx(2)  # the loader then gives 200, of which the loop would take 250
    with closing(MeasurementJob.from_recipe(load_recipe(photos, ["model.factory=net.py:rigid"]))) as job:
        tried = knobs_of(job, of_input=1 / 100, of_loop=1 / 100)
        assert not any(knob.override == "data.size=64" for knob in tried.search(torch.device("cpu"), quick=True))
    assert any(one.startswith("data.size=64: ") for one in tried.missing)


def test_sizes_are_the_next_smaller_multiple() -> None:
    assert [choose_smaller_side(side) for side in (224, 256, 160, 128, 96, 95, 32)] == [
        192,
        224,
        128,
        96,
        64,
        None,
        None,
    ]


def test_batches_shrink_by_their_nearest_pixels(job: MeasurementJob) -> None:
    batch = job.load_batches()[0]
    other = shrink_batch(batch, 64)
    assert other.images.shape == (8, 64, 64, 3)
    assert torch.equal(other.images[:, 0, 0], batch.images[:, 0, 0])
    assert torch.equal(other.images[:, 32, 2], batch.images[:, 48, 3])
    assert torch.equal(other.labels, batch.labels)


@pytest.mark.check
def test_remote_records_are_offered_a_place_on_the_disk(photos: Path, tmp_path: Path) -> None:
    pack(photos.parent / "photos", tmp_path / "far", mode="keep", threads=1)
    with serving(tmp_path / "far") as server:
        near = [f"data.train={server.uri}", f"data.cache_folder={tmp_path / 'cache'}", "data.cache_gb=1"]
        with closing(MeasurementJob.from_recipe(load_recipe(photos, [*near, "data.cache=disk"]))) as job:
            assert fits_in_disk_cache(job)
            assert "data.cache=disk" not in offered_for(job)  # it is there already
        alone = [f"data.train={server.uri}", "data.cache=none"]
        with closing(MeasurementJob.from_recipe(load_recipe(photos, alone))) as job:
            assert list_lossless_modes(job) == []  # what is far away is fetched first
            assert choose_smaller_mode(job) is None
            found = knobs_of(job, of_input=0.5).search(torch.device("cpu"), quick=True)
            (local,) = [knob for knob in found if knob.override == "data.cache=disk"]
            assert not local.measured
            assert local.exact
            assert local.gain == pytest.approx(1 / 0.9, rel=0.05)  # a tenth of the time is reading
            first_epoch = knobs_of(job, of_input=0.5, cold_s=0.5).search(torch.device("cpu"), quick=True)
            assert not any(knob.override == "data.cache=disk" for knob in first_epoch)


def offered_for(job: MeasurementJob) -> list[str]:
    return [knob.override for knob in knobs_of(job, of_input=0.5).search(torch.device("cpu"), quick=True)]


def test_a_cache_has_to_find_room(photos: Path, tmp_path: Path) -> None:
    pack(photos.parent / "photos", tmp_path / "far", mode="keep", threads=1)
    with serving(tmp_path / "far") as server:
        small = [f"data.train={server.uri}", "data.cache=disk", "data.cache_gb=0.0001"]
        with closing(
            MeasurementJob.from_recipe(load_recipe(photos, [*small, f"data.cache_folder={tmp_path / 'c'}"]))
        ) as job:
            assert not fits_in_disk_cache(job)


def test_what_a_compiler_leaves_to_python_is_named(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_loop_rate(job: MeasurementJob, limit_s: float) -> Throughput:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, where it goes on behind a break
            job.setup.forward(job.setup.augment.normalise(job.load_batches()[0].images))
        return rate(4.0)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(knob_search, "measure_loop_rate", measure_loop_rate)
    with closing(MeasurementJob.from_recipe(load_recipe(photos, ["model.factory=net.py:talks"]))) as job:
        tried = knobs_of(job, of_input=1e-9, of_loop=0.5)
        found = tried.search(torch.device("cpu"), quick=False)
    (compiled,) = [knob for knob in found if knob.override == "compile=true"]
    assert compiled.gain == pytest.approx(2)
    assert "1 line of the network still runs in Python" in compiled.cost
    named = [one for one in tried.missing if one.startswith("compile=true")]
    (text,) = named
    assert text.startswith("compile=true leaves a part of the network to Python: ")
    assert re.search(r"net.py:\d+ 'print\(len\(x\)\)' in Talks \(0\): ", text)
