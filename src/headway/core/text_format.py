"""Counts, bytes, times and tables as plain text."""

from __future__ import annotations

from collections.abc import Sequence


def pluralise(number: int, name: str) -> str:
    """Returns a count with its noun: `1 rack`, `2 racks`, `3 switches`, `4 processes`, `5 boxes`."""
    return f"{number:,} {name}{'' if number == 1 else 'es' if name.endswith(('ch', 'ss', 'x')) else 's'}"


def format_bytes(nbytes: float, digits: int = 3) -> str:
    """Returns a byte count in decimal units, for example `102 MB`.

    Args:
        digits: significant digits, 3 or more: fewer would print 102 MB as 1e+02 MB.
    """
    # 999,600 bytes have three digits as 1 MB, not as 1000 kB: each unit begins half a digit below its power.
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit * (1 - 0.5 * 10**-digits):
            return f"{nbytes / unit:.{digits}g} {name}"
    return f"{nbytes:.0f} bytes"


def format_count(number: float) -> str:
    """Returns a large count as people say it, for example `67.0 million`; below a million all of its digits."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        # 999,960,000 has three digits as 1.00 billion, not as 1000 million.
        if number >= unit * 0.9995:
            return f"{number / unit:,.3g} {name}" if number < 1e3 * unit else f"{number / unit:,.0f} {name}"
    return f"{number:,.0f}"


def format_duration(seconds: float) -> str:
    """Formats seconds as `8.1s`, `3m07s` or `2h05m`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def align_table(rows: Sequence[Sequence[str]], *, left: int = 0) -> list[str]:
    """Aligns rows of cells as lines of text: column `left` to the left, all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left %= len(widths)
    return [
        "  ".join(
            cell.ljust(width) if place == left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
