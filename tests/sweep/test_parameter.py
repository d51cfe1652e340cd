from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.sweep.parameter import ParameterRecipe

UNIFORM = st.floats(0, 1, exclude_max=True)
POSITIVE = st.floats(1e-12, 1e12)
FINE = [(index + 0.5) / 2000 for index in range(2000)]


def parameter(**values: Any) -> ParameterRecipe:
    return ParameterRecipe.model_validate(values)


@st.composite
def ranges(draw: st.DrawFn) -> ParameterRecipe:
    kind = draw(st.sampled_from(["linear", "log", "integer", "log_integer"]))
    ends = {
        "linear": st.floats(-1e12, 1e12),
        "log": POSITIVE,
        "integer": st.integers(-(10**6), 10**6),
        "log_integer": st.integers(1, 10**6),
    }[kind]
    low, high = sorted([draw(ends), draw(ends)])
    assume(low < high)
    return parameter(**{kind: [low, high]})


@given(ranges(), UNIFORM, UNIFORM)
def test_a_value_lies_in_the_range_and_grows_with_the_uniform_number(
    one: ParameterRecipe, first: float, second: float
) -> None:
    low, high = one.bounds
    values = [one.compute_value(uniform) for uniform in sorted([first, second])]
    assert low <= values[0] <= values[1] <= high
    assert {type(value) for value in values} == {int if one.kind.endswith("integer") else float}


@given(ranges(), UNIFORM)
def test_rounding_a_drawn_number_again_changes_nothing(one: ParameterRecipe, uniform: float) -> None:
    assume(one.kind in ("linear", "log"))
    value = one.compute_value(uniform)
    assert one.round(value) == value


@given(ranges())
def test_no_range_is_too_narrow_for_many_values(one: ParameterRecipe) -> None:
    low, high = one.bounds
    # Neighbours among float64 have nothing between them.
    assume(one.kind in ("linear", "log") and high - low > 1e-9 * max(abs(low), abs(high)))
    assert len({one.compute_value(index / 500) for index in range(500)}) > 400


@pytest.mark.parametrize(
    ("values", "uniform", "expected"),
    [
        ({"log": [0.001, 1.0]}, 0.5, 0.03162),
        ({"log": [1e-6, 1e-2]}, 0.123, 3.105e-06),
        ({"linear": [0.8, 0.99]}, 0.3333, 0.8633),
        ({"linear": [0, 100]}, 1 / 3, 33.33),
        ({"linear": [0.9999, 0.99999]}, 1 / 3, 0.99993),
        ({"log": [0.998, 0.999]}, 1 / 3, 0.9983332),
        ({"linear": [-1, 1]}, 0.0, -1.0),
        ({"choice": ["a", None, [1, 2]]}, 0.99, [1, 2]),
    ],
)
def test_numbers_are_rounded_to_what_a_reader_wants(values: dict[str, Any], uniform: float, expected: Any) -> None:
    assert parameter(**values).compute_value(uniform) == expected


@given(POSITIVE, st.floats(1.5, 1e6), UNIFORM)
def test_log_is_the_quantile_function_of_the_log_uniform_distribution(low: float, ratio: float, u: float) -> None:
    value = parameter(log=[low, low * ratio]).compute_value(u)
    # 4 significant digits: half a unit of the fourth is at most 5e-4 of the value.
    assert value == pytest.approx(low * ratio**u, rel=5.1e-4)


@given(st.integers(-50, 50), st.integers(1, 40))
def test_whole_numbers_are_equally_likely_with_both_ends(low: int, width: int) -> None:
    one = parameter(integer=[low, low + width])
    counts = Counter(map(one.compute_value, FINE))
    assert sorted(counts) == list(range(low, low + width + 1))
    assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(1, 20), st.integers(1, 60))
def test_whole_numbers_of_a_log_range_have_shares_of_their_logarithms(low: int, width: int) -> None:
    high = low + width
    counts = Counter(map(parameter(log_integer=[low, high]).compute_value, FINE))
    whole = math.log((high + 0.5) / (low - 0.5))
    for value in range(low, high + 1):
        share = math.log((value + 0.5) / (value - 0.5)) / whole
        assert counts[value] / len(FINE) == pytest.approx(share, abs=2 / len(FINE))


@given(st.integers(1, 40))
def test_choices_are_equally_likely(count: int) -> None:
    one = parameter(choice=[str(index) for index in range(count)])
    counts = Counter(map(one.compute_value, FINE))
    assert len(counts) == count
    assert max(counts.values()) - min(counts.values()) <= 1
    # The largest number below 1 still gives the last one.
    assert one.compute_value(math.nextafter(1, 0)) == str(count - 1)


@given(ranges(), st.integers(2, 40))
def test_a_grid_goes_from_end_to_end(one: ParameterRecipe, points: int) -> None:
    one = one.model_copy(update={"points": points})
    low, high = one.bounds
    values = list(one.list_grid())
    assert (values[0], values[-1]) == (low, high)
    assert values == sorted(set(values))
    assert len(values) <= points
    if high - low > 100 * points and low > 0:
        assert len(values) == points


def test_a_grid_of_a_log_range_has_equal_ratios() -> None:
    assert parameter(log=[0.001, 1], points=4).list_grid() == [0.001, 0.01, 0.1, 1]
    assert parameter(linear=[0, 1], points=5).list_grid() == [0, 0.25, 0.5, 0.75, 1]
    assert parameter(log_integer=[8, 64], points=4).list_grid() == [8, 16, 32, 64]
    assert list(parameter(integer=[2, 5]).list_grid()) == [2, 3, 4, 5]
    assert parameter(linear=[0, 1]).list_grid() == ()
