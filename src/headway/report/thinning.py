"""Long series as a few hundred rounded points, so that a page stays small."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Columns of a heat map, and points of a line: more than a screen can tell apart would only make the page larger.
MAX_POINTS = 240


def split_into_points(length: int) -> list[NDArray[np.int64]]:
    """Splits a series into the indices of at most MAX_POINTS runs of neighbours."""
    return np.array_split(np.arange(length), max(1, min(MAX_POINTS, length)))


def round_value(value: Any) -> float:
    """Rounds to four significant digits."""
    return float(f"{value:.4g}")
