"""The line through messages' times; `tests/comm/test_links.py` has what noise does to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.line_fit import fit_line


@given(st.floats(1e-6, 1e-2), st.floats(1e-9, 1e-6))
def test_a_line_is_found_again(latency: float, per_byte: float) -> None:
    """One that rises: of the others it is said that their bandwidth is at least so much."""
    points = [(2.0**power, latency + 2.0**power * per_byte) for power in range(8, 28, 2)]
    found = fit_line(points)
    for nbytes, seconds in points:
        assert found.seconds(nbytes) == pytest.approx(seconds, rel=1e-4)


def test_one_late_message_moves_it_little() -> None:
    points = [(2.0**power, 1e-4 + 2.0**power * 1e-9) for power in range(10, 26)]
    points[5] = (points[5][0], 10 * points[5][1])
    found = fit_line(points)
    assert found.latency_s == pytest.approx(1e-4, rel=0.05)
    assert found.s_per_byte == pytest.approx(1e-9, rel=0.05)


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)], [(-1.0, 1.0)], [(float("nan"), 1.0)]])
def test_what_is_no_message_is_said(points: list[tuple[float, float]]) -> None:
    with pytest.raises(UsageError, match="1 byte or more"):
        fit_line(points)
