from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.sweep.rungs import Bracket, build_bracket, build_hyperband, count_divisions

# (R, eta): sizes of the rungs in each bracket. Those of (81, 3) stand in the paper (arXiv 1603.06560, table 1); its
# first bracket of 34 was changed from 27 there by rounding up, as in its algorithm.
TABLES = {
    (9, 2): [[8, 4, 2, 1], [6, 3, 1], [4, 2], [4]],
    (9, 3): [[9, 3, 1], [5, 1], [3]],
    (9, 4): [[4, 1], [2]],
    (27, 2): [[16, 8, 4, 2, 1], [10, 5, 2, 1], [7, 3, 1], [5, 2], [5]],
    (27, 3): [[27, 9, 3, 1], [12, 4, 1], [6, 2], [4]],
    (27, 4): [[16, 4, 1], [6, 1], [3]],
    (81, 2): [
        [64, 32, 16, 8, 4, 2, 1],
        [38, 19, 9, 4, 2, 1],
        [23, 11, 5, 2, 1],
        [14, 7, 3, 1],
        [10, 5, 2],
        [7, 3],
        [7],
    ],
    (81, 3): [[81, 27, 9, 3, 1], [34, 11, 3, 1], [15, 5, 1], [8, 2], [5]],
    (81, 4): [[64, 16, 4, 1], [22, 5, 1], [8, 2], [4]],
}


@pytest.mark.parametrize(("full", "eta"), TABLES)
def test_hyperband_has_the_tables_of_its_paper(full: int, eta: int) -> None:
    brackets = build_hyperband(full, eta)
    assert [list(bracket.sizes) for bracket in brackets] == TABLES[full, eta]
    for bracket in brackets:
        # r_i = R eta^(i - s), up to R.
        depth = len(bracket.sizes) - 1
        levels = [full * level for level in bracket.levels]
        assert levels == [Fraction(full * eta**rung, eta**depth) for rung in range(depth + 1)]
        assert 1 <= levels[0] < eta or depth < len(brackets) - 1
        assert levels[-1] == full


@given(st.integers(2, 7), st.integers(1, 10**6), st.integers(1, 50))
def test_the_logarithm_is_rounded_down_exactly(eta: int, numerator: int, denominator: int) -> None:
    ratio = Fraction(numerator, denominator)
    count = count_divisions(max(ratio, Fraction(1)), eta)
    assert eta**count <= max(ratio, 1) < eta ** (count + 1)


@pytest.mark.parametrize("eta", [2, 3, 4, 5, 10])
def test_exact_powers_are_counted_in_full(eta: int) -> None:
    for power in range(40):
        assert count_divisions(eta**power, eta) == power
        assert count_divisions(eta ** (power + 1) - 1, eta) == power


@given(st.integers(0, 5000), st.integers(0, 6), st.integers(2, 5))
def test_one_of_eta_goes_on_and_work_is_what_each_trial_trained(trials: int, depth: int, eta: int) -> None:
    bracket = build_bracket(trials, depth, eta)
    for below, above in zip(bracket.sizes, bracket.sizes[1:], strict=False):
        assert above == below // eta
    # Trial by trial, up to the level where it stays.
    leaving = [size - above for size, above in zip(bracket.sizes, (*bracket.sizes[1:], 0), strict=True)]
    assert bracket.work == sum(count * level for count, level in zip(leaving, bracket.levels, strict=True))


def test_a_round_numbers_its_trials_one_after_the_other() -> None:
    brackets = build_hyperband(27, 3, first_trial=5)
    assert [bracket.first_trial for bracket in brackets] == [5, 32, 44, 50]
    assert brackets[-1] == Bracket(50, (Fraction(1),), (4,))
