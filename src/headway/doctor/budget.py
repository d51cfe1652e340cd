"""Divides the wall time of an examination among its measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import final


@final
@dataclass(frozen=True)
class Budget:
    """Seconds that measurements may take; most need less."""

    # Each single stage.
    each: float
    # Forward and backward with several batch sizes.
    passes: float
    # One thread count, or one changed stage.
    side: float
    # One run of the whole job.
    whole: float
    # All changed settings together.
    tries: float
    # Limit of everything, from the start of the process; measurements that no longer fit are left out.
    wall: float = inf
    # Longest step; if a step takes longer, the batch is reduced.
    step: float = inf

    def list_parts(self) -> dict[str, float]:
        """Returns the parts of an examination in order, with the seconds that each takes on a fast machine."""
        return {
            "loader": 1.2 * self.each,
            "threads": 2 * self.side,
            "loop": (1 + LOOK_SHARE) * self.each,
            "passes": self.passes,
            "beside": self.each,
            "handover": self.side,
            "augment": self.side,
            "copy": self.side,
            "evaluate": self.each,
            "checkpoint": self.side,
            "synthetic": self.side,
            "replay": self.side,
            "whole": self.whole,
            "cold": 3 * self.side + self.whole / 2,
            "tries": self.tries,
        }


# The limits promised to the user are 120 s and 45 s. The last step may begin at the last moment, so 105 s and 39 s are
# planned. The shortest examination runs about 17 steps: with steps of 6.4 s it took 113 s.
FULL = Budget(each=4.0, passes=3.0, side=1.5, whole=6.0, tries=50.0, wall=105.0, step=5.0)
QUICK = Budget(each=1.2, passes=1.0, side=0.6, whole=2.0, tries=12.0, wall=39.0, step=1.0)
# Share of the loop's time that is added for sampling the user's lines.
LOOK_SHARE = 0.5


@final
class WallTime:
    """Divides the time that is left among the parts that are still to come.

    Args:
        limit_s: of all parts together. wants: seconds that each part asks for, in their order.
        begun: the clock's time from which the limit counts.
    """

    def __init__(
        self,
        limit_s: float,
        wants: Mapping[str, float],
        begun: float,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._wants, self._clock, self._ends = dict(wants), clock, begun + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self._ends - self._clock())

    def allot(self, part: str) -> float:
        """Returns the seconds that a part may take: the time that it asks for, or its share of the time left if the
        parts to come ask for more than that. Earlier parts ask for nothing any more."""
        names = list(self._wants)
        to_come = sum(self._wants[name] for name in names[names.index(part) :])
        return self._wants[part] * min(1.0, self.left_s / to_come) if to_come else 0.0

    def fits(self, needs_s: float, *, keeps_s: float = 0.0) -> bool:
        """Returns True if `needs_s` fits into the time left, with `keeps_s` reserved for a more important part."""
        return needs_s + keeps_s <= self.left_s
