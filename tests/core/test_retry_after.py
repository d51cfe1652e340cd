"""Retry-After: seconds and dates, never more than the limit, and nothing that raises."""

from __future__ import annotations

from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.retry_after import parse_retry_after

NOW = 1_800_000_000


@given(st.integers(0, 10**6), st.integers(0, 10**5))
def test_seconds_and_dates_say_the_same(seconds: int, most: int) -> None:
    for text in (str(seconds), formatdate(NOW + seconds, usegmt=True), f" {formatdate(NOW + seconds)} "):
        assert parse_retry_after(text, most, now=NOW) == min(seconds, most)
    assert parse_retry_after(formatdate(NOW - seconds, usegmt=True), most, now=NOW) == 0


@given(st.text("0123456789 -+.:,GMTonFriJanw\u0663"))
def test_whatever_a_server_sends_is_a_pause_within_the_limit(text: str) -> None:
    assert 0 <= parse_retry_after(text, 300) <= 300


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0),
        ("-5", 0),
        ("1.5", 0),
        ("soon", 0),
        ("\u0663", 0),
        ("9" * 5000, 300),
        ("Fri, 99 Xyz 2026 25:00:00 GMT", 0),
    ],
)
def test_what_is_no_pause_is_none(text: str, seconds: float) -> None:
    assert parse_retry_after(text, 300, now=NOW) == seconds
