"""Several ranks: a slow one is named by its number, what the exchange adds is told apart; two real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests._support import finished, packed_digits, write_recipe

from headway.core.profile import Ceiling, Profile, Rate, Side, Together, Verdict
from headway.doctor.ranks import joined

SLOW = """
import os
import time

def some_slow(images, labels, keys):
    if os.environ.get("RANK") == "1":
        time.sleep(0.03)
    return images, labels
"""


def profile(loop_s: float, *, batch: int = 10) -> Profile:
    def one(stage: str, side: Side, seconds: float) -> Ceiling:
        return Ceiling(stage=stage, side=side, resource="device", seconds=seconds, how="stated")

    return Profile(
        name="stated",
        quick=True,
        machine={},
        environment=(),
        batch=batch,
        ranks=1,
        regime="later epochs",
        ceilings=(one("decode", "input", 1e-5), one("compute", "loop", loop_s), one("evaluate", "stall", 0.0)),
        together=Together(
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


def rate(value: float) -> Rate:
    return Rate(value=value, low=value, high=value, windows=1)


def test_ranks_that_are_alike_and_no_exchange_give_their_sum() -> None:
    found = joined([profile(1e-3), profile(1e-3)], rate(2000), rate(2000), "cpu", between=False)
    assert found.ranks == 2
    assert found.predicted == pytest.approx(2000)
    assert found.verdict.stage == "compute"
    assert found.ceiling("reduce").seconds == pytest.approx(0, abs=1e-9)  # type: ignore[union-attr]


def test_what_nobody_takes_alone_is_the_exchange() -> None:
    found = joined([profile(1e-3), profile(1e-3)], rate(500), rate(500), "cpu", between=True)
    assert found.verdict.kind == "communication limited"
    assert found.verdict.stage == "reduce"
    assert found.facts["exchange seconds a step"] == pytest.approx(0.03)
    assert found.predicted == pytest.approx(500)
    assert [knob.override for knob in found.knobs] == ["comm.wire=fp16"]


def test_a_slow_rank_is_told_from_the_exchange() -> None:
    found = joined([profile(1e-3), profile(1e-3), profile(5e-3)], rate(600), rate(600), "cpu", between=False)
    assert found.verdict.stage == "slow rank"
    assert found.ceiling("reduce").seconds == pytest.approx(0, abs=1e-9)  # type: ignore[union-attr]
    assert "rank 2" in found.ceiling("slow rank").how  # type: ignore[union-attr]
    assert found.predicted == pytest.approx(600)


@pytest.mark.check
def test_two_processes_of_which_one_is_slow(tmp_path: Path) -> None:
    packed_digits(tmp_path, per_class=60)
    (tmp_path / "slow.py").write_text(SLOW)
    recipe = write_recipe(tmp_path / "two.yaml", transform="slow.py:some_slow")
    out = tmp_path / "profile.json"
    said = finished("doctor", recipe, "--procs", "2", "--quick", "--out", out, "--json", cwd=tmp_path)
    assert said.status == 0, said.err
    found = Profile.read(out)
    assert found.ranks == 2
    assert found.verdict.stage == "slow rank", found.verdict
    assert found.facts["rank 1 seconds a step"] - found.facts["rank 0 seconds a step"] > 0.02
    assert json.loads(said.out)["verdict"]["kind"] == "communication limited"
