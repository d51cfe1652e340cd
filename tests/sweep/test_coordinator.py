"""Which slot trains which trials."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import collect_messages

from headway.sweep import coordinator as coordinator_module
from headway.sweep.cohort import Outcome
from headway.sweep.coordinator import Coordinator
from headway.sweep.costs import TrialCosts
from headway.sweep.slots import Event

SLOTS, TRIALS = 3, 6
COSTS = [one.name for one in fields(TrialCosts)]


@given(
    holder=st.lists(st.integers(-1, SLOTS - 1), min_size=TRIALS, max_size=TRIALS),
    idle=st.lists(st.booleans(), min_size=SLOTS - 1, max_size=SLOTS - 1),
    died=st.sets(st.integers(0, TRIALS - 1)),
    most=st.integers(1, TRIALS),
)
def test_no_slot_gets_a_trial_that_another_one_holds(
    holder: list[int], idle: list[bool], died: set[int], most: int
) -> None:
    """An idle slot lets go of it first; one that trains keeps it. A trial whose process died is tried alone."""
    released: set[int] = set()

    def release(number: int, trials: list[int]) -> bool:
        released.update(trials)
        slots[number].held -= set(trials)
        return False

    slots: list[Any] = [
        SimpleNamespace(
            number=number,
            is_idle=is_idle,
            held={trial for trial in range(TRIALS) if holder[trial] == number},
            end=lambda trials, number=number: release(number, trials),
        )
        for number, is_idle in enumerate([True, *idle])
    ]
    coordinator: Any = object.__new__(Coordinator)
    coordinator._slots, coordinator._deaths = slots, Counter(died)
    tasks: list[Any] = [SimpleNamespace(trial=SimpleNamespace(number=trial)) for trial in range(TRIALS)]
    own = [task.trial.number for task in coordinator._choose(slots[0], tasks, most)]
    assert not any(trial in slot.held for trial in own for slot in slots[1:])
    assert released == {trial for trial in own if holder[trial] > 0}
    assert len(own) <= most
    free = {trial for trial in range(TRIALS) if holder[trial] < 0 or slots[holder[trial]].is_idle}
    assert bool(own) == bool(free)
    if suspects := died & free:
        assert len(own) == 1
        assert set(own) <= suspects
    # Those in its memory come first.
    here = {trial for trial in (suspects or free) if holder[trial] == 0}
    assert len(here & set(own)) == min(len(here), len(own))


@given(data=st.data())
def test_no_answer_is_lost_or_overtakes_another_while_a_slot_lets_go(data: st.DataObject) -> None:
    """A slot whose process ends instead keeps its trials until its end is handled: its machine may be asleep."""
    steps = [Event(number, {"steps": step}) for step, number in enumerate(data.draw(st.lists(st.integers(0, SLOTS))))]
    has_died = data.draw(st.booleans())
    answer = Event(1, None if has_died else {"ended": [4]})
    place = data.draw(st.integers(0, len(steps)))
    events = [*steps[:place], answer, *steps[place:]]
    early = data.draw(st.integers(0, len(events)))
    coordinator: Any = object.__new__(Coordinator)
    coordinator._passed, coordinator._events = deque(events[:early]), SimpleQueue()
    for event in events[early:]:
        coordinator._events.put(event)
    slots: list[Any] = [
        SimpleNamespace(number=number, is_idle=True, held=set[int](), end=lambda trials: bool(trials))
        for number in range(SLOTS)
    ]
    slots[1].end = lambda trials: bool(trials) and not slots[1].held.difference_update(trials)
    slots[1].held |= {4, 5}
    coordinator._slots, coordinator._deaths = slots, Counter()
    task: Any = SimpleNamespace(trial=SimpleNamespace(number=4))
    assert coordinator._choose(slots[0], [task], 1) == ([] if has_died else [task])
    left = [*coordinator._passed, *(coordinator._events.get() for _ in range(coordinator._events.qsize()))]
    assert left == (events if has_died else steps)
    assert slots[1].held == ({4, 5} if has_died else {5})
    # Nobody else gets them now either.
    assert not has_died or coordinator._choose(slots[0], [task], 1) == []


@pytest.mark.parametrize("ends", [{"kind": "done", "step": 6}, {"kind": "crashed", "step": 2}])
def test_the_winner_goes_on_elsewhere_if_its_machine_leaves(ends: dict[str, Any]) -> None:
    """The worker saves it and says `stopped`, which is no failure of the winner."""
    events: SimpleQueue[Event] = SimpleQueue()
    answers = [[{"outcome": {"trial": -1, "kind": "stopped", "step": 2}}], [{"outcome": {"trial": -1} | ends}]]
    begun: list[int] = []

    def begin(slot: Any, assignments: list[Any]) -> None:
        slot.is_idle, slot.training = False, {one.trial: one for one in assignments}
        begun.append(slot.number)
        for message in answers.pop(0):
            events.put(Event(slot.number, message))

    slots: list[Any] = [
        SimpleNamespace(number=number, is_idle=True, held=set[int](), training={}, end=lambda trials: False)
        for number in range(2)
    ]
    for slot in slots:
        slot.train = lambda assignments, slot=slot: begin(slot, assignments)
    coordinator: Any = object.__new__(Coordinator)
    coordinator._slots, coordinator._events, coordinator._passed = slots, events, deque[Event]()
    (outcome,) = coordinator.train([SimpleNamespace(trial=-1)])
    assert vars(outcome) == vars(Outcome(trial=-1, **ends))
    assert begun == [0, 1]


@given(trials=st.integers(0, 5), slots=st.integers(1, 4), idle=st.integers(0, 2), died=st.sets(st.integers(0, 3)))
def test_all_slots_measure_at_once(trials: int, slots: int, idle: int, died: set[int]) -> None:
    """Each trial is measured, and some twice, so that no slot is idle. A process that dies measures nothing."""
    events: SimpleQueue[Event] = SimpleQueue()
    begun: list[tuple[int, int]] = []
    fakes: list[Any] = []

    def begin(number: int, assignment: Any) -> None:
        fakes[number].is_idle = False
        begun.append((number, assignment.trial))
        if number in died:
            died.discard(number)
            events.put(Event(number, None))
            return
        events.put(Event(number, {"ready": 1, "core_s": 1.0}))
        events.put(Event(number, {"costs": dict.fromkeys(COSTS, float(assignment.trial)), "core_s": 3.0}))

    for number in range(slots + idle):
        fakes.append(
            SimpleNamespace(
                number=number,
                is_idle=True,
                measure=lambda assignment, number=number: begin(number, assignment),
                note_core_s=lambda seconds, number=number: setattr(fakes[number], "core_s", seconds),
                core_s=0.0,
            )
        )
    coordinator: Any = object.__new__(Coordinator)
    coordinator._slots, coordinator._events, coordinator._left_core_s = fakes, events, 0.0
    coordinator._passed = deque[Event]()
    coordinator._feeders = SimpleNamespace(core_s=0.0)
    coordinator._bury = lambda slot: setattr(slot, "is_idle", True)
    lost = died & set(range(slots))
    starts, found = coordinator.measure([SimpleNamespace(trial=trial) for trial in range(trials)], slots)
    assert len(begun) == (max(trials, slots) if trials else 0)
    assert {number for number, _ in begun} == (set(range(slots)) if trials else set())
    assert {trial for _, trial in begun} == set(range(trials))
    assert all(costs.step_s == assignment.trial for assignment, costs in found)
    assert len(found) == len(begun) - (len(lost) if trials else 0)
    # What was measured is no part of the sweep, and the starts are.
    assert coordinator.core_s - sum(starts) == sum(2.0 for fake in fakes if fake.core_s)


@pytest.mark.parametrize("limit_s", [0.0, 1e9])
def test_after_the_time_for_measurements_no_more_trials_are_measured(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_module, "MEASURE_S", limit_s)
    slot: Any = SimpleNamespace(number=0, is_idle=True, note_core_s=lambda seconds: None)
    coordinator: Any = object.__new__(Coordinator)
    coordinator._slots, coordinator._events, coordinator._passed = [slot], SimpleQueue[Event](), deque[Event]()

    def measure(assignment: Any) -> None:
        slot.is_idle = False
        coordinator._events.put(Event(0, {"costs": dict.fromkeys(COSTS, 1.0), "core_s": 1.0}))

    slot.measure = measure
    _, found = coordinator.measure([SimpleNamespace(trial=trial) for trial in range(3)], 1)
    assert [assignment.trial for assignment, _ in found] == ([0] if limit_s == 0 else [0, 1, 2])


def test_the_worker_that_was_waited_for_is_one_slot_and_its_answer_is_not_lost() -> None:
    noted, process = list[Event](), SimpleNamespace(host="a")
    coordinator: Any = object.__new__(Coordinator)
    coordinator._slots, coordinator._events, coordinator._passed = [], SimpleQueue[Event](), deque[Event]()
    coordinator._sweep = SimpleNamespace(folder=Path("nowhere"))
    coordinator._machines = SimpleNamespace(
        note=noted.append, expect_some=lambda slots: None, note_join=lambda host: None
    )
    coordinator._events.put(Event(-1, {"no_hosts": "b: no Python"}))
    ready: Any = Event(7, {"ready": 1, "core_s": 2.0}, process)
    coordinator._events.put(ready)
    with collect_messages() as said:
        coordinator.wait_for_slot()
        coordinator.wait_for_slot()
    assert said == ["Waiting for the first worker."]
    assert [slot.number for slot in coordinator._slots] == [7]
    assert len(noted) == 1
    event = coordinator._next_event()
    assert (event.slot, event.message) == (7, ready.message)
    assert len(coordinator._slots) == 1
