"""Rounds: which steps of a run each rank makes alone, and after which steps all ranks have the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class Rounds:
    """The rounds of a run, as a pure function of the step. Steps count from 1; a step of data parallel is a round.

    Attributes:
        first: steps before the first round of several steps.
        length: steps of a round; the last one ends with the run, and may be shorter.
        steps: steps of the run.
    """

    first: int
    length: int
    steps: int

    def is_alone(self, step: int) -> bool:
        """Returns True if each rank makes this step alone."""
        return step > self.first

    def is_end(self, step: int) -> bool:
        """Returns True if all ranks have the same weights after this step."""
        return not self.is_alone(step) or (step - self.first) % self.length == 0 or step == self.steps

    def find_start(self, step: int) -> int:
        """Returns the number of steps before the round of this step."""
        if not self.is_alone(step):
            return step - 1
        return self.first + (step - 1 - self.first) // self.length * self.length

    def is_due(self, step: int, every: int) -> bool:
        """Returns True after the round in which a multiple of `every` steps was reached."""
        return self.is_end(step) and step // every > self.find_start(step) // every
