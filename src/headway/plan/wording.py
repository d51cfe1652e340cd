"""Durations as plain text for terminals and pages."""

from __future__ import annotations

# (unit, hours in one unit, smallest number of hours that is written in it).
HOUR_UNITS = (("d", 24.0, 48.0), ("h", 1.0, 1.0), ("min", 1 / 60, 1 / 60), ("s", 1 / 3600, 0.0))
UNIT_NAMES = {"d": "days", "h": "hours", "min": "minutes", "s": "seconds"}


def format_milliseconds(seconds: float) -> str:
    """Formats seconds in milliseconds: `3.1 ms`, `1,020 ms`. At least three digits, never an exponent."""
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def choose_unit(hours: float) -> tuple[str, float]:
    """Chooses the unit for a duration. Returns (unit, hours in one unit)."""
    return next((unit, each) for unit, each, least in HOUR_UNITS if hours >= least)


def format_hours(hours: float) -> str:
    """Formats a duration: `3.2 h`, `8.7 min`, `4.2 s` or `0.042 s`; days from two days on."""
    unit, each = choose_unit(hours)
    value = hours / each
    return f"{value:,.1f} {unit}" if value >= 1 else f"{value:.2g} {unit}"


def format_hours_range(low: float, high: float) -> str:
    """Formats a range of durations in the unit of the upper end: `9.9-12 min`."""
    unit, each = choose_unit(high)
    return f"{low / each:.3g}-{high / each:.3g} {unit}"
