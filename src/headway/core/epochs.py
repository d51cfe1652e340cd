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


LONGEST_ROUND = 0.25
"""Largest share of an epoch that ranks may train alone in the strategy `local`: an evaluation or a checkpoint may come
so much later than asked."""


def count_longest_round(samples: int, batch: float) -> int:
    """Returns the largest number of steps of such a round: below 2 there is none, as one step is data parallel.

    Args:
        samples: size of the training set.
        batch: of all ranks together.
    """
    return int(LONGEST_ROUND * samples / batch)


def epochs_to_position(epochs: float, samples: int) -> int:
    """Returns the position (samples served) nearest to a number of epochs."""
    return round(epochs * samples)
