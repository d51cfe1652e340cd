"""What is needed latest goes first: the Order's inverse against a look through the whole future."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.order import Order
from headway.data.tiers.policy import NEVER, Outlook, Slots

few = settings(deadline=None, max_examples=40)


def future(order: Order | None, n: int, start: int, stop: int) -> list[int]:
    positions = np.arange(start, stop)
    return (order(positions)[1] if order else positions % n).tolist()


@few
@given(
    n=st.integers(1, 60),
    seed=st.integers(0, 99),
    window=st.none() | st.integers(1, 70),
    ordered=st.booleans(),
    position=st.integers(0, 300),
)
def test_next_use_is_the_first_position_that_comes(
    n: int, seed: int, window: int | None, ordered: bool, position: int
) -> None:
    order = Order(n, seed, window) if ordered else None
    coming = future(order, n, position, position + 2 * n)
    found = Outlook(position, n, order).next_use(np.arange(n))
    assert found.tolist() == [position + coming.index(sample) for sample in range(n)]


@few
@given(n=st.integers(1, 40), seed=st.integers(0, 99), position=st.integers(0, 100), data=st.data())
def test_with_other_hosts_only_this_hosts_slots_count(n: int, seed: int, position: int, data: st.DataObject) -> None:
    batch = data.draw(st.integers(1, 12))
    low = data.draw(st.integers(0, batch - 1))
    high = data.draw(st.integers(low + 1, batch))
    order = Order(n, seed)
    stop = (position // n + 8) * n
    mine = {}
    for place, sample in enumerate(future(order, n, position, stop), start=position):
        if low <= place % batch < high:
            mine.setdefault(sample, place)
    found = Outlook(position, n, order, Slots(low, high, batch)).next_use(np.arange(n))
    assert found.tolist() == [mine.get(sample, NEVER) for sample in range(n)]


def misses_of_belady(served: list[int], capacity: int, stop: int) -> int:
    """Of the first `stop`, with a cache that takes away what is needed latest by a look at everything that follows."""
    kept: set[int] = set()
    misses = 0
    for place, sample in enumerate(served[:stop], start=1):
        if sample not in kept:
            misses += 1
            if len(kept) == capacity:
                kept.remove(max(kept, key=served[place:].index))
            kept.add(sample)
    return misses


def misses_by_order(order: Order, served: list[int], capacity: int) -> int:
    kept: list[int] = []
    misses = 0
    for place, sample in enumerate(served):
        if sample in kept:
            continue
        misses += 1
        if len(kept) == capacity:
            when = Outlook(place + 1, order.samples, order).next_use(np.array(kept))
            del kept[int(when.argmax())]
        kept.append(sample)
    return misses


@pytest.mark.parametrize("window", [None, 8])
@given(n=st.integers(2, 24), seed=st.integers(0, 999), data=st.data())
@settings(deadline=None, max_examples=20)
def test_the_misses_are_beladys(window: int | None, n: int, seed: int, data: st.DataObject) -> None:
    """No choice of what to take away has fewer misses (Belady 1966)."""
    capacity = data.draw(st.integers(1, n))
    order = Order(n, seed, window)
    served = future(order, n, 0, 6 * n)
    longer = served + future(order, n, 6 * n, 8 * n)  # so that everything comes once more
    assert misses_by_order(order, served, capacity) == misses_of_belady(longer, capacity, len(served))
