"""Gain of more training data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.error_curve import fit_error_curve
from headway.plan.growth import CPU_FLOPS, PF_S_DAY, fit_power_law, predict_growth


@given(st.floats(0.01, 100), st.floats(-2, 2))
def test_a_law_is_found_again(scale: float, exponent: float) -> None:
    law = fit_power_law([(x, scale * x**exponent) for x in (10.0, 100.0, 5000.0)])
    assert law.exponent == pytest.approx(exponent, abs=1e-9)
    assert law(1234.0) == pytest.approx(scale * 1234.0**exponent)


def test_computing_grows_with_data_and_network() -> None:
    error, size = fit_error_curve([(1e5, 0.4), (1e6, 0.2), (1e7, 0.1)]), fit_power_law([(1e5, 1e6), (1e7, 1e7)])
    found = predict_growth(1e9, error, size=size, flops_per_sample=1e9, now_parameters=1e6, epochs=2)
    assert found.parameters == pytest.approx(1e8)
    assert found.error == pytest.approx(0.1 / 4, rel=0.01)
    total = 1e9 * 100 * 1e9 * 2
    assert found.pf_s_days == pytest.approx(total / PF_S_DAY)
    assert found.cpu_years == pytest.approx(total / CPU_FLOPS / 31_557_600)
    assert found.extrapolated == pytest.approx(100)


def test_a_thousand_days_at_a_petaflops_are_hundreds_of_years_without_a_gpu() -> None:
    assert 100 < 1000 * PF_S_DAY / CPU_FLOPS / 31_557_600 < 1000


def test_what_is_no_law_is_said() -> None:
    with pytest.raises(UsageError, match="2 points or more"):
        fit_power_law([(1, 1), (1, 2)])
    with pytest.raises(UsageError, match="above 0"):
        fit_power_law([(1, 0), (2, 2)])
    rising, flat = fit_error_curve([(1, 1), (2, 2)]), fit_error_curve([(1, 2), (4, 1)])
    with pytest.raises(UsageError, match="does not fall with more data"):
        predict_growth(10, rising)
    with pytest.raises(UsageError, match=r"between 0 and 1, not 1.000"):
        predict_growth(10, flat, size=fit_power_law([(1, 1), (2, 2)]))
    with pytest.raises(UsageError, match="at least one sample, not 0"):
        predict_growth(0, flat)
