"""`bench.doctor`: what it makes of the runs of a case, and of what the doctor and others say."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from bench._doctor import measure, peers, plain, regimes, user
from bench._doctor.around import Place
from bench._doctor.cases import drawn
from bench._doctor.data import Sets
from bench._doctor.injectors import INJECTORS, NONE
from bench._doctor.jobs import BASES, BIG, Job, network, own
from bench._doctor.table import Judged, Table
from bench._doctor.trial import How, moved, tried, untried
from hypothesis import given
from hypothesis import strategies as st
from tests._support import packed_digits
from tests.data.tiers._server import make_pack
from tests.test_doctor_bench import colours

import headway
from headway.core.profile import Knob, Profile, Verdict
from headway.model.model_size import measure_model_size

# Rates.


def write_run(folder: Path, steps: int, *, every: int = BIG, evaluated: int = 0, log: int = 1) -> Path:
    """A run of steps of a tenth of a second, 30 of the data set's 900 samples each, and stalls of a second."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"checkpoint": {"every_steps": every}}))
    seconds, lines = 5.0, []  # what came before the first step
    for step in range(1, steps + 1):
        seconds += 0.1
        stalls = [step % every == 0, bool(evaluated) and step % evaluated == 0]
        at = {"step": step, "position": 30 * step, "epoch": step / 30, "seconds": seconds}
        if any(stalls) or step % log == 0:
            lines.append({"kind": "train", **at})
        seconds += sum(stalls)
        if stalls[1]:
            lines.append({"kind": "evaluate", **at, "seconds": seconds})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"kind": "train", "st')  # one is being written
    return folder


def test_a_rate_is_that_between_logging_steps(tmp_path: Path) -> None:
    assert measure.rate_of(write_run(tmp_path / "run", 100, log=10)) == pytest.approx(300)


@given(st.integers(2, 9), st.integers(60, 90))
def test_whole_periods_of_stalls_count(period: int, steps: int) -> None:
    """However many steps came after the last one."""
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        whole = 30 * period / (0.1 * period + 1)
        saved = write_run(Path(name) / "saved", steps, every=period)
        assert measure.rate_of(saved) == pytest.approx(whole)
        evaluated = write_run(Path(name) / "evaluated", steps, evaluated=period, log=7)
        assert measure.rate_of(evaluated) == pytest.approx(whole)


def test_of_cold_files_the_first_epoch_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 60)
    lines = (run / "metrics.jsonl").read_text().splitlines()[:-1]
    slowly = [json.loads(line) for line in lines]
    for one in slowly:  # until the files are in memory
        one["seconds"] += 0.1 * min(one["step"], 30)
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in slowly))
    assert measure.rate_of(run, first_epoch=True) == pytest.approx(150)
    assert measure.rate_of(run) > 170


def test_too_few_logging_steps_tell_no_rate(tmp_path: Path) -> None:
    for number, run in enumerate((write_run(tmp_path / "0", 1), write_run(tmp_path / "1", 60, every=40))):
        with pytest.raises(ValueError, match="it came to 1 logging steps"):
            measure.rate_of(run)
        assert len(measure.records_of(run)) == (1, 60)[number]
    assert measure.records_of(tmp_path / "nothing") == []


def digits_job(factory: str = "Perceptron") -> Job:
    recipe = {
        **network(own(factory)),
        "data.threads": 1,
        "optimizer.name": "sgd",
        "optimizer.lr": 0.01,
        "batch": 30,
        "epochs": BIG,
        "precision": "fp32",
        "checkpoint.every_steps": BIG,
    }
    return Job("digits", recipe, {"OMP_NUM_THREADS": "1"})


@pytest.mark.check
def test_a_run_is_ended_by_a_signal_and_tells_its_rate(tmp_path: Path) -> None:
    packed = packed_digits(tmp_path, mode="seekable")
    place = Place(packed / "train", str(packed / "train"))
    rate, waited = measure.trained(digits_job(), place, tmp_path / "one", 0.5, ["log_every_steps=5"])
    assert rate > 0
    assert 0 <= waited <= 1
    assert (tmp_path / "one/run/summary.json").exists()
    with pytest.raises(measure.JobError, match="no 'Nothing'"):
        measure.trained(digits_job("Nothing"), place, tmp_path / "other", 0.5)


@pytest.mark.check
def test_a_run_of_two_processes_is_ended_too(tmp_path: Path) -> None:
    packed = packed_digits(tmp_path, mode="seekable")
    place = Place(packed / "train", str(packed / "train"))
    rate, _ = measure.trained(digits_job().but(procs=2), place, tmp_path / "two", 0.5)
    assert rate > 0


def test_a_knob_is_taken_where_a_recipe_has_it() -> None:
    assert measure.Cure.of(profile("data.threads=2 model.args={a: 1}")) is None, "no more than one word a key"
    assert measure.Cure.of(profile("data.threads=2 batch=64")) == measure.Cure(("data.threads=2", "batch=64"))
    assert measure.Cure.of(profile("'data.crop={name: random}'")) == measure.Cure(("data.crop={name: random}",))
    assert measure.Cure.of(profile("")) is None
    assert measure.Cure.of(profile()) is None


def test_a_pack_that_the_doctor_proposes_is_made(tmp_path: Path) -> None:
    source = make_pack(tmp_path, 12)
    two = f"headway pack {source} small --mode resize=16,quality=90 && headway train r.yaml data.train=small"
    cure = measure.Cure.of(profile(two))
    assert cure == measure.Cure(pack=(str(source), "resize=16,quality=90"))
    assert cure is not None
    small = cure.packed(tmp_path / "small")
    assert small is not None
    with closing(headway.open(small)) as made:
        assert len(made) == 12
    with pytest.raises(measure.JobError, match="the pack ended with status"):
        cure.packed(tmp_path / "small")  # it is there already
    assert measure.Cure(("batch=2",)).packed(tmp_path / "none") is None


def profile(*overrides: str) -> Profile:
    """What a doctor says who knows these knobs."""
    knobs = [
        Knob(name="n", cures="c", override=one, images_s=2, gain=2, measured=True, exact=True, cost="")
        for one in overrides
    ]
    verdict = Verdict(
        kind="host/IO limited",
        stage="decode",
        sentence="It is.",
        next_stage="compute",
        most=2,
        confirmed=True,
        unexplained="",
    )
    empty: dict[str, Any] = dict.fromkeys(("environment", "ceilings", "runs", "not_measured"), ())
    return Profile(
        name="run",
        quick=False,
        machine={},
        batch=1,
        ranks=1,
        regime="later epochs",
        together=None,
        threads=None,
        launch={},
        multiply_adds=None,
        facts={},
        predicted=1,
        measured=1,
        verdict=verdict,
        knobs=tuple(knobs),
        seconds=1,
        **empty,
    )


# The table.


def record(number: int, said: str = "decode", **changes: Any) -> dict[str, Any]:
    """A case of two injectors, of which the first is right: 100 images/s, 300 without it, 110 without the other."""
    return {
        "seed": 1,
        "number": number,
        "case": "decode + transform",
        "injected": ["decode", "transform"],
        "truth": {"decode": ["decode"], "transform": ["transform"]},
        "images_s": {"case": [100, 90, 150], "without decode": [300], "without transform": [120], "knob": [190, 200]},
        "said": {"stage": said, "predicted": 110.0, "override": "data.threads=2", "gain": 2.34},
        "calibration": [1.0, 1.01],
        "attempts": 1,
        "commit": "a",
    } | changes


def test_the_truth_is_the_injector_whose_removal_gives_most() -> None:
    one = Judged(record(0))
    assert one.gains == {"decode": 3, "transform": 1.2}
    assert one.truth == {"decode"}
    assert one.right
    assert not Judged(record(0, said="transform")).right
    assert one.error == pytest.approx(0.1)
    assert one.gain == pytest.approx(1.95)
    assert one.gain_error == pytest.approx(0.2)


def test_of_two_that_give_as_much_either_is_right_and_without_a_gain_none() -> None:
    alike = {"case": [100], "without decode": [200], "without transform": [195]}
    assert Judged(record(0, images_s=alike)).truth == {"decode", "transform"}
    void = {"case": [100], "without decode": [108], "without transform": [99]}
    assert Judged(record(0, images_s=void)).truth == set()
    assert Judged(record(0, images_s={"case": [100]})).truth == {"decode", "transform"}, "nothing was left out"


def test_claims_are_made_of_the_cases_that_count() -> None:
    records = [record(number, said="decode" if number < 9 else "storage") for number in range(10)]
    for number, one in enumerate(records):
        one["said"] = {**one["said"], "predicted": 100.0 + number}
    void = record(10, images_s={"case": [100], "without decode": [100]})
    failed = record(11)
    failed["said"] = {"failed": "the doctor ended with status 1: Oh."}
    del failed["images_s"]["knob"]
    table = Table([*records, void, failed])
    claims = {claim.name: claim.value for claim in table.claims()}
    assert claims["stage_named"] == pytest.approx(9 / 11)
    assert claims["predict_median_error"] == pytest.approx(0.045)
    assert claims["predict_p90_error"] == pytest.approx(np.percentile(np.arange(10) / 100, 90))
    assert claims["gain_median_error"] == pytest.approx(0.2)
    rows = table.rows()
    assert len({len(row) for row in rows}) == 1
    assert len(rows) == 13
    assert "none shows" in rows[11]
    assert "the doctor failed" in rows[12]
    notes = "\n".join(table.notes())
    assert "11 of 12 cases count" in notes
    assert "Case 11: the doctor ended with status 1: Oh." in notes


def test_what_a_first_epoch_cannot_show_is_not_tried() -> None:
    said = {"predicted": 100.0, "gain": 4.0}
    assert untried(measure.Cure(("threads=2",)), said, samples=10) == ""
    assert "filled first" in untried(measure.Cure(("data.cache=disk",)), said, samples=10**6)
    pack = measure.Cure(pack=("images", "seekable"))
    assert "over in 4.0 s" in untried(pack, said, samples=1600)
    assert untried(pack, said, samples=2000) == ""


def test_cases_on_an_unsteady_machine_are_told() -> None:
    steady, shaken = record(0, attempts=2), record(1, calibration=[1.0, 0.9], attempts=5)
    assert moved(shaken) == pytest.approx(0.1)
    refused = record(2)
    refused["said"] = {**refused["said"], "refused": "no such key"}
    del refused["images_s"]["knob"]
    untried = record(3)
    untried["said"] = {**untried["said"], "untried": "a cache"}
    del untried["images_s"]["knob"]
    table = Table([steady, shaken, refused, untried])
    assert "2 were measured again" in table.notes()[1]
    assert "in 1 it never stayed within 3%" in table.notes()[1]
    assert "Case 2: its first knob was refused: no such key" in table.notes()
    assert "Case 3: its first knob was not tried: a cache" in table.notes()
    assert ("refused" in table.rows()[3], "untried" in table.rows()[4]) == (True, True)
    assert len(table.claims()) == 4


def test_without_a_record_nothing_is_claimed() -> None:
    table = Table([])
    assert table.claims() == []
    assert len(table.rows()) == 1
    assert "0 of 0 cases count" in table.notes()[0]


# Regimes and peers.


def test_the_two_networks_differ_in_compute_as_the_real_ones() -> None:
    assert pytest.approx(5.8, abs=0.01) == regimes.RATIO
    for few, many in regimes.pairs():
        assert regimes.multiply_adds(many) / regimes.multiply_adds(few) == pytest.approx(regimes.RATIO, rel=0.25)
    assert len(regimes.pairs()) > 10
    model, images = user.Blocks(7, channels=6), torch.zeros(1, 3, 64, 64)
    assert measure_model_size(model, images).multiply_adds == regimes.multiply_adds(6, 64, 7)


def test_the_pair_is_taken_between_whose_times_the_loader_lies() -> None:
    found = [((few, 3 * few), few * 1e-4, few * 4e-4) for few in range(1, 20)]
    assert regimes.nearest(found, 1e-3) == (5, 15)
    regime = regimes.Regime("AlexNet", 5, 900.0, 0.4, "host/IO limited", "decode")
    assert regime.right
    assert regimes.Regime("AlexNet", 5, 900.0, 0.1, "host/IO limited", "decode").truth is None
    assert not regimes.Regime("AlexNet", 5, 900.0, 0.05, "host/IO limited", "decode").right
    assert len(regime.row()) == len(regimes.HEADING)
    recipe = regimes.job_of(5).recipe
    assert recipe["model.args"] == {"channels": 5}


def test_a_diagnosis_is_read_from_summaries_of_old_and_new_form() -> None:
    assert peers.diagnosis({"primary_diagnosis": {"status": "INPUT-BOUND"}}) == "INPUT-BOUND"
    assert peers.diagnosis({"step_time": {"diagnosis": {"status": "BALANCED"}}}) == "BALANCED"
    assert peers.diagnosis({}) == "nothing"


def test_the_plain_loop_has_the_same_samples(tmp_path: Path) -> None:
    packed = colours(tmp_path, 8) / "train"
    images, here = plain.Images(str(packed), None), headway.open(packed)
    assert len(images) == len(here) == 12
    for place in range(len(images)):
        pixels, label = images[place]
        assert pixels.numpy().tobytes() == bytes(here.read([place])[0])
        assert label == int(here.label[place])
    assert plain.Images(str(packed), 16)[0][0].shape == (16, 16, 3)
    here.close()


@pytest.mark.check
@pytest.mark.parametrize("procs", [1, 2])
def test_the_profiler_says_what_is_largest(tmp_path: Path, procs: int) -> None:
    packed = colours(tmp_path)
    job = BASES["cifar"].but({"batch": 8}, procs=procs)
    said = peers.profiled(job, Place(packed / "train", str(packed / "train")), made(tmp_path / "peers", job, packed))
    assert said.endswith("%)"), said


def made(folder: Path, job: Job, packed: Path) -> Path:
    folder.mkdir()
    job.write(folder / "recipe.yaml", str(packed / "train"))
    return folder


@pytest.mark.check
def test_a_case_is_measured_and_the_doctor_is_right(tmp_path: Path) -> None:
    (injector,) = [one for one in INJECTORS if one.name == "transform"]
    case = drawn(1, 0, Random("test"), [injector], "cifar")
    found = tried(case, Sets(colours(tmp_path, 200), tmp_path / "sets"), tmp_path / "case", How(1.0, 1, quick=True))
    assert found["said"]["stage"] == "transform", found["said"]
    assert len(found["images_s"]["case"]) == 1
    judged = Judged(found)
    assert judged.right
    assert judged.error is not None


def test_an_injector_that_is_none_has_a_truth_too() -> None:
    case = drawn(1, 0, Random(1), [NONE])
    assert case.injected[0].truth == ("compute",)
    assert case.text == "none"
