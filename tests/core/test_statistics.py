"""Spearman's rank correlation and the difference of two shares, by definitions, tables and invariances."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.statistics import compute_rank_correlation, compute_share_difference

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


@pytest.mark.parametrize(
    ("a", "b", "low", "high"),
    [
        ((56, 70), (48, 80), 0.0524, 0.3339),
        ((9, 10), (3, 10), 0.1705, 0.8090),
        ((6, 7), (2, 7), 0.0582, 0.8062),
        ((5, 56), (0, 29), -0.0381, 0.1926),
        ((0, 10), (0, 20), -0.1611, 0.2775),
        ((10, 10), (0, 10), 0.6075, 1.0),
    ],
)
def test_a_difference_of_shares_is_that_of_newcombes_table(
    a: tuple[int, int], b: tuple[int, int], low: float, high: float
) -> None:
    found = compute_share_difference(a, b)
    assert found[0] == pytest.approx(a[0] / a[1] - b[0] / b[1])
    assert found[1:] == pytest.approx((low, high), abs=1e-4)


@given(st.integers(0, 30), st.integers(1, 30), st.integers(0, 30), st.integers(1, 30))
def test_a_difference_of_shares_lies_in_its_interval_and_changes_sign(a: int, n: int, b: int, m: int) -> None:
    first, second = (min(a, n), n), (min(b, m), m)
    difference, low, high = compute_share_difference(first, second)
    assert -1 <= low <= difference <= high <= 1
    assert compute_share_difference(second, first) == pytest.approx((-difference, -high, -low))
