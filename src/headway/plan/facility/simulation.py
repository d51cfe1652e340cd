"""Hours and nodes for a distance of simulated driving."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from headway.core.errors import UsageError

# "Super real-time simulation": 300,000 miles in 5 hours on 8 nodes of SaturnV (the deck of 2018). At that rate the same
# nodes drive 2.88 million miles in the 2 days in which it covers every paved road of the USA, which has some 2.8
# million miles of them.
MILES_PER_NODE_HOUR = 300_000 / 5 / 8


@final
@dataclass(frozen=True)
class SimulationNeed:
    """Time or nodes of a simulated distance."""

    miles: float
    # Hours on all nodes of the facility.
    hours: float
    # Requested hours, and the nodes that they need; None: not requested.
    within_hours: float | None
    nodes: int | None


def predict_simulation(nodes: int, miles: float, within_hours: float | None = None) -> SimulationNeed:
    """Predicts the hours of a distance on these nodes, and the nodes for a number of hours.

    Raises UsageError if a number is out of range.
    """
    for name, value in (("--miles", miles), ("--hours", within_hours)):
        if value is not None and not 1e-3 <= value <= 1e12:
            raise UsageError(f"{value:g} is out of range: the option takes 0.001 to 1e+12", where=name)
    needed = None if within_hours is None else math.ceil(miles / MILES_PER_NODE_HOUR / within_hours - 1e-9)
    return SimulationNeed(miles, miles / MILES_PER_NODE_HOUR / nodes, within_hours, needed)
