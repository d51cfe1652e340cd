"""Byte counts as text."""

from __future__ import annotations


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
