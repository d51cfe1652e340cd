"""Quotas by largest remainders, weights, and the classes and patterns that they are for."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.lifecycle.mining.quotas import (
    Share,
    apportion,
    compute_weights,
    divide_by_quota,
    find_matches,
    parse_share,
)

CLASSES = ("bird", "cat", "dog")
PREDICTED = np.array([0, 1, 2, 1, 0, 2])
NAMES = ["night/1", "night/2", "day/3", "day/4", "day/5", "night/6"]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 200))
def test_parts_are_quotas_to_within_one(tenths: list[int], count: int) -> None:
    total = sum(tenths)
    if not total:
        return
    shares = [one / total for one in tenths]
    parts = apportion(count, shares, [1000] * len(shares))
    assert sum(parts) == count
    for part, share in zip(parts, tenths, strict=True):
        assert abs(part - Fraction(count * share, total)) < 1 + Fraction(1, 100)
    # Whoever has the larger share gets no less.
    for one, other in zip(range(len(parts)), range(1, len(parts)), strict=False):
        if tenths[one] > tenths[other]:
            assert parts[one] >= parts[other]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5), st.integers(0, 80))
def test_small_groups_leave_the_rest_to_the_others(groups: list[tuple[int, int]], count: int) -> None:
    shares, limits = [share / 10 for share, _ in groups], [limit for _, limit in groups]
    parts = apportion(count, shares, limits)
    assert sum(parts) == min(count, sum(limits))
    assert all(0 <= part <= limit for part, limit in zip(parts, limits, strict=True))
    # A group without a share gets something only if all others are full.
    for share, part in zip(shares, parts, strict=True):
        if share == 0 and part and any(shares):
            assert all(p == limit for s, p, limit in zip(shares, parts, limits, strict=True) if s > 0)


def test_remainders() -> None:
    assert apportion(10, [0.5, 0.3, 0.2], [99] * 3) == [5, 3, 2]
    assert apportion(7, [1 / 3] * 3, [99] * 3) == [3, 2, 2], "of equal remainders the first"
    assert apportion(30, [0.1, 0.9], [99] * 2) == [3, 27], "0.1 is a tenth, not its nearest binary number"
    assert apportion(10, [0.5, 0.5, 0], [2, 3, 99]) == [2, 3, 5]
    assert apportion(5, [0, 0], [3, 1]) == [3, 1]


def test_a_name_is_a_class_or_a_pattern() -> None:
    facts = (CLASSES, PREDICTED, NAMES)
    assert find_matches(Share("cat", 1), *facts).tolist() == [False, True, False, True, False, False]
    assert find_matches(Share("night/*", 1), *facts).tolist() == [True, True, False, False, False, True]
    assert compute_weights([], *facts) is None
    weights = compute_weights([Share("cat", 3), Share("night/*", 2)], *facts)
    assert weights is not None
    assert weights.tolist() == [2, 6, 1, 3, 1, 2]
    # A class that looks like a pattern is a class.
    assert find_matches(Share("a/b", 1), ("a/b",), np.zeros(6, np.int64), NAMES).all()
    for name, words in (("cta", "Did you mean 'cat'"), ("noon/*", "no image of the pool")):
        with pytest.raises(UsageError, match=words):
            find_matches(Share(name, 1), *facts)


def test_an_image_belongs_to_its_first_quota() -> None:
    masks, shares = divide_by_quota([Share("night/*", 0.5), Share("cat", 0.25)], CLASSES, PREDICTED, NAMES)
    assert [mask.tolist().count(True) for mask in masks] == [3, 1, 2]
    assert np.sum(masks, axis=0).tolist() == [1] * 6
    assert shares == pytest.approx([0.5, 0.25, 0.25])
    with pytest.raises(UsageError, match=r"add up to 1\.1"):
        divide_by_quota([Share("cat", 0.6), Share("dog", 0.5)], CLASSES, PREDICTED, NAMES)


def test_shares_are_parsed() -> None:
    assert parse_share("cat=3", "--weight") == Share("cat", 3.0)
    assert parse_share("a=b=0.5", "--quota", most=1) == Share("a=b", 0.5)
    for text in ("cat", "cat=", "=3", "cat=x", "cat=0", "cat=-1", "cat=nan", "cat=inf", ""):
        with pytest.raises(UsageError, match="NAME=NUMBER"):
            parse_share(text, "--weight")
    with pytest.raises(UsageError, match="at most 1"):
        parse_share("cat=1.5", "--quota", most=1)
