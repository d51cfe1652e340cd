"""Budget: the seconds that measurements may take, and how the wall time that is left is shared among those to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from time import perf_counter
from typing import final


@final
@dataclass(frozen=True)
class Budget:
    """Seconds that measurements may take, most of them at once.

    Attributes:
        each: of a stage. passes: of forward and backward over several batches. side: of one number of threads, or a
            changed stage. whole: of a run of the whole job. tries: of all changed stages together.
        wall: of everything, from the start of the process; what does not fit any more is left out.
        step: of a step; where one takes longer, it is measured with fewer samples.
    """

    each: float
    passes: float
    side: float
    whole: float
    tries: float
    wall: float = inf
    step: float = inf

    def list_parts(self) -> dict[str, float]:
        """The parts of an examination in their order, and the seconds that each would take on a fast machine."""
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


# A minute and three quarters of the two that are promised, and 39 of 45 seconds: one step may begin at the last moment.
# The shortest examination makes some 17 steps: with steps of 6.4 s it took 113 s.
FULL = Budget(each=4.0, passes=3.0, side=1.5, whole=6.0, tries=50.0, wall=105.0, step=5.0)
QUICK = Budget(each=1.2, passes=1.0, side=0.6, whole=2.0, tries=12.0, wall=39.0, step=1.0)
LOOK_SHARE = 0.5
"""Of the time for the loop, in which the user's lines are looked at besides."""


@final
class WallTime:
    """Shares what is left of a limit among the parts that are still to come.

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
        """Seconds that a part may take: what it asks for; or, where all that is to come asks for more than is left, its
        share of that. Parts before it ask for nothing any more."""
        names = list(self._wants)
        to_come = sum(self._wants[name] for name in names[names.index(part) :])
        return self._wants[part] * min(1.0, self.left_s / to_come) if to_come else 0.0

    def fits(self, needs_s: float, *, keeps_s: float = 0.0) -> bool:
        """Tells whether there is time for something that takes at least so long, with so much left for what matters
        more."""
        return needs_s + keeps_s <= self.left_s
