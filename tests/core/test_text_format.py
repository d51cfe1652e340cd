"""Counts and bytes as text."""

from __future__ import annotations

import pytest

from headway.core.text_format import format_bytes, format_count


@pytest.mark.parametrize(
    ("number", "digits", "said"),
    [
        (12, 4, "12 bytes"),
        (1_500, 4, "1.5 kB"),
        (102_228_128, 4, "102.2 MB"),
        (102_228_128, 3, "102 MB"),
        (2.5e12, 4, "2.5 TB"),
        # No exponent at the end of a unit: 999,600 bytes have three digits as 1 MB.
        (999_400, 3, "999 kB"),
        (999_600, 3, "1 MB"),
        (999_600, 4, "999.6 kB"),
    ],
)
def test_bytes_as_text(number: float, digits: int, said: str) -> None:
    assert format_bytes(number, digits) == said


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0"), (999_499, "999,499"), (999_600, "1 million"), (66_980_638, "67 million"), (2_409_725, "2.41 million"),
        (999_400_000, "999 million"), (999_960_000, "1 billion"), (1.5e12, "1,500 billion"),
    ],
)  # fmt: skip
def test_large_counts_are_rounded_as_people_say_them(number: float, said: str) -> None:
    assert format_count(number) == said
