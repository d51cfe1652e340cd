"""Batch plan: how many positions each step of a run takes, as a pure function of the position where it begins."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from typing import final

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from headway.core.epochs import Milestones, position_of
from headway.core.errors import UsageError
from headway.core.recipe import Part

Int64 = NDArray[np.int64]


class BatchGrowthRecipe(Part):
    """The batch grows at milestones where a schedule would let the learning rate fall (Smith et al. 2018,
    arXiv 1711.00489)."""

    milestones_epochs: Milestones = Field(min_length=1)
    """Epochs from the beginning of the run; the first step that begins there or later is the first of the new size."""
    factor: int = Field(ge=2)
    """What the batch is multiplied by at each milestone: 10 for a learning rate that would fall to a tenth."""

    def compute_largest_batch(self, batch: int) -> int:
        """The batch after the last milestone."""
        return int(batch * self.factor ** len(self.milestones_epochs))


@final
class BatchPlan:
    """Steps of one size, or of sizes that grow at milestones. A step that is under way at a milestone ends as it began.

    Args:
        batch: samples of the first step, over all ranks.
        growth: None: all steps are alike.
        epoch: positions of one epoch; where there is growth.

    Attributes:
        starts: the position where each phase begins, that is steps of one size; int64 [phases].
        sizes: samples of a step in each phase; int64 [phases].

    Raises:
        UsageError: a batch below 1.
    """

    def __init__(self, batch: int, growth: BatchGrowthRecipe | None = None, *, epoch: int = 1) -> None:
        if batch < 1:
            raise UsageError(f"a batch of {batch} samples", fix="Set 1 or more.")
        starts, sizes = [0], [batch]
        for milestone in growth.milestones_epochs if growth is not None else ():
            assert growth is not None
            size, left = sizes[-1] * growth.factor, position_of(milestone, epoch) - starts[-1]
            if left > 0:
                starts.append(starts[-1] + -(-left // sizes[-1]) * sizes[-1])
                sizes.append(size)
            else:  # the step before has gone past this milestone too
                sizes[-1] = size
        self.starts, self.sizes = np.array(starts, np.int64), np.array(sizes, np.int64)
        self._starts, self._sizes = starts, sizes
        self._before = [0]
        for (start, end), size in zip(pairwise(starts), sizes, strict=False):
            self._before.append(self._before[-1] + (end - start) // size)

    def __repr__(self) -> str:
        return " then ".join(map(str, self._sizes))

    @property
    def largest_batch(self) -> int:
        """Samples of the largest step."""
        return self._sizes[-1]

    @property
    def grows(self) -> bool:
        """Whether there are steps of several sizes."""
        return len(self._sizes) > 1

    def get_batch_size(self, position: int) -> int:
        """Samples of the step that begins at a position."""
        return self._sizes[bisect_right(self._starts, position) - 1]

    def find_position(self, step: int) -> int:
        """Where the step begins before which there are so many."""
        phase = bisect_right(self._before, step) - 1
        return self._starts[phase] + (step - self._before[phase]) * self._sizes[phase]

    def count_steps(self, start: int, stop: int) -> int:
        """Number of steps from a position on, until all below `stop` are served."""
        steps, position = 0, start
        for size, end in zip(self._sizes, (*self._starts[1:], stop), strict=True):
            if (left := min(end, stop) - position) > 0:
                steps += (more := -(-left // size))
                position += more * size
        return steps

    def round_to_steps(self, positions: float) -> int:
        """The number of steps, at least 1, that comes nearest to so many positions."""
        phase = bisect_right(self._starts, positions) - 1
        return max(1, self._before[phase] + round((positions - self._starts[phase]) / self._sizes[phase]))

    def locate_slots(self, positions: Int64) -> tuple[Int64, Int64]:
        """(slot in its step, samples of that step) of each position; int64 arrays of the shape of `positions`."""
        phase = np.searchsorted(self.starts, positions, side="right") - 1
        sizes = self.sizes[phase]
        return (positions - self.starts[phase]) % sizes, sizes
