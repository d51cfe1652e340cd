"""Which slot trains which trials."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.coordinator import Coordinator

SLOTS, TRIALS = 3, 6


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
