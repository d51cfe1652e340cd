from __future__ import annotations

from itertools import pairwise

import pytest

from headway.core import clock
from headway.core.clock import Clock
from headway.core.exchange_waits import ExchangeWaits, describe_exchanges


def test_every_nanosecond_between_marks_goes_to_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    times = [5, 10, 17, 40, 41, 1_000_000_041, 1_000_000_050]
    monkeypatch.setattr(clock, "perf_counter_ns", iter(times).__next__)
    stages = Clock()  # 5
    for stage in ("load", "step", "load"):  # 10, 17, 40
        stages.lap(stage)
    stages.start()  # 41: the nanosecond before it belongs to no stage
    stages.lap("step")
    stages.lap("log")
    assert stages.seconds == {"load": 28e-9, "step": 1_000_000_007e-9, "log": 9e-9}
    assert stages.total_seconds() == pytest.approx(1_000_000_044e-9, abs=1e-12)


def test_a_clock_goes_on_from_the_seconds_of_a_checkpoint() -> None:
    stages = Clock({"step": 12.5, "load": 0.25})
    assert stages.seconds == {"step": 12.5, "load": 0.25}
    stages.lap("step")
    assert stages.seconds["step"] > 12.5
    assert stages.seconds["load"] == 0.25
    again = Clock(stages.seconds)
    assert again.total_seconds() == pytest.approx(stages.total_seconds(), abs=1e-8)


def test_spans_are_kept_from_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans add up to the seconds of the stages since then, without gaps except after `start`."""
    times = [5, 10, 17, 40, 45, 50, 61]
    monkeypatch.setattr(clock, "perf_counter_ns", iter(times).__next__)
    stages = Clock()  # 5
    stages.lap("load")  # 10
    stages.spans = kept = []
    stages.lap("step")  # 17
    stages.lap("load")  # 40
    stages.start()  # 45
    stages.lap("step")  # 50
    stages.spans = None
    stages.lap("log")  # 61
    assert kept == [("step", 10, 17), ("load", 17, 40), ("step", 45, 50)]
    assert stages.seconds == {"load": 28e-9, "step": 12e-9, "log": 11e-9}


def test_exchanges_are_taken_out_of_the_stages_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """No nanosecond is lost or counts twice. What an evaluation waits for stays a part of it."""
    times = [0, 100, 250, 300, 1000]
    monkeypatch.setattr(clock, "perf_counter_ns", iter(times).__next__)
    stages = Clock(waits=ExchangeWaits())  # 0
    assert stages.waits is not None
    stages.waits.add("halos", 30)
    stages.waits.add("statistics", 5)
    stages.waits.add("halos", 10)
    stages.lap("forward")  # 100
    stages.lap("loss")  # 250
    stages.waits.add("halos", 20)
    stages.lap("backward")  # 300
    stages.waits.add("halos", 400)
    stages.lap("evaluate")  # 1000
    ns = {stage: round(1e9 * seconds) for stage, seconds in stages.seconds.items()}
    assert ns == {"halos": 60, "statistics": 5, "forward": 55, "loss": 150, "backward": 30, "evaluate": 700}
    told = describe_exchanges(stages.seconds, 1e-6)
    assert told["exchange"] == pytest.approx({"halos": 0.06, "statistics": 0.005})
    assert told["exchange_share"] == sum(told["exchange"].values())
    assert describe_exchanges({"forward": 1.0, "halos": 0.0}, 1.0) == {}


def test_a_clock_never_runs_backwards() -> None:
    stages = Clock()
    totals = []
    for turn in range(100):
        stages.lap("ab"[turn % 2])
        totals.append(stages.total_seconds())
    assert all(before <= after for before, after in pairwise(totals))
    assert set(stages.seconds) == {"a", "b"}
    assert sum(stages.seconds.values()) == pytest.approx(stages.total_seconds())
    stages.seconds["a"] = 1e9  # a copy
    assert stages.total_seconds() < 1e9
