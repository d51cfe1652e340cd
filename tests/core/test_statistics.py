"""Spearman's rank correlation, by its definition and its invariances."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.statistics import compute_rank_correlation

NUMBERS = st.integers(-5, 5)
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=9)


def test_without_equal_values_it_is_the_textbooks_formula() -> None:
    """1 - 6 sum(d^2) / (n (n^2 - 1)), over all orders of five."""
    for order in permutations(range(5)):
        squares = sum((one - place) ** 2 for place, one in enumerate(order))
        expected = 1 - 6 * squares / (5 * 24)
        assert compute_rank_correlation(list(range(5)), list(order)) == pytest.approx(expected)


@given(PAIRS)
def test_a_rising_function_changes_nothing_and_a_falling_one_the_sign(pairs: list[tuple[int, int]]) -> None:
    x, y = ([float(one) for one in side] for side in zip(*pairs, strict=True))
    found = compute_rank_correlation(x, y)
    assert found == compute_rank_correlation([math.exp(one) for one in x], y)
    other = compute_rank_correlation(x, [-(one**3) for one in y])
    if found is None:
        assert other is None
        assert min(len(set(x)), len(set(y))) == 1
    else:
        assert other == pytest.approx(-found)
        assert -1 - 1e-12 <= found <= 1 + 1e-12
        assert found == pytest.approx(compute_rank_correlation(y, x))


def test_equal_values_share_the_mean_of_their_ranks() -> None:
    """Ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4: their correlation is 4.5 / sqrt(4.5 x 5)."""
    assert compute_rank_correlation([1, 7, 7, 9], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert compute_rank_correlation([1.0], [2.0]) is None
    assert compute_rank_correlation([1.0, 1.0], [2.0, 3.0]) is None
