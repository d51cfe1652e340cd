"""Simulated driving, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from headway.core.errors import UsageError
from headway.plan.facility.simulation import predict_simulation


def test_the_deck_comes_back() -> None:
    """300,000 miles in 5 hours on 8 nodes; at that rate 2.88 million miles in 2 days, all paved roads of the USA."""
    assert predict_simulation(8, 300_000).hours == 5
    assert predict_simulation(8, 2_880_000).hours == 48


def test_worked_out_by_hand() -> None:
    """7,500 miles an hour and node: 1,000,000 miles are 133.3 node-hours, so 33.3 hours on 4, and 14 for 10 hours."""
    found = predict_simulation(4, 1_000_000, within_hours=10)
    assert found.hours == pytest.approx(100 / 3)
    assert found.nodes == 14
    assert predict_simulation(1, 75_000, within_hours=5).nodes == 2


@pytest.mark.parametrize(("miles", "hours", "said"), [(-3, None, "--miles: -3"), (10, 0, "--hours: 0 is out of range")])
def test_what_is_out_of_range_is_said(miles: float, hours: float | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        predict_simulation(8, miles, hours)
