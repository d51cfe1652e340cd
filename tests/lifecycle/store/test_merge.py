"""Merges: what one side changed is taken, what both changed differently is listed, and nothing is guessed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lifecycle.store._contents import Content, contents, name_of, reach
from tests.lifecycle.store._pictures import addition, state

from headway.core.errors import UsageError
from headway.lifecycle.store.records import MergeConflictError
from headway.lifecycle.store.store import Store

names = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merges")


@pytest.fixture(scope="module")
def store(place: Path) -> Store:
    return Store.make(place / "store")


def branches(store: Store, place: Path, base: Content, *sides: Content) -> list[str]:
    """A data set with the first side, and one that started from its base for each other side."""
    found = []
    for side in sides:
        name = f"side-{next(names)}"
        if found:
            store.create(name, start=f"{found[0]}@v1")
        else:
            store.create(name)
            store.apply(name, reach(place, {}, base) or [addition(place, "always.png", 99)])
        store.apply(name, reach(place, base, side))
        found.append(name)
    return found


def merge_contents(base: Content, ours: Content, theirs: Content) -> tuple[Content, set[int]]:
    """The reference: by sample, what three contents give, and which conflict."""
    merged: Content = {}
    conflicts = set()
    absent = object()
    for number in {*base, *ours, *theirs}:
        was, our, their = (side.get(number, absent) for side in (base, ours, theirs))
        if our != was and their != was and our != their:
            conflicts.add(number)
            continue
        value = our if our != was else their
        if value is not absent:
            merged[number] = value  # type: ignore[assignment]
    return merged, conflicts


merges = given(base=contents, ours=contents, theirs=contents, prefer=st.sampled_from([None, "ours", "theirs"]))


@settings(max_examples=6)
@merges
def test_a_merge_is_that_of_each_sample(
    place: Path, store: Store, base: Content, ours: Content, theirs: Content, prefer: str | None
) -> None:
    compare(place, store, base, ours, theirs, prefer)


@pytest.mark.check
@settings(max_examples=60)
@merges
def test_a_merge_is_that_of_each_sample_often(
    place: Path, store: Store, base: Content, ours: Content, theirs: Content, prefer: str | None
) -> None:
    compare(place, store, base, ours, theirs, prefer)


def compare(place: Path, store: Store, base: Content, ours: Content, theirs: Content, prefer: str | None) -> None:
    """Merges, and compares with the reference."""
    # One sample that nobody touches, so that no side is the empty version that all data sets begin with.
    base, ours, theirs = ({**side, 90: "ant"} for side in (base, ours, theirs))
    one, other = branches(store, place, base, ours, theirs)
    head = store.resolve(one).version
    wanted, conflicts = merge_contents(base, ours, theirs)
    if conflicts and prefer is None:
        with pytest.raises(MergeConflictError) as caught:
            store.merge(one, other)
        sides = [conflict.ours or conflict.theirs for conflict in caught.value.conflicts]
        assert {side.name for side in sides if side} == set(map(name_of, conflicts))
        assert store.resolve(one).version == head
        return
    winner = ours if prefer == "ours" else theirs
    wanted |= {number: winner[number] for number in conflicts if number in winner}
    merged = store.merge(one, other, prefer=prefer)  # type: ignore[arg-type]
    found = {name: label for name, (label, _, _) in state(store, one).items()}
    assert found == {name_of(number): label for number, label in wanted.items()}
    assert merged.version.merged == store.resolve(other).version
    # The other side has nothing new now.
    assert not store.merge(one, other).is_new


def test_two_names_for_one_image_and_one_name_for_two(place: Path, store: Store) -> None:
    name = f"names-{next(names)}"
    store.create(name)
    store.apply(name, [addition(place, "old.png", 1)])
    other = f"names-{next(names)}"
    store.create(other, start=name)
    store.apply(name, [addition(place, "new.png", 2)])
    store.apply(other, [addition(place, "new.png", 3)])
    with pytest.raises(MergeConflictError, match=r"1 sample changed on both sides[\s\S]*new\.png"):
        store.merge(name, other)
    ours = state(store, name)["new.png"]
    assert state(store, f"{store.merge(name, other, prefer='ours').version.dataset}")["new.png"] == ours
    fork = f"names-{next(names)}"
    store.create(fork, start=f"{name}@v2")
    assert store.merge(fork, other, prefer="theirs").is_new
    assert state(store, fork)["new.png"] == state(store, other)["new.png"]


def test_data_sets_of_two_origins_or_schemas_are_refused(place: Path, store: Store) -> None:
    first, second = f"origin-{next(names)}", f"origin-{next(names)}"
    store.create(first)
    store.create(second)
    with pytest.raises(UsageError, match="no version in common"):
        store.merge(first, second)
    with pytest.raises(UsageError, match="no data set 'nobody'"):
        store.merge(first, "nobody")
