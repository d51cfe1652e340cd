"""Batch plan: the size of each step of a run, as a pure function of the step's first position."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import Annotated, Any, final

import numpy as np
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag

from headway.core.epochs import Milestones, epochs_to_position
from headway.core.errors import UsageError
from headway.core.recipe import RecipePart

Int64 = NDArray[np.int64]


class PerDeviceBatchRecipe(RecipePart):
    """A batch that follows the number of devices."""

    per_device: int = Field(ge=1)
    """Samples of a step on each device. The global batch is this times the ranks with which the run starts; it stays
    when a run goes on with another number."""


def _find_tag(value: Any) -> str:
    return "mapping[per device]" if isinstance(value, dict | PerDeviceBatchRecipe) else "int"


BatchSize = Annotated[
    Annotated[int, Field(ge=1), Tag("int")] | Annotated[PerDeviceBatchRecipe, Tag("mapping[per device]")],
    Discriminator(_find_tag),
]
"""A global batch, or {per_device}. The form of the tags tells error messages to leave them out of a key."""


class BatchGrowthRecipe(RecipePart):
    """The batch grows at milestones at which a schedule would lower the learning rate (Smith et al. 2018,
    arXiv 1711.00489)."""

    milestones_epochs: Milestones = Field(min_length=1)
    """Epochs at which the batch grows. The first step that begins at a milestone or later has the new size."""
    factor: int = Field(ge=2)
    """Factor of the batch at each milestone. 10 replaces a decay of the learning rate to a tenth."""

    def compute_largest_batch(self, batch: int) -> int:
        """Returns the batch size after the last milestone."""
        return int(batch * self.factor ** len(self.milestones_epochs))


@final
class BatchPlan:
    """The steps of a run, of one size or of sizes that grow at milestones. A step across a milestone keeps its size.

    Args:
        batch: samples of the first step, over all ranks.
        growth: None: all steps have one size.
        epoch: positions of one epoch; only used with growth.

    Attributes:
        starts: first position of each phase (consecutive steps of one size); int64 [phases].
        sizes: samples of a step in each phase; int64 [phases].

    Raises:
        UsageError: a batch below 1.
    """

    def __init__(self, batch: int, growth: BatchGrowthRecipe | None = None, *, epoch: int = 1) -> None:
        if batch < 1:
            raise UsageError(f"a batch of {batch} samples", fix="Set 1 or more.")
        starts = [0]
        sizes = [batch]
        for milestone in growth.milestones_epochs if growth is not None else ():
            assert growth is not None
            size = sizes[-1] * growth.factor
            num_left = epochs_to_position(milestone, epoch) - starts[-1]
            # A phase begins at the end of a step: the first one at the milestone or behind it.
            if num_left > 0:
                starts.append(starts[-1] + -(-num_left // sizes[-1]) * sizes[-1])
                sizes.append(size)
            # The last step of the phase before went past this milestone too, so the phase would have no step.
            else:
                sizes[-1] = size
        # As arrays for `locate_slots`, as lists for the calls below: bisect on a list is faster for one position.
        self.starts = np.array(starts, np.int64)
        self.sizes = np.array(sizes, np.int64)
        self._starts = starts
        self._sizes = sizes
        # Number of steps before each phase.
        self._steps_before = [0]
        for (start, end), size in zip(pairwise(starts), sizes, strict=False):
            self._steps_before.append(self._steps_before[-1] + (end - start) // size)

    def __repr__(self) -> str:
        return " then ".join(map(str, self._sizes))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest step."""
        return self._sizes[-1]

    @property
    def grows(self) -> bool:
        """True if there are steps of several sizes."""
        return len(self._sizes) > 1

    def get_batch_size(self, position: int) -> int:
        """Returns the batch size of the step that begins at a position."""
        return self._sizes[bisect_right(self._starts, position) - 1]

    def find_position(self, step: int) -> int:
        """Returns the first position of a step; steps count from 0."""
        # The last phase that begins at or before the step.
        phase = bisect_right(self._steps_before, step) - 1
        return self._starts[phase] + (step - self._steps_before[phase]) * self._sizes[phase]

    def count_steps(self, start: int, stop: int) -> int:
        """Returns the number of steps that serve all positions from `start` to below `stop`."""
        return self._count_steps_and_end(start, stop)[0]

    def find_step_end(self, start: int, stop: int) -> int:
        """Returns the end of the last of these steps: `stop`, or the first end of a step after it."""
        return self._count_steps_and_end(start, stop)[1]

    def _count_steps_and_end(self, start: int, stop: int) -> tuple[int, int]:
        """Returns (number, end) of the steps that serve all positions from `start` to below `stop`."""
        steps = 0
        position = start
        for size, end in zip(self._sizes, (*self._starts[1:], stop), strict=True):
            if (num_left := min(end, stop) - position) > 0:
                # Rounded up: the last step of a phase may end behind the phase.
                steps += (phase_steps := -(-num_left // size))
                position += phase_steps * size
        return steps, position

    def round_to_steps(self, positions: float) -> int:
        """Converts a number of positions to the nearest number of whole steps, at least 1."""
        phase = bisect_right(self._starts, positions) - 1
        return max(1, self._steps_before[phase] + round((positions - self._starts[phase]) / self._sizes[phase]))

    def locate_slots(self, positions: Int64) -> tuple[Int64, Int64]:
        """Returns (slot in its step, samples of that step) of each position; int64, shaped like `positions`."""
        phase = np.searchsorted(self.starts, positions, side="right") - 1
        sizes = self.sizes[phase]
        return (positions - self.starts[phase]) % sizes, sizes
