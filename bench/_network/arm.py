"""Arms: the kinds of steps that a rank can run."""

from __future__ import annotations

from typing import Protocol


class Arm(Protocol):
    """One way to make a step."""

    def step(self) -> None:
        """One step, to the end of the reduction and what follows it."""

    def found(self) -> list[float]:
        """What the steps found since this was asked last; asked outside the clock."""
