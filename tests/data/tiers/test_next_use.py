"""When a sample is needed next, and what makes way for it, against a look through the whole future."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.batch_plan import BatchGrowthRecipe, BatchPlan
from headway.data.order import Order, get_rank_slots
from headway.data.tiers.next_use import NO_NEXT_USE, HostSlots, ReadForecast

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
    found = ReadForecast(position, n, order).find_next_use(np.arange(n))
    assert found.tolist() == [position + coming.index(sample) for sample in range(n)]


@few
@given(n=st.integers(1, 40), seed=st.integers(0, 99), position=st.integers(0, 100), data=st.data())
def test_with_other_hosts_only_this_hosts_slots_count(n: int, seed: int, position: int, data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 12))
    first = data.draw(st.integers(0, world - 1))
    last = data.draw(st.integers(first + 1, world))
    growth = BatchGrowthRecipe(milestones_epochs=(1.5, 3), factor=2) if data.draw(st.booleans()) else None
    plan = BatchPlan(data.draw(st.integers(1, 12)), growth, epoch=n)
    order = Order(n, seed)
    stop = (position // n + 8) * n
    mine: dict[int, int] = {}
    begin = 0
    served = order(np.arange(stop))[1].tolist()
    while begin < stop:
        size = plan.get_batch_size(begin)
        low, high = get_rank_slots(size, first, world)[0], get_rank_slots(size, last - 1, world)[1]
        for place in range(max(position, begin + low), min(stop, begin + high)):
            mine.setdefault(served[place], place)
        begin += size
    found = ReadForecast(position, n, order, HostSlots(plan, first, last, world)).find_next_use(np.arange(n))
    assert found.tolist() == [mine.get(sample, NO_NEXT_USE) for sample in range(n)]


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


def misses_by_order(order: Order, stop: int, capacity: int, slots: HostSlots | None = None) -> tuple[int, int]:
    """Of a cache that makes way as a store's does: misses, and how often it was written to."""
    kept: list[int] = []
    misses = written = 0
    for place, sample in enumerate(future(order, order.samples, 0, stop)):
        if slots and not slots.select_owned(np.array([place])).all():
            continue
        if sample in kept:
            continue
        misses += 1
        if len(kept) == capacity:
            forecast = ReadForecast(place, order.samples, order, slots)
            when = ReadForecast(place + 1, order.samples, order, slots).find_next_use(np.array(kept))
            if when.max() < forecast.find_eviction_start(np.array([sample])):
                continue
            del kept[int(when.argmax())]
        kept.append(sample)
        written += 1
    return misses, written


@pytest.mark.parametrize("window", [None, 8])
@given(n=st.integers(2, 24), seed=st.integers(0, 999), data=st.data())
@settings(deadline=None, max_examples=20)
@pytest.mark.thin(1)
def test_no_choice_has_fewer_misses(window: int | None, n: int, seed: int, data: st.DataObject) -> None:
    """A cache of c records is hit at most c times an epoch. That is reached, and Belady's choice does no better."""
    capacity, epochs = data.draw(st.integers(1, n)), 6
    order = Order(n, seed, window)
    misses, written = misses_by_order(order, epochs * n, capacity)
    assert misses == n + (epochs - 1) * (n - capacity)
    assert written == capacity  # a full cache is not written to any more
    longer = future(order, n, 0, (epochs + 2) * n)  # so that everything comes once more
    assert misses <= misses_of_belady(longer, capacity, epochs * n)


@pytest.mark.check
@pytest.mark.thin(1)
@pytest.mark.parametrize(("hosts", "capacity"), [(2, 30), (4, 30), (4, 10)])
def test_with_other_hosts_there_are_hardly_more_misses_than_beladys(hosts: int, capacity: int) -> None:
    n, batch, epochs = 120, 8, 10
    share_of_host = batch // hosts
    slots = HostSlots(BatchPlan(batch), 0, 1, hosts)
    order = Order(n, 5)
    stop = epochs * n
    misses, written = misses_by_order(order, stop, capacity, slots)
    mine = [sample for place, sample in enumerate(future(order, n, 0, 4 * stop)) if place % batch < share_of_host]
    best = misses_of_belady(mine, capacity, len(range(0, stop, batch)) * share_of_host)
    assert misses <= 1.03 * best
    assert written <= misses


def test_what_is_needed_never_makes_no_way() -> None:
    order, slots = Order(40, 1), HostSlots(BatchPlan(40), 0, 1, 40)  # of an epoch, this host takes one sample
    _, samples = order(np.arange(40 * 30))
    other = np.setdiff1d(np.arange(40), samples[::40][:20])[:3]
    assert ReadForecast(0, 40, order, slots).find_eviction_start(other) == NO_NEXT_USE
    assert ReadForecast(0, 40, order).find_eviction_start(other) == 80
    assert ReadForecast(45, 40, order).find_eviction_start(np.arange(40)) == 160
