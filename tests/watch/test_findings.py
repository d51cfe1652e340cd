"""What limits a loop, told from numbers that are made up: on a CPU, and on a device that works on its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headway.doctor.loop_observation import Advice, LoopFacts, LoopObservation, LoopPattern, RankTime, StageTime
from headway.doctor.loop_verdict import LEAST_STEPS
from headway.observe.step_marks import STAGES, LoopStart, StepSeries
from headway.watch.findings import conclude_watch

STEPS = 100
LOADER = LoopFacts(device="cpu", samples=64, batches=500, torch_loader=True, workers=4, prefetch=2, cores=8, threads=8)
GPU = dataclasses.replace(LOADER, device="cuda", pinned=True)
FIRST = LoopStart(first_s=1.0, is_first_loop=True, batches=None, end_s=None, gap_s=None)


def series(steps: int = STEPS, index: NDArray[np.int64] | None = None, **given: Any) -> StepSeries:
    """Steps of so many ms by stage, one number or one for each step; other columns by name."""
    columns: dict[str, Any] = {
        name: np.broadcast_to(np.asarray(given.pop(name, empty), np.float64), steps).copy()
        for name, empty in (
            ("reads", 0),
            ("syncs", 0),
            ("sync_s", 0),
            ("idle_at_request", np.nan),
            ("idle_at_batch", np.nan),
            ("has_exchange", np.nan),
            ("updates", 1),
        )
    }
    seconds = np.zeros((steps, len(STAGES)))
    for name, ms in given.items():
        seconds[:, STAGES.index(name)] = np.asarray(ms) / 1e3  # type: ignore[arg-type]
    return StepSeries(seconds=seconds, index=np.arange(1, steps + 1) if index is None else index, **columns)


def seen(
    found: StepSeries, facts: LoopFacts = LOADER, starts: tuple[LoopStart, ...] = (FIRST,), **more: Any
) -> LoopObservation:
    return conclude_watch(found, starts, facts, **more)


def changes(found: LoopObservation) -> str:
    return "\n".join(one.change for one in found.advice)


WORK = {"forward": 3, "loss": 0.5, "backward": 5, "optimizer": 1, "other": 0.5}


def test_a_loop_that_waits() -> None:
    found = seen(series(wait=np.tile([16.0, 18.0], 50), **WORK))
    assert found.kind == "host/IO limited"
    free = "a batch that cost nothing would give at most 2.7 times the samples/s"
    assert found.sentence == f"the loop waits 63 % of its time for batches; {free}"
    assert found.gain == pytest.approx(27 / 10)
    assert found.samples_s == pytest.approx(64 / 27e-3)
    assert found.wait_low is not None
    assert found.wait_high is not None
    assert found.wait_low <= 17 / 27 <= found.wait_high
    assert sum(one.share for one in found.stages) == pytest.approx(1)
    assert changes(found).startswith("DataLoader(..., num_workers=7, persistent_workers=True)\nadd workers only")
    assert "headway pack IMAGES PACKED" in changes(found)
    full = seen(series(wait=17, **WORK), dataclasses.replace(LOADER, cores=4))
    assert full.advice[0].why == "4 workers are too slow, on 4 cores"
    assert "num_workers" not in changes(full)
    assert found.to_text().startswith(f"host/IO limited: {found.sentence}.\n100 steps of 64 samples on cpu: 27 ms each")


def test_a_loop_that_makes_its_own_batches_gets_as_many_workers_as_it_needs() -> None:
    facts = dataclasses.replace(LOADER, workers=0, prefetch=None)
    assert changes(seen(series(wait=17, **WORK), facts)).startswith("DataLoader(..., num_workers=3, persistent")
    assert "num_workers=7" in changes(seen(series(wait=500, **WORK), facts)), "one core is left for the loop"
    two = dataclasses.replace(facts, cores=2)
    assert "num_workers=1," in changes(seen(series(wait=17, **WORK), two))
    assert "share the cores" in seen(series(wait=17, **WORK), two).advice[0].why


def test_batches_that_come_late_now_and_then() -> None:
    draw = np.random.default_rng(0)
    waits = np.where(draw.random(STEPS) < 0.1, 60.0, 0.1)
    found = seen(series(wait=waits, **WORK))
    assert found.kind == "host/IO limited"
    assert changes(found).startswith("DataLoader(..., prefetch_factor=4)")


def test_workers_that_bring_their_batches_together() -> None:
    found = seen(series(wait=np.where(np.arange(1, STEPS + 1) % 4 == 0, 60.0, 0.1), **WORK))
    (one,) = (one for one in found.patterns if one.kind == "workers")
    assert one.sentence.startswith("one batch in 4 makes the loop wait 60 ms, the others 0.1 ms: the 4 workers")
    assert changes(found).startswith("DataLoader(..., num_workers=7")
    other = dataclasses.replace(LOADER, torch_loader=False, workers=None)
    found = seen(series(wait=np.where(np.arange(1, STEPS + 1) % 3 == 0, 60.0, 0.1), **WORK), other)
    assert "as if 3 workers" in found.patterns[0].sentence
    assert any("neither a torch DataLoader nor a headway.Loader" in one for one in found.unknown)


def test_a_loop_that_computes() -> None:
    found = seen(series(wait=0.5, **WORK), dataclasses.replace(LOADER, threads=2))
    assert found.kind == "device limited"
    assert found.gain is None
    assert found.sentence == "forward, loss, backward and optimizer take 90 % of the time, waiting for batches 4.8 %"
    assert "torch.set_num_threads(8)" in changes(found)
    assert "num_workers" not in changes(found)


def test_code_of_its_own() -> None:
    found = seen(series(wait=0.1, **{**WORK, "other": 20}))
    assert found.kind == "host/IO limited"
    assert "code of its own between the stages" in found.sentence


def test_epochs_that_begin_slowly() -> None:
    """5 s at the beginning and 1 s at the end of epochs of 500 steps of 10 ms: 12 ms a step more."""
    starts = (
        LoopStart(first_s=60.0, is_first_loop=True, batches=500, end_s=1.0, gap_s=None),
        LoopStart(first_s=5.0, is_first_loop=False, batches=500, end_s=1.0, gap_s=30.0),
    )
    found = seen(series(wait=0, **WORK), starts=starts)
    assert found.kind == "stall limited"
    assert found.first_batch_s == pytest.approx(6)
    assert found.step_s == pytest.approx(22e-3)
    assert found.gain == pytest.approx(2.2)
    assert changes(found).startswith("DataLoader(..., persistent_workers=True)")
    assert found.between_epochs_s == 30
    assert [one.stage for one in found.stages][:2] == ["first batch", "forward"]
    assert "first batch" in [one.kind for one in found.patterns]
    kept = dataclasses.replace(LOADER, persistent=True)
    assert "persistent" not in changes(seen(series(wait=0, **WORK), kept, starts))
    once = seen(series(wait=0, **WORK), starts=starts[:1])
    assert once.kind == "device limited", "the first epoch starts the process up, too"
    assert any("no second epoch began" in one for one in once.unknown)


def test_stalls_and_what_they_are() -> None:
    """A step of 10 ms, and one in 20 takes 60 ms more: 3 of 13 ms."""
    other = np.where(np.arange(STEPS) % 20 == 7, 60.5, 0.5)
    facts = dataclasses.replace(LOADER, every=(("logging", 20), ("checkpoint", 500)))
    found = seen(series(wait=0, **{**WORK, "other": other}), facts)
    assert found.kind == "stall limited"
    assert found.sentence.startswith(
        "5 of 100 steps take more than 3 times the median, mostly in the stage other: 23 %"
    )
    assert found.gain == pytest.approx(13 / 10)
    assert "as often as logging" in next(one.sentence for one in found.patterns if one.kind == "period")
    assert "do logging less often" in changes(found)
    scattered = np.where(np.isin(np.arange(STEPS), [3, 17, 51, 62, 90]), 60.5, 0.5)
    assert "now and then" in changes(seen(series(wait=0, **{**WORK, "other": scattered})))
    assert "other load" in changes(seen(series(wait=0, **{**WORK, "backward": 10 * scattered})))


def test_steps_that_gather_gradients_are_no_stalls() -> None:
    """An optimizer that steps after every fourth batch takes longer than all else of a batch."""
    updates = np.arange(STEPS) % 4 == 3
    found = seen(series(updates=updates, **{**WORK, "optimizer": np.where(updates, 60, 0)}))
    assert found.kind == "device limited"
    assert "as often as the optimizer's step" in found.patterns[0].sentence


def test_the_exchange_is_told_from_steps_without_one() -> None:
    facts = dataclasses.replace(LOADER, exchange="backward contains the exchange")
    alternating = np.arange(STEPS) % 2
    found = seen(series(has_exchange=alternating, **{**WORK, "backward": 5 + 10 * alternating}), facts)
    assert found.kind == "communication limited"
    assert found.gain == pytest.approx(15 / 10)
    assert "no_sync" in changes(found)
    assert any("it takes 33 %" in one for one in found.unknown)
    always = seen(series(has_exchange=1, **WORK), facts)
    assert always.kind == "device limited"
    assert "backward contains the exchange" in always.unknown


def test_too_few_steps_tell_nothing() -> None:
    assert seen(series(LEAST_STEPS - 1, wait=100, **WORK)).kind is None
    assert seen(series(LEAST_STEPS, wait=100, **WORK)).kind == "host/IO limited"
    firsts = series(50, index=np.zeros(50, np.int64), wait=100, **WORK)
    found = seen(firsts)
    assert (found.kind, found.steps, found.step_s) == (None, 0, None)
    assert "0 steps were seen after 5 warm-up steps" in found.to_text()
    assert LoopObservation.model_validate(found.to_json()) == found


def test_another_thread_tells_nothing() -> None:
    found = seen(series(wait=100, **WORK), dataclasses.replace(LOADER, elsewhere=True))
    assert found.kind is None
    assert found.advice == ()
    assert "another thread" in found.sentence


def test_what_was_not_seen_is_said() -> None:
    found = seen(series(other=10))
    assert any(
        one == "forward and backward and optimizer were not seen: the time is in the stage other"
        for one in found.unknown
    )
    compiled = seen(series(**WORK), dataclasses.replace(LOADER, compiled=True))
    assert any("inside of compiled code" in one for one in compiled.unknown)
    found = seen(series(forward=5, optimizer=1))
    assert any("no backward pass" in one for one in found.unknown)


def test_steps_that_get_longer() -> None:
    found = seen(series(wait=0, **{**WORK, "forward": np.linspace(3, 5, STEPS)}))
    assert "steps get longer: by" in next(one.sentence for one in found.patterns if one.kind == "drift")


# A device that works on its own: the host's clock sees launches, and waits.


@pytest.mark.parametrize(
    ("kind", "gain", "given"),
    [
        # The device has work left whenever a batch comes: waiting for it costs nothing.
        ("device limited", None, {"wait": 5, "idle_at_request": 0, "idle_at_batch": 0}),
        # It runs out of work while the loop waits.
        ("host/IO limited", 2.5, {"wait": 15, "idle_at_request": 0, "idle_at_batch": 1}),
        # It is through before the loop asks for the next batch, which is there.
        ("launch limited", None, {"wait": 0.1, "idle_at_request": 1, "idle_at_batch": 1}),
        ("host/IO limited", 1 + 30 / 9.6, {"wait": 0.1, "idle_at_request": 1, "idle_at_batch": 1, "other": 30}),
        # One sync a step, half of the time: without it a step would take the other half, or as long as the device.
        (
            "sync limited",
            2.0,
            {"wait": 0.1, "other": 10.1, "syncs": 1, "sync_s": 9.85e-3, "idle_at_request": 1, "idle_at_batch": 1},
        ),
        # The host only waits for the device.
        (
            "device limited",
            None,
            {"wait": 0.1, "other": 190.4, "syncs": 1, "sync_s": 190e-3, "idle_at_request": 1, "idle_at_batch": 1},
        ),
        # When it asks, the device is through.
        ("launch limited", None, {"wait": 0.1, "syncs": 2, "sync_s": 1e-4, "idle_at_request": 1, "idle_at_batch": 1}),
        # A device that does not say.
        (None, None, {"wait": 0.1}),
        ("host/IO limited", 2.5, {"wait": 15}),
    ],
)
def test_a_device_that_works_on_its_own(kind: str | None, gain: float | None, given: dict[str, Any]) -> None:
    found = seen(series(**{**WORK, **given}), GPU)
    assert found.kind == kind, found.to_text()
    assert found.gain == (None if gain is None else pytest.approx(gain, rel=0.01))
    assert any("not the device's own time" in one for one in found.unknown)


def test_a_sync_now_and_then_is_no_stall() -> None:
    """Reading the loss every 50 steps waits for all of them: the device's work, not a hiccup."""
    logging = np.arange(STEPS) % 25 == 0
    waited = np.where(logging, 0.2, 0.0)
    other = np.where(logging, 200.5, 0.5)
    empty = np.roll(logging, 1)  # after it the device has nothing left to do
    found = seen(
        series(wait=0.1, other=other, syncs=logging, sync_s=waited, idle_at_request=empty, idle_at_batch=empty), GPU
    )
    assert found.kind == "device limited"
    full = seen(series(wait=0.1, other=other, idle_at_request=0, idle_at_batch=0), GPU)
    assert full.kind == "device limited", "and waiting for room in the queue is none either"


def test_advice_for_a_device() -> None:
    limited = {"wait": 0.1, "idle_at_request": 0, "idle_at_batch": 0}
    facts = dataclasses.replace(GPU, autocast=False, bf16=True)
    assert 'torch.autocast("cuda", dtype=torch.bfloat16)' in changes(seen(series(**WORK, **limited), facts))
    assert "autocast" not in changes(seen(series(**WORK, **limited), dataclasses.replace(facts, autocast=True)))
    syncs = {"wait": 0.1, "other": 10, "syncs": 1, "sync_s": 8e-3, "idle_at_request": 1, "idle_at_batch": 1}
    facts = dataclasses.replace(GPU, pinned=False, places=(("item at train.py:41", 90), ("cpu at train.py:7", 3)))
    found = seen(series(**{**WORK, **syncs}), facts)
    assert "item at train.py:41" in found.advice[0].change
    assert "pin_memory=True" in changes(found)
    assert "1 times a step, mostly item at train.py:41: 41 % of the time" in found.to_text()
    launch = {"wait": 0.1, "idle_at_request": 1, "idle_at_batch": 1}
    facts = dataclasses.replace(GPU, fusable=True)
    found = seen(series(**WORK, **launch), facts)
    assert "torch.compile" in changes(found)
    assert "fused=True" in changes(found)
    assert "torch.compile" not in changes(seen(series(**WORK, **launch), dataclasses.replace(facts, compiled=True)))


def test_slow_ranks_are_compared_where_they_were_gathered() -> None:
    windows = np.tile([[5.0, 8.0]], (12, 1)) / 1e3
    ranks = tuple(RankTime(rank=rank, step_s=0.01, p99_s=0.02, own_s=own) for rank, own in enumerate((0.005, 0.008)))
    found = seen(series(wait=0, **WORK), windows=windows, ranks=ranks)
    assert found.ranks == ranks
    assert "rank 1 is behind the others by 30 % of a step" in found.patterns[-1].sentence


def test_the_text_has_thirty_lines_at_most() -> None:
    stages = tuple(StageTime(stage=name, seconds=1.5, share=0.1) for name in (*STAGES, "first batch"))
    long = "a very long sentence, " * 20
    found = LoopObservation(
        kind="stall limited",
        sentence=long,
        gain=2,
        device="cuda",
        steps=9999,
        warm_up_steps=5,
        epochs=3,
        batch=64,
        step_s=123.0,
        p99_s=0.9996,
        samples_s=1e6,
        wait_share=0.5,
        wait_low=0.4,
        wait_high=0.6,
        stages=stages,
        between_epochs_s=12345.6,
        syncs=2,
        sync_share=0.004,
        patterns=(LoopPattern(kind="drift", sentence=long, p_value=1e-9),) * 9,
        advice=(Advice(why=long, change=long),) * 9,
        unknown=(long,) * 9,
    )
    lines = found.to_text().splitlines()
    assert len(lines) <= 30
    assert all(len(line) <= 210 for line in lines[1:])
    assert "e+" not in found.to_text()
    assert "  - and 5 more; the JSON has them" in lines
    assert LoopObservation.model_validate(found.to_json()) == found
    assert str(found) == found.to_text()
