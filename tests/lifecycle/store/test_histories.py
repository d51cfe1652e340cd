"""Histories of requests: equal contents have equal versions, a difference and its inverse cancel out, and the split of
an old sample never moves by itself."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lifecycle.store._contents import Content, contents, name_of, reach
from tests.lifecycle.store._pictures import state

from headway.data.store_address import UNLABELLED
from headway.lifecycle.store.manifest import Schema
from headway.lifecycle.store.store import Store

names = itertools.count()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("histories")


@pytest.fixture(scope="module")
def store(place: Path) -> Store:
    return Store.make(place / "store")


histories = given(end=contents, steps=st.lists(contents, max_size=2))


@settings(max_examples=5)
@histories
def test_equal_contents_have_equal_versions(place: Path, store: Store, end: Content, steps: list[Content]) -> None:
    follow(place, store, end, steps)


@pytest.mark.check
@settings(max_examples=60)
@histories
def test_equal_contents_have_equal_versions_often(
    place: Path, store: Store, end: Content, steps: list[Content]
) -> None:
    follow(place, store, end, steps)


def follow(place: Path, store: Store, end: Content, steps: list[Content]) -> None:
    """Makes one content by steps and at once, and compares the two, and each step with its inverse."""
    name, direct = f"way-{next(names)}", f"direct-{next(names)}"
    store.create(name)
    store.create(direct)
    now: Content = {}
    splits: dict[str, str] = {}
    for wanted in [*steps, end]:
        before = store.resolve(name)
        outcome = store.apply(name, reach(place, now, wanted))
        assert outcome.rejected == ()
        assert outcome.duplicates == ()
        now = wanted
        found = state(store, name)
        assert {one: label for one, (label, _, _) in found.items()} == {
            name_of(number): label for number, label in wanted.items()
        }
        for one, (label, split, _) in found.items():
            assert (split == UNLABELLED) == (label is None)
            # Labelled again, added again: always the same split.
            assert label is None or splits.setdefault(one, split) == split
        old, new = (f"{name}@{version.version}" for version in (before, outcome.version))
        difference = store.diff(old, new)
        assert bool(difference) == outcome.is_new
        if outcome.is_new:
            assert difference.counts == dict(outcome.version.counts)
            back = store.apply(name, difference.invert().to_changes())
            assert back.version.version == before.version
            assert store.apply(name, difference.to_changes()).version.version == outcome.version.version
    store.apply(direct, reach(place, {}, end))
    assert store.resolve(direct).version == store.resolve(name).version


@given(st.lists(st.text(min_size=1, max_size=12), unique=True, max_size=20), st.integers(1, 99))
def test_the_split_is_a_function_of_the_name(texts: list[str], percent: int) -> None:
    schema = Schema.build("keep", {"train": percent / 100, "eval": 1 - percent / 100}, None)
    texts = [text.encode(errors="replace").decode() for text in texts]
    together = schema.choose_splits(texts).tolist()
    assert together == [schema.choose_splits([text])[0] for text in texts]
    assert schema.choose_splits(reversed(texts)).tolist() == together[::-1]


def test_shares_are_kept_over_many_names() -> None:
    schema = Schema.build("keep", {"train": 0.7, "eval": 0.2, "test": 0.1}, None)
    found = schema.choose_splits(f"cat/{number:05d}.jpg" for number in range(20_000))
    shares = [float((found == schema.find_split(name)).mean()) for name in ("train", "eval", "test")]
    # Three standard deviations of a binomial distribution.
    assert shares == pytest.approx([0.7, 0.2, 0.1], abs=0.01)
