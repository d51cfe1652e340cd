"""`augment.where: auto`: what the doctor measured decides, else the kind of the device; the pixels are the same."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests._support import collect_messages, headway, packed_digits, records, write_recipe
from tests.doctor._profile import profile

from headway.core.profile import Knob, Profile, Throughput
from headway.core.recipe import build_recipe
from headway.core.run_folder import RunFolder
from headway.data import opening
from headway.doctor import examination, knob_search
from headway.doctor.knob_search import KnobSearch
from headway.doctor.loader_measurement import LoaderMeasurement
from headway.doctor.loop_measurement import LoopMeasurement
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.sync_counter import SyncCounts
from headway.doctor.throughput_model import ThroughputModel
from headway.report.dry_run_text import format_dry_run
from headway.setup.augment_place import choose_augment_place
from headway.setup.build import build_setup
from headway.setup.recipe import TrainRecipe
from headway.training.dry_run import dry_run
from headway.training.runs import load_recipe, reload_recipe

# Of a run that the device limits.
VERDICT = profile().verdict.model_copy(update={"kind": "device limited", "stage": "compute"})
CROPS = ("data.crop=random", "data.size=6")
MOVES = {"flip": True, "translate": 1}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    packed_digits(tmp_path, mode="seekable")
    return write_recipe(tmp_path / "photos.yaml", augment=MOVES)


def write_profile(recipe: Path, place: str | None = None, gain: float = 1.2, **changes: Any) -> Profile:
    found = profile(**{"verdict": VERDICT, **changes})
    if place is not None:
        override = f"augment.where={place}"
        knob = {"cures": "augment", "images_s": 1e3, "measured": True, "exact": True, "cost": ""}
        moved = Knob(name="augmentation", override=override, gain=gain, **knob)
        found = found.model_copy(update={"knobs": (*found.knobs, moved)})
    found.write(recipe.with_suffix(".profile.json"))
    return found


def choose(recipe: Path, device_type: str = "cpu", *overrides: str) -> tuple[str, str]:
    with closing(opening.open(recipe.parent / "digits.packed/train")) as train:
        return choose_augment_place(load_recipe(recipe, overrides), device_type, train)


def test_without_a_profile_the_kind_of_the_device_decides(recipe: Path) -> None:
    assert choose(recipe) == ("host", "the device is a CPU")
    assert choose(recipe, "cuda") == ("device", "the device has time for it")
    # Nor does a recipe of a Python program have one beside it.
    tree = {**yaml.safe_load(recipe.read_text()), "augment": MOVES}
    write_profile(recipe, "device")
    assert choose_augment_place(build_recipe(tree, (), TrainRecipe), "cpu", None).where == "host"


@pytest.mark.parametrize("place", ["host", "device"])
@pytest.mark.parametrize(("device_type", "device"), [("cpu", "cpu"), ("cuda", "NVIDIA H100")])
def test_the_place_that_was_measured_to_be_faster_is_taken(
    recipe: Path, place: str, device_type: str, device: str
) -> None:
    write_profile(recipe, place, machine={"device": device})
    where, reason = choose(recipe, device_type)
    assert (where, reason) == (place, "1.20 times the images/s, as the doctor measured in photos.profile.json")
    # What the recipe names stays, and so does a recipe without anything to move.
    assert choose(recipe, device_type, "augment.where=host") == ("host", "augment.where says so")
    assert "images/s" not in choose(recipe, device_type, "augment={cutout: 2}")[1]


def test_a_profile_without_a_faster_place_keeps_the_one_that_it_measured(recipe: Path) -> None:
    """So that a second examination, at the new place, does not move it back."""
    write_profile(recipe, augment_where="device")
    assert choose(recipe) == ("device", "photos.profile.json names no faster place")
    # A gain within the noise is none.
    write_profile(recipe, "host", 1.02, augment_where="device")
    assert choose(recipe)[0] == "device"
    write_profile(recipe)
    assert choose(recipe) == ("host", "the device is a CPU; photos.profile.json names no faster place")


def test_a_profile_that_says_nothing_about_this_run_does_not_count(recipe: Path) -> None:
    write_profile(recipe, "device", machine={"device": "NVIDIA H100"})
    assert choose(recipe) == ("host", "the device is a CPU; photos.profile.json is of a GPU")
    verdict = VERDICT.model_copy(update={"confirmed": False})
    write_profile(recipe, "device", verdict=verdict)
    assert choose(recipe) == ("host", "the device is a CPU; photos.profile.json was not confirmed")
    recipe.with_suffix(".profile.json").write_text('{"version": 9}')
    with collect_messages() as said:
        assert choose(recipe) == ("host", "the device is a CPU")
    assert len(said) == 1
    assert "photos.profile.json" in said[0]
    assert said[0].endswith("augment.where follows the device.")


def test_a_gpu_crops_where_decoding_limits(recipe: Path) -> None:
    limits, gpu = profile().verdict, {"device": "NVIDIA H100"}
    write_profile(recipe, "host", verdict=limits, machine=gpu)
    assert choose(recipe, "cuda", *CROPS) == ("device_crops", "the loader was the limit in photos.profile.json")
    # It keeps no scaled images, no larger ones than 3.5 times the batch's, and none that are read in place.
    for other in ("data.scaled=true", "data.size=2", "data.cache=none", "data.decoder=pillow", "data.crop=center"):
        assert choose(recipe, "cuda", *CROPS, other)[0] == "host"
    write_profile(recipe, machine=gpu, augment_where="device_crops")
    assert choose(recipe, "cuda", *CROPS)[0] == "device_crops"
    write_profile(recipe, verdict=limits)
    assert choose(recipe, "cpu", *CROPS)[0] == "host"


def test_a_cpu_crops_in_the_loader_and_says_so(recipe: Path, tmp_path: Path) -> None:
    asked = headway("train", recipe, "--run", tmp_path / "asked", "data.crop=random", "augment.where=device_crops")
    assert (
        "augment.where: device_crops needs a GPU that keeps the decoded training set, which is kept in memory here"
        in asked.err
    )
    headway("train", recipe, "--run", tmp_path / "plain", "data.crop=random")
    losses = [[one["loss"] for one in records(tmp_path / name, "train")] for name in ("asked", "plain")]
    assert losses[0] == losses[1]
    found = dry_run(recipe, ["data.crop=random", "augment.where=device_crops"], compiles=False)
    assert found.workload.input.on_device[:3] == ("random crop", "flip", "translate")
    assert found.workload.input.on_host == ()
    assert "crops, flip and translate on the device: augment.where says so" in format_dry_run(found)
    plain = dry_run(recipe, ["data.crop=random", "augment={cutout: 2}"], compiles=False)
    assert "crops on the host: the device is a CPU" in format_dry_run(plain)


def test_a_run_and_its_dry_run_say_the_place_and_train_the_same(recipe: Path, tmp_path: Path) -> None:
    plain = headway("train", recipe, "--dry-run", "--out", tmp_path / "w.json").out
    assert "on host      decode, flip, translate\n" in plain
    assert "flip and translate on the host: the device is a CPU\n" in plain
    headway("train", recipe, "--run", tmp_path / "host")
    write_profile(recipe, "device")
    found = dry_run(recipe, compiles=False)
    assert found.workload.input.on_device[:2] == ("flip", "translate")
    assert found.augment_place == ("device", "1.20 times the images/s, as the doctor measured in photos.profile.json")
    assert found.to_json()["augment_place"]["where"] == "device"
    headway("train", recipe, "--run", tmp_path / "device", "epochs=1")
    run = json.loads((tmp_path / "device/provenance.json").read_text())
    assert run["origins"]["augment.where"].startswith("auto: 1.20 times")
    assert yaml.safe_load((tmp_path / "device/recipe.yaml").read_text())["augment"]["where"] == "device"
    assert reload_recipe(RunFolder(tmp_path / "device")).path == recipe
    headway("train", "--resume", tmp_path / "device", "epochs=2")
    losses = [[one["loss"] for one in records(tmp_path / name, "train")] for name in ("host", "device")]
    assert losses[0] == losses[1]
    # Not asked, not said.
    assert dry_run(recipe, ["augment={cutout: 2}"], compiles=False).augment_place is None


@pytest.mark.parametrize(("now", "other", "cures"), [("host", "device", "augment"), ("device", "host", "normalise")])
def test_the_doctor_measures_the_other_place(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, now: str, other: str, cures: str
) -> None:
    """At stated rates: the loader takes 10 of 12 seconds, and 5 with the options of the other place."""
    asked = list[dict[str, Any]]()

    def feed(rate: float) -> LoaderMeasurement:
        stages = {"storage": 0.0, "decode": 0.5, "augment": 0.5, "collate": 0.0}
        stated = Throughput(value=rate, low=rate, high=rate, windows=1)
        return LoaderMeasurement(stated, {name: share / rate for name, share in stages.items()}, 100, 1, 3)

    def measure(job: MeasurementJob, limit_s: float, **options: Any) -> LoaderMeasurement:
        asked.append(options)
        return feed(0.2)

    monkeypatch.setattr(knob_search, "measure_loader", measure)
    sides: Any = {"input": feed(0.1).seconds, "loop": {"normalise": 1.0, "compute": 1.0}, "stall": {}}
    if now == "device":
        sides["loop"]["normalise"] = 20.0
    model = ThroughputModel(sides, 1.0, 1.0)
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, [f"augment.where={now}"]))) as job:
        loop = LoopMeasurement(feed(1.0).rate, sides["loop"], {60: 60.0}, SyncCounts())
        search = KnobSearch(job, model, None, feed(0.1), None, loop, 0.1, 600)
        monkeypatch.setattr(search, "_measure_ratio", lambda text, changes: 0.5)
        knobs = list(search._suggest_augmentation_place(torch.device("cpu")))
        # Where it takes no time, nothing is tried.
        idle = ThroughputModel(
            {"input": {"augment": 0.0}, "loop": {"normalise": 0.0, "compute": 1.0}, "stall": {}}, 1, 1
        )
        none = KnobSearch(job, idle, None, feed(0.1), None, loop, 0.1, 600)
        assert not list(none._suggest_augmentation_place(torch.device("cpu")))
    assert [(one.override, one.cures, one.measured) for one in knobs] == [(f"augment.where={other}", cures, True)]
    assert asked == [{"flip": False, "translate": 0} if other == "device" else {"flip": "random", "translate": 1}]
    assert knobs[0].gain == pytest.approx(10 / 5 if now == "host" else 21 / 10.5)


def test_a_setup_resolves_it_and_an_examination_records_it(recipe: Path) -> None:
    for overrides, place in {(): "host", ("augment.where=device",): "device", ("augment={cutout: 2}",): None}.items():
        with closing(MeasurementJob.from_recipe(load_recipe(recipe, overrides))) as job:
            assert examination.find_augment_place(job.setup) == place
    write_profile(recipe, "device")
    setup = build_setup(load_recipe(recipe, ()))
    with closing(setup.inputs):
        assert setup.recipe.augment.where == "device"
