"""`headway tune RECIPE`: what it writes is the recipe with what helped, and is read again."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests._support import headway, packed_digits, refused, write_recipe
from tests.doctor._profile import profile, runs

from headway.core.profile import JointTiming, Knob, Profile
from headway.core.recipe import read_recipe
from headway.core.recipe_editor import edit_recipe
from headway.data.opening import open as open_dataset
from headway.data.pack_mode import PackMode
from headway.doctor import tune, tune_packs
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.pack_estimate import build_pack_command
from headway.doctor.tune import parse_changes
from headway.setup.recipe import TrainRecipe
from headway.training.runs import load_recipe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    packed_digits(tmp_path, mode="seekable")
    return tmp_path


@pytest.mark.check
def test_a_slow_decoder_is_cured_and_the_evidence_written(folder: Path) -> None:
    """PNGs that are decoded in each epoch, where memory would hold them decoded."""
    recipe = write_recipe(folder / "slow.yaml", data={"cache": "none"}, batch=60)
    said = headway("tune", recipe, "--quick", "--json").json()
    target = folder / "slow.tuned.yaml"
    assert said["written"] == str(target)
    text = target.read_text()
    assert text.startswith("# slow.yaml, tuned on ")
    loaded = read_recipe(target, (), TrainRecipe).recipe
    kept = [step["override"] for step in said["steps"] if step["kept"]]
    assert "data.cache=memory" in [step["override"] for step in said["steps"]]
    assert loaded.data.cache == ("memory" if "data.cache=memory" in kept else "none")
    assert (said["after"] is None) == (not kept)
    for step in said["steps"]:
        assert step["override"] in text
    assert loaded.precision == "fp32"  # nothing that changes the mathematics without leave
    assert loaded.batch == 60


def test_what_is_there_is_not_replaced(folder: Path) -> None:
    recipe = write_recipe(folder / "some.yaml")
    (folder / "some.tuned.yaml").write_text("mine")
    assert "exists" in refused("tune", recipe, status=2)
    assert (folder / "some.tuned.yaml").read_text() == "mine"
    assert "cannot be allowed" in refused("tune", recipe, "--allow", "everything", "--out", folder / "x.yaml", status=2)
    (folder / "taken.yaml").mkdir()
    taken = ("tune", recipe, "--out", folder / "taken.yaml", "--overwrite")
    assert "nothing can be written there" in refused(*taken, status=2)
    (folder / "other").mkdir()
    assert "relative paths" in refused("tune", recipe, "--out", folder / "other/x.yaml", status=2)


def test_overrides_are_read_as_changes() -> None:
    assert parse_changes("data.threads=2 channels_last=true") == {"data.threads": 2, "channels_last": True}
    assert parse_changes("headway pack SRC DST --mode=raw") == {}
    assert parse_changes("headway pack SRC DST --mode keep && headway train RECIPE data.train=DST") == {}
    assert parse_changes("") == {}


class Bench:
    """In place of measurements: knobs by examination, and how many times as fast a run is with each value."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, knobs: list[list[Knob]], gains: dict[str, float], **seen: Any
    ) -> None:
        self.examined, self.tried = list[dict[str, Any]](), list[str]()
        self._knobs, self._gains, self._seen = knobs, gains, {"runs": (), "together": None, **seen}
        monkeypatch.setattr(tune, "examine_job", self._examination)
        monkeypatch.setattr(tune, "_run_in_turns", self._in_turns)

    def _examination(self, job: MeasurementJob, *_: object) -> Profile:
        self.examined.append(dict(job.loaded.list_leaves()))
        knobs = self._knobs[min(len(self.examined), len(self._knobs)) - 1]
        return profile(knobs=tuple(knobs), **self._seen)

    def _in_turns(self, jobs: list[MeasurementJob], each_s: float) -> list[tuple[float, ...]]:
        rates = []
        for job in jobs:
            leaves = dict(job.loaded.list_leaves())
            self.tried.append(str(leaves["data.train"]))
            texts = {f"{key}={value}" for key, value in leaves.items()}
            rates.append(100.0 * math.prod(gain for text, gain in self._gains.items() if text in texts))
        return [tuple(rates)] * 4


def knob(override: str, gain: float, **more: Any) -> Knob:
    given = {"cures": "compute", "measured": True, "exact": True, "cost": ""}
    return Knob(name=override, override=override, images_s=100 * gain, gain=gain, **given | more)


def test_only_a_kept_knob_has_the_job_examined_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(folder / "some.yaml", channels_last=False)
    first = [
        knob("data.prefetch_batches=5", 1.5),
        knob("channels_last=true", 1.4),
        knob("data.prefetch_batches=6", 1.3),
        knob("batch=40", 2),
    ]
    first[3] = first[3].model_copy(update={"exact": False})
    bench = Bench(monkeypatch, [first, [knob("data.prefetch_batches=7", 1.2), first[0]]], {"channels_last=True": 1.4})
    found = tune.tune(recipe, [])
    assert [one.override for one in found.tries] == [
        "data.prefetch_batches=5",
        "channels_last=true",
        "data.prefetch_batches=7",
    ]
    assert [one.override for one in found.kept] == ["channels_last=true"]
    assert len(bench.examined) == 2
    assert found.to_text().endswith(f"Wrote {found.written}: headway train {found.written}")
    assert bench.examined[1]["channels_last"] is True
    assert read_recipe(found.written, (), TrainRecipe).recipe.channels_last is True


def test_a_tuned_recipe_is_tuned_again_and_says_what_it_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(folder / "some.yaml", channels_last=False)
    before = recipe.read_text()
    recipe.write_text(f"\ufeff# Why.\n{before}", encoding="utf-8")
    Bench(monkeypatch, [[knob("channels_last=true", 1.4)], []], {"channels_last=True": 1.4})
    first = tune.tune(recipe, []).written.read_text()
    assert first.endswith("\n\n# Why.\n" + before.replace("channels_last: false", "channels_last: true"))
    Bench(monkeypatch, [[]], {})
    again = tune.tune(folder / "some.tuned.yaml", [])
    assert again.written.read_text().endswith(f"\n\n{first}")
    assert again.notes == []
    batch = re.search(r"^batch: (.*)$", before, re.M)
    assert batch is not None
    text = before.replace(batch[0], f"batch: &b {batch[1]}  # a value that counts twice\n# Where.\nmicro_batch: *b")
    recipe.write_text(text)
    lost = tune.tune(recipe, ["batch=60"], overwrite=True)
    assert lost.notes == ["1 comment line of the recipe could not be kept: # Where."]
    assert read_recipe(lost.written, (), TrainRecipe).recipe.micro_batch == int(batch[1])


def test_many_tries_need_no_more_than_one_examination(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [knob(f"data.prefetch_batches={number}", 1.5) for number in range(4, 14)]
    bench = Bench(monkeypatch, [many], {})
    found = tune.tune(write_recipe(folder / "some.yaml"), [])
    assert len(found.tries) == 10 > tune.ROUNDS
    assert found.to_text().endswith("some.tuned.yaml is the unchanged recipe, with the trials as comments.")
    assert len(bench.examined) == 1


def test_more_batches_are_ready_where_the_loop_waits_for_a_loader_that_is_faster(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = JointTiming(input_alone=1e-4, loop_alone=2e-4, input_beside=1e-4, loop_beside=2e-4, cores=2)
    slower = sides.model_copy(update={"input_beside": 3e-4})
    waits = [one.model_copy(update={"wait_share": 0.2}) if one.name == "warm" else one for one in runs()]
    with closing(
        MeasurementJob.from_recipe(load_recipe(write_recipe(folder / "some.yaml"), ["data.prefetch_batches=4"]))
    ) as job:
        (offered,) = tune.suggest_more_prefetch(job, profile(runs=waits, together=sides))
        assert (offered.override, offered.gain) == ("data.prefetch_batches=8", pytest.approx(1.25))
        assert tune.suggest_more_prefetch(job, profile(runs=waits, together=slower)) == []
        assert tune.suggest_more_prefetch(job, profile(runs=waits, together=None)) == []
        steady = [one.model_copy(update={"wait_share": 0.0}) for one in runs()]
        assert tune.suggest_more_prefetch(job, profile(runs=steady, together=sides)) == []
    Bench(
        monkeypatch, [[]], {"data.prefetch_batches=6": 1.2, "data.prefetch_batches=12": 1.2}, runs=waits, together=sides
    )
    found = tune.tune(folder / "some.yaml", ["data.prefetch_batches=3"])
    assert [(one.override, one.kept) for one in found.tries] == [
        ("data.prefetch_batches=6", True),
        ("data.prefetch_batches=12", False),
    ]


@pytest.mark.parametrize("gain", [2.0, 0.5])
def test_a_lossless_pack_stays_where_it_helps(folder: Path, monkeypatch: pytest.MonkeyPatch, gain: float) -> None:
    recipe = write_recipe(folder / "some.yaml", data={"train": "digits", "eval": None})
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, []))) as job:
        lossless = build_pack_command(job, PackMode(kind="keep")).format_command(job.loaded)
        other = build_pack_command(job, PackMode(kind="encode", side=4)).format_command(job.loaded)
    knobs = [knob(other, 3.0, exact=False, cures="decode"), knob(lossless, 2.0, cures="storage")]
    bench = Bench(monkeypatch, [knobs, []], {"data.train=some.keep": gain})
    found = tune.tune(recipe, [])
    assert [one.override for one in found.tries] == [lossless]
    assert "some.keep" in bench.tried
    assert (folder / "some.keep").exists() == (gain > 1)
    assert not (folder / "some.4").exists()
    train = read_recipe(found.written, (), TrainRecipe).recipe.data.train
    assert train == ("some.keep" if gain > 1 else "digits")
    assert lossless in found.written.read_text()
    if gain > 1:
        assert len(open_dataset(folder / "some.keep")) == len(open_dataset(folder / "digits"))


def test_a_pack_that_has_no_room_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(folder / "some.yaml", data={"train": "digits", "eval": None})
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, []))) as job:
        lossless = build_pack_command(job, PackMode(kind="keep")).format_command(job.loaded)
    Bench(monkeypatch, [[knob(lossless, 2.0)]], {"data.train=some.keep": 2.0})
    with monkeypatch.context() as full:
        full.setattr(tune_packs, "read_free_disk_bytes", lambda folder: 10_000)
        found = tune.tune(recipe, [])
    assert not found.tries
    assert not (folder / "some.keep").exists()
    assert any("are free" in note and "was not tried" in note for note in found.notes)
    (folder / "some.keep").mkdir()
    (folder / "some.keep" / "mine").touch()
    found = tune.tune(recipe, [], overwrite=True)
    assert any("exists already" in note for note in found.notes)
    assert (folder / "some.keep" / "mine").exists()


def test_nothing_is_left_of_a_tuning_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = write_recipe(folder / "some.yaml", data={"train": "digits", "eval": None})
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, []))) as job:
        lossless = build_pack_command(job, PackMode(kind="keep")).format_command(job.loaded)
    bench = Bench(monkeypatch, [[knob(lossless, 2.0)]], {"data.train=some.keep": 2.0})
    turns = bench._in_turns

    def stop(jobs: list[MeasurementJob], each_s: float) -> list[tuple[float, ...]]:
        assert (folder / "some.keep").exists()
        if len(bench.tried) >= 2:
            raise KeyboardInterrupt
        return turns(jobs, each_s)

    monkeypatch.setattr(tune, "_run_in_turns", stop)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(recipe, [])
    assert not (folder / "some.keep").exists()
    assert not (folder / "some.tuned.yaml").exists()


def test_the_recipe_is_written_as_it_was_given(folder: Path) -> None:
    path = folder / "short.yaml"
    path.write_text(
        "data: digits.packed/train\nmodel: {factory: 'net.py:linear'}\noptimizer: {name: sgd, lr: 0.02}\nbatch: 30\n"
        "epochs: 2\n"
    )
    text = edit_recipe(path, ["seed=3"], {"data.cache": "memory", "channels_last": False}, TrainRecipe)
    assert yaml.safe_load(text) == {
        "data": {"train": "digits.packed/train", "cache": "memory"},
        "model": {"factory": "net.py:linear"},
        "optimizer": {"name": "sgd", "lr": 0.02},
        "batch": 30,
        "epochs": 2,
        "seed": 3,
        "channels_last": False,
    }
