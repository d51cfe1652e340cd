"""Epochs as recipes state them: moments of a run, whatever the batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field


def _check_rising(milestones: tuple[float, ...]) -> tuple[float, ...]:
    if any(after <= before for before, after in pairwise(milestones)):
        raise ValueError(f"milestones_epochs {list(milestones)} do not rise. Write each once, in order")
    return milestones


Epochs = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""So many times the data set."""

Milestones = Annotated[tuple[Epochs, ...], AfterValidator(_check_rising)]
"""Moments, counted from the beginning of the run."""


def epochs_to_position(epochs: float, samples: int) -> int:
    """The position nearest to so many epochs of a data set."""
    return round(epochs * samples)
