"""Several ranks: a slow one is named by its number, what the exchange adds is told apart; two real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from bench._hosts import Hosts
from tests._support import finished, packed_digits, write_recipe

from headway.core.profile import JointTiming, PipelineSide, Profile, StageCeiling, Throughput, Verdict
from headway.doctor.budget import Budget
from headway.doctor.examination import examine_job
from headway.doctor.measurement_job import MeasurementJob
from headway.doctor.rank_examination import join_profiles
from headway.doctor.rank_exchange import CommTrial, ExchangeMeasurement, JointRate, select_faster
from headway.launch.hosts import Host, parse_hosts
from headway.launch.launcher import launch
from headway.training.runs import load_recipe

SLOW = """
import os
import time

def some_slow(images, labels, keys):
    if os.environ.get("RANK") == "1":
        time.sleep(0.03)
    return images, labels
"""


MANY = """
from torch import nn

def many(num_classes):
    layers = [nn.Linear(50, 50) for _ in range(40)]
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), *layers, nn.Linear(50, num_classes))
"""
"""Each layer 10 kB of gradients."""

LAUNCHER = """
import sys
from headway.launch.hosts import parse_hosts
from headway.launch.launcher import launch
sys.exit(launch(sys.argv[2:], parse_hosts(None, sys.argv[1]), respawn=False))
"""


def profile(loop_s: float, *, batch: int = 10) -> Profile:
    def one(stage: str, side: PipelineSide, seconds: float) -> StageCeiling:
        return StageCeiling(stage=stage, side=side, resource="device", seconds=seconds, how="stated")

    return Profile(
        name="stated",
        quick=True,
        machine={},
        environment=(),
        batch=batch,
        ranks=1,
        regime="later epochs",
        ceilings=(one("decode", "input", 1e-5), one("compute", "loop", loop_s), one("evaluate", "stall", 0.0)),
        together=JointTiming(
            input_alone=1e-5, loop_alone=loop_s, input_beside=1e-5, loop_beside=loop_s, cores=2
        ),
        threads=None,
        launch={},
        multiply_adds=None,
        facts={},
        predicted=1 / loop_s,
        measured=None,
        runs=(),
        verdict=Verdict(
            kind="device limited", stage="compute", sentence="", next_stage="", most=1, confirmed=False, unexplained=""
        ),
        knobs=(),
        not_measured=(),
        seconds=0,
    )  # fmt: skip


def joint(value: float, steps: int = 9) -> JointRate:
    return JointRate(rate(value), steps)


def rate(value: float, spread: float = 0.0) -> Throughput:
    return Throughput(value=value, low=value * (1 - spread), high=value * (1 + spread), windows=1)


def test_ranks_that_are_alike_and_no_exchange_give_their_sum() -> None:
    found = join_profiles([profile(1e-3), profile(1e-3)], joint(2000), joint(2000), "cpu", between=False)
    assert found.ranks == 2
    assert found.predicted == pytest.approx(2000)
    assert found.verdict.stage == "compute"
    assert found.find_ceiling("reduce").seconds == pytest.approx(0, abs=1e-9)  # type: ignore[union-attr]


def test_waits_inside_of_the_network_are_told_apart_from_sums_of_gradients() -> None:
    """Of 30 ms that no rank takes alone 18 are waited for halos and statistics and 2 for gradients: the other 10 are
    the work in parts. Together they are what they were."""
    now = JointRate(rate(500), 9, {"halos": 0.012, "statistics": 0.006, "reduce": 0.002})
    found = join_profiles([profile(1e-3), profile(1e-3)], now, joint(500), "cpu", between=False, strategy="spatial")
    took = {one.stage: one.seconds * 10 for one in found.ceilings}
    assert {stage: took[stage] for stage in ("exchange", "sharing", "reduce")} == pytest.approx(
        {"exchange": 0.018, "sharing": 0.010, "reduce": 0.002}
    )
    assert found.predicted == pytest.approx(500)
    assert found.find_ceiling("exchange").how.startswith("45% of a step")  # type: ignore[union-attr]
    assert (found.verdict.kind, found.verdict.stage) == ("communication limited", "exchange")
    assert "waiting for values of other ranks takes 45% of its time" in found.verdict.sentence
    assert "a larger batch, parallel.until, fewer processes or parallel={strategy: data}" in found.verdict.sentence
    (knob,) = found.knobs
    assert (knob.override, knob.images_s) == ("parallel={strategy: data}", pytest.approx(2 * 10 / 0.012))
    # Synchronised batch norm of data parallel ranks: what is not waited for in it is waited for elsewhere.
    found = join_profiles([profile(1e-3), profile(1e-3)], now, joint(500), "cpu", between=False)
    assert found.find_ceiling("sharing") is None
    assert found.find_ceiling("reduce").seconds * 10 == pytest.approx(0.012)  # type: ignore[union-attr]


def test_what_nobody_takes_alone_is_the_exchange() -> None:
    found = join_profiles([profile(1e-3), profile(1e-3)], joint(500), joint(500), "cpu", between=True)
    assert found.verdict.kind == "communication limited"
    assert found.verdict.stage == "reduce"
    assert found.facts["exchange seconds a step"] == pytest.approx(0.03)
    assert found.predicted == pytest.approx(500)
    assert [knob.override for knob in found.knobs] == ["comm.wire=fp16"]


def test_a_slow_rank_is_told_from_the_exchange() -> None:
    found = join_profiles([profile(1e-3), profile(1e-3), profile(5e-3)], joint(600), joint(600), "cpu", between=False)
    assert found.verdict.stage == "slow rank"
    assert found.find_ceiling("reduce").seconds == pytest.approx(0, abs=1e-9)  # type: ignore[union-attr]
    assert "rank 2" in found.find_ceiling("slow rank").how  # type: ignore[union-attr]
    assert found.predicted == pytest.approx(600)


@pytest.mark.check
def test_no_rank_drops_files_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_digits(tmp_path, mode="seekable")
    recipe = write_recipe(tmp_path / "one.yaml", data={"cache": "none"})
    dropped = list[object]()
    monkeypatch.setattr("headway.doctor.examination.evict", dropped.append)
    monkeypatch.setattr("headway.doctor.storage.evict", dropped.append)
    short = Budget(each=0.2, passes=0.2, side=0.05, whole=0.2, tries=0.0)
    with closing(MeasurementJob.from_recipe(load_recipe(recipe, ()))) as job:
        found = examine_job(job, short, quick=True, barrier=lambda: None)
    assert dropped == []
    assert [one.split(":")[0] for one in found.not_measured if "only one process alone" in one] == ["The first epoch"]
    assert found.runs[-1].name == "cold"
    assert found.runs[-1].images_s is None


ALONE = ExchangeMeasurement(seconds=0.04, bytes=4_000_000, latency_s=1e-4, buckets=3, algorithm="ring")


def test_what_of_the_exchange_is_hidden_is_told() -> None:
    two = [profile(1e-3), profile(1e-3)]
    found = join_profiles(two, joint(500, 90), joint(400, 60), "cpu", between=False, alone=ALONE)
    how = found.find_ceiling("reduce").how  # type: ignore[union-attr]
    assert "30 ms of 40 ms are exposed (4 MB in 3 buckets, most by ring)" in how
    assert found.facts["exchange alone seconds a step"] == pytest.approx(0.04)
    assert found.facts["exchange bytes/s"] == pytest.approx(1e8)
    assert found.facts["exchange latency seconds"] == 1e-4
    assert [(one.name, one.steps) for one in found.runs] == [("replay", 90), ("warm", 60)]
    found = join_profiles(two, joint(250), joint(250), "cpu", between=False, alone=ALONE)
    assert "70 ms; the exchange alone takes 40 ms" in found.find_ceiling("reduce").how  # type: ignore[union-attr]


def test_another_algorithm_saves_no_more_than_is_exposed() -> None:
    two = [profile(1e-3), profile(1e-3)]
    others = [CommTrial("by tree", "comm.algorithm=tree", 1.25), CommTrial("larger", "comm.bucket_mb=4.0", 9.0)]
    found = join_profiles(two, joint(500), joint(500), "cpu", between=False, others=others)
    assert [knob.override for knob in found.knobs] == ["comm.bucket_mb=4.0", "comm.algorithm=tree"]
    assert [knob.gain for knob in found.knobs] == pytest.approx([4, 1.25])
    assert all(knob.exact and knob.measured and knob.cures == "reduce" for knob in found.knobs)
    hidden = join_profiles(two, joint(2000), joint(2000), "cpu", between=False, others=others)
    assert hidden.knobs == ()


def test_what_is_within_the_noise_is_no_gain() -> None:
    tree = {"algorithm": "tree"}
    assert [one.gain for one in select_faster([(tree, rate(120, 0.1))], rate(100, 0.1))] == [1.2]
    assert select_faster([(tree, rate(120, 0.2))], rate(100, 0.1)) == []
    assert select_faster([(tree, rate(120, 0.1))], rate(100, 0.3)) == []
    assert select_faster([(tree, rate(100.5))], rate(100)) == []


def many_buckets(folder: Path) -> Path:
    """A recipe whose gradients go in one small bucket a layer."""
    packed_digits(folder, mode="seekable")
    (folder / "net.py").write_text(MANY)
    return write_recipe(folder / "many.yaml", model={"factory": "net.py:many"}, comm={"bucket_mb": 0.01}, batch=8)


def measured(recipe: Path, hosts: tuple[Host, ...], seconds: float) -> Any:
    out = recipe.parent / "found.json"
    command = [str(Path(__file__).parent / "_exchanging_rank.py"), str(recipe), str(out), str(seconds)]
    environ = {"OMP_NUM_THREADS": "1"}
    assert launch(command, hosts, environ=environ, respawn=False, on_rank_failure="continue") == 0
    return json.loads(out.read_text())


@pytest.mark.check
def test_real_ranks_try_larger_buckets_and_are_as_before(tmp_path: Path) -> None:
    found = measured(many_buckets(tmp_path), parse_hosts(2, None), 600.0)
    before, after, last = ([json.loads(one) for one in found[name]] for name in ("before", "after", "last"))
    assert found["steps"] >= 9
    assert found["exchange"]["buckets"] == len(before[0][2]) > 30
    assert found["exchange"]["bytes"] == sum(before[0][2])
    assert 0 < found["exchange"]["latency_s"] < found["exchange"]["seconds"]
    assert found["without gradients"]
    assert after == before  # steps, weights, buckets and options
    assert last[0] == last[1]
    assert last[0][0] > before[0][0]
    assert last[0][2:] == before[0][2:]
    own = "comm.bucket_mb=0.01 comm.algorithm=auto"
    first, larger, *others, again = found["came"]
    assert (first, larger, again) == (own, "comm.bucket_mb=0.04 comm.algorithm=auto", own)
    assert found["late"] == []
    assert {one["override"] for one in found["others"]} <= {"comm.bucket_mb=0.04", *(one.split()[1] for one in others)}
    assert found["around"] == []


@pytest.mark.check
@pytest.mark.root
def test_the_network_between_two_hosts_is_told(tmp_path: Path) -> None:
    recipe = many_buckets(tmp_path)
    with Hosts(2, rate_bits_s=None) as hosts:
        rsh, out = tmp_path / "rsh", tmp_path / "found.json"
        rsh.write_text(f'#!/bin/sh\nshift\nexec ip netns exec {hosts.namespace(1)} sh -c "$*"\n')
        rsh.chmod(0o755)
        argv = [sys.executable, "-c", LAUNCHER, f"localhost:1,{hosts.addresses[1]}:1"]
        argv += [str(Path(__file__).parent / "_exchanging_rank.py"), str(recipe), str(out), "0"]
        process = hosts.run(0, argv, {"HEADWAY_RSH": str(rsh)}, stderr=subprocess.PIPE, text=True)
        said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    found = json.loads(out.read_text())
    assert found["others"] == []
    assert "comm.algorithm=tree" in found["late"] or "comm.algorithm=ring" in found["late"]  # there was no time
    assert [one for one in found["around"] if one.startswith("Ranks communicate over eth0")]


@pytest.mark.check
def test_two_processes_of_which_one_is_slow(tmp_path: Path) -> None:
    packed_digits(tmp_path, per_class=60, mode="seekable")
    (tmp_path / "slow.py").write_text(SLOW)
    recipe = write_recipe(tmp_path / "two.yaml", transform="slow.py:some_slow")
    out = tmp_path / "profile.json"
    # What other programs do may contradict the short runs, which the doctor says: then it examines again.
    for _ in range(3):
        said = finished("doctor", recipe, "--procs", "2", "--quick", "--out", out, "--json", cwd=tmp_path)
        assert said.status == 0, said.err
        found = Profile.read(out)
        if not found.verdict.sentence.startswith("Not confirmed"):
            break
    assert found.ranks == 2
    assert found.verdict.stage == "slow rank", found.verdict
    assert found.facts["rank 1 seconds a step"] - found.facts["rank 0 seconds a step"] > 0.02
    assert json.loads(said.out)["verdict"]["kind"] == "communication limited"
