"""Values of recipes and scores as pages show them, and how to read a chart of many lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.recipe_yaml import dump_in_line

# Digits of scores and parameters: more than a page can show.
DIGITS = 6

# Highest number over lowest from which numbers are drawn, and compared, by their logarithms.
LOG_RATIO = 50.0

PARALLEL_HELP = (
    "Drag along an axis to select a range, on several axes if you like; click on the axis to remove it. Point at a "
    "line to read it. By keyboard: up and down go through the lines by rank, left and right through the axes, Enter "
    "selects around the line, Escape clears."
)
"""How to use a `parallel` panel."""


def round_number(value: float | None) -> Any:
    """Rounds a number to DIGITS significant digits; whole numbers stay what they are."""
    return value if value is None or isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def format_value(value: Any) -> str:
    """Formats a value as a recipe has it, with at most DIGITS digits."""
    # A fork's values are products, with digits that say nothing.
    return dump_in_line(round_number(value) if isinstance(value, float) else value)


def is_steep(values: Sequence[float]) -> bool:
    """Returns True for numbers above 0 that span so much that a linear axis shows only the largest."""
    return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)
