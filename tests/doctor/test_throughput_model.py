"""The model of loader and loop: limits that are known, and what taking a stage away gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.profile import JointTiming, PipelineSide, StageCeiling
from headway.doctor.throughput_model import ThroughputModel, compute_seconds_together
from headway.doctor.verdict import conclude_verdict

SECONDS = st.floats(1e-6, 1e-1)


def ceiling(stage: str, side: PipelineSide, seconds: float) -> StageCeiling:
    return StageCeiling(stage=stage, side=side, resource="host", seconds=seconds, how="stated")


def model(
    decode: float, compute: float, *, launch: float = 0.0, stall: float = 0.0, slower: float = 1.0
) -> ThroughputModel:
    ceilings = [
        ceiling("decode", "input", decode),
        ceiling("compute", "loop", compute),
        ceiling("launch", "loop", launch),
        ceiling("evaluate", "stall", stall),
    ]
    loop = compute + launch
    together = JointTiming(
        input_alone=decode, loop_alone=loop, input_beside=slower * decode, loop_beside=slower * loop, cores=2
    )
    return ThroughputModel.from_ceilings(ceilings, together)


@given(SECONDS, SECONDS)
def test_what_shares_nothing_takes_as_long_as_the_slower_one(into: float, loop: float) -> None:
    assert compute_seconds_together(into, loop, into, loop) == pytest.approx(max(into, loop))


@given(SECONDS, SECONDS)
def test_what_shares_one_core_adds(into: float, loop: float) -> None:
    """Side by side each takes twice as long, as two threads on one core do."""
    assert compute_seconds_together(into, loop, 2 * into, 2 * loop) == pytest.approx(into + loop)


@given(SECONDS, SECONDS, st.floats(1, 3), st.floats(1, 3))
def test_hindrance_costs_and_never_helps(into: float, loop: float, a: float, b: float) -> None:
    together = compute_seconds_together(into, loop, a * into, b * loop)
    assert together >= max(into, loop) * (1 - 1e-9)
    assert together <= max(a, b) * (into + loop) * (1 + 1e-9)
    swapped = compute_seconds_together(loop, into, b * loop, a * into)
    assert together == pytest.approx(swapped)


@given(SECONDS, SECONDS, SECONDS, st.floats(1, 2))
def test_a_stage_less_is_never_slower(decode: float, compute: float, stall: float, slower: float) -> None:
    whole = model(decode, compute, stall=stall, slower=slower)
    for stage in ("decode", "compute", "evaluate"):
        assert whole.without_stage(stage).predict_images_s() >= whole.predict_images_s() * (1 - 1e-9)
    assert whole.predict_images_s(stalls=False) >= whole.predict_images_s()


def test_stalls_add_to_whatever_goes_on() -> None:
    assert 1 / model(1e-3, 2e-3, stall=5e-4).predict_images_s() == pytest.approx(2.5e-3)


def test_without_a_loader_the_loop_is_all() -> None:
    alone = ThroughputModel.from_ceilings([ceiling("compute", "loop", 2e-3), ceiling("launch", "loop", 1e-3)], None)
    assert 1 / alone.predict_images_s() == pytest.approx(3e-3)


@given(
    st.dictionaries(st.sampled_from(["launch", "compute", "optimizer", "sync", "other"]), SECONDS, min_size=1),
    st.dictionaries(st.sampled_from(["storage", "decode", "collate"]), SECONDS, min_size=1),
    st.dictionaries(st.sampled_from(["evaluate", "checkpoint"]), SECONDS),
    st.floats(1, 2),
)
def test_the_limit_is_the_lowest_row_of_its_side(
    loop: dict[str, float], into: dict[str, float], stalls: dict[str, float], slower: float
) -> None:
    sides: dict[PipelineSide, dict[str, float]] = {"input": into, "loop": loop, "stall": stalls}
    ceilings = [ceiling(stage, side, value) for side, stages in sides.items() for stage, value in stages.items()]
    alone = sum(into.values()), sum(loop.values())
    together = JointTiming(
        input_alone=alone[0],
        loop_alone=alone[1],
        input_beside=slower * alone[0],
        loop_beside=slower * alone[1],
        cores=2,
    )
    found = conclude_verdict(ThroughputModel.from_ceilings(ceilings, together), "cpu", None)
    (side,) = [one.side for one in ceilings if one.stage == found.stage]
    assert sides[side][found.stage] == max(sides[side].values())


def test_a_row_is_named_though_the_fixed_parts_of_a_step_are_more_together() -> None:
    stages = {"launch": 2e-3, "optimizer": 2e-3, "other": 1e-3, "sync": 3e-3}
    found = conclude_verdict(
        ThroughputModel.from_ceilings([ceiling(name, "loop", value) for name, value in stages.items()], None),
        "cpu",
        None,
    )
    assert (found.stage, found.kind) == ("sync", "sync limited")


@pytest.mark.parametrize(
    ("whole", "stage", "kind"),
    [
        (model(4e-3, 1e-3), "decode", "host/IO limited"),
        (model(1e-3, 4e-3), "compute", "device limited"),
        (model(1e-4, 1e-3, launch=4e-3), "launch", "launch limited"),
        (model(1e-4, 1e-3, stall=4e-3), "evaluate", "stall limited"),
    ],
)
def test_the_verdict_names_what_limits(whole: ThroughputModel, stage: str, kind: str) -> None:
    found = conclude_verdict(whole, "cpu", None)
    assert (found.stage, found.kind) == (stage, kind)
    assert kind in found.sentence
    assert found.most == pytest.approx(whole.without_stage(stage).predict_images_s() / whole.predict_images_s())
    assert found.next_stage != stage


def test_an_optimizer_that_takes_long_is_named() -> None:
    stages = {"launch": 0.0, "compute": 1e-3, "optimizer": 4e-3}
    found = conclude_verdict(
        ThroughputModel.from_ceilings([ceiling(name, "loop", value) for name, value in stages.items()], None),
        "cpu",
        None,
    )
    assert (found.stage, found.kind, found.most) == ("optimizer", "launch limited", pytest.approx(5))


def test_a_tie_names_the_longer_one_and_promises_nothing() -> None:
    found = conclude_verdict(model(1.0001e-3, 1e-3), "cpu", None)
    assert found.stage == "decode"
    assert found.most == pytest.approx(1.0, abs=1e-3)


def test_the_most_that_can_be_won_ends_at_the_next_limit() -> None:
    found = conclude_verdict(model(4e-3, 1e-3), "cpu", None)
    assert found.most == pytest.approx(4)
    assert found.next_stage == "compute"
