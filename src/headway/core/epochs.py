"""Epochs as recipes state them: times of a run that do not depend on the batch size."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field


def _check_rising(milestones: tuple[float, ...]) -> tuple[float, ...]:
    if any(after <= before for before, after in pairwise(milestones)):
        raise ValueError(f"milestones_epochs {list(milestones)} do not rise. Write each once, in ascending order")
    return milestones


# A duration in passes over the training set; it may be fractional.
Epochs = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# Times counted from the start of the run, in ascending order.
Milestones = Annotated[tuple[Epochs, ...], AfterValidator(_check_rising)]


def epochs_to_position(epochs: float, samples: int) -> int:
    """Returns the position (samples served) nearest to a number of epochs."""
    return round(epochs * samples)
