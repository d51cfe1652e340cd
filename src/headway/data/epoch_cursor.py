"""EpochCursor: the epoch that a loader serves, and its next position."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from headway.core.errors import CheckpointError, UsageError
from headway.data.batch_plan import BatchPlan
from headway.data.order import Order

STATE_KEYS = ("epoch", "position", "samples", "seed")


@final
class EpochCursor:
    """Position of a loader in its run. An epoch is what one iteration serves: by default one pass through the data set.

    Steps are full and continue across the end of a pass. So an epoch begins at the first step that begins in it, and
    all epochs together serve every sample once in each pass. An epoch that is shorter than a step has one step.

    Args:
        samples: size of the data set.
        order: None: each epoch serves the same positions.
        plan: samples of each step.
        start: first position of epoch 0.
        stop: end of epoch 0; later epochs continue behind it and are as long. None: the end of the pass that `start`
            lies in, and each later epoch is one pass. Infinite: epoch 0 does not end.

    Attributes:
        epoch: the epoch that is served, or that the next iteration serves.
        position: the next position in the run.
    """

    def __init__(
        self, samples: int, order: Order | None, plan: BatchPlan, start: int = 0, stop: float | None = None
    ) -> None:
        self._samples = samples
        self._plan = plan
        self._start = start
        self._seed = None if order is None else order.seed
        # A start in a later pass ends with that pass, so the first epoch may be short.
        pass_end = (start // samples + 1) * samples if order is not None else samples
        self._stop = pass_end if stop is None else stop
        self._length = samples if stop is None else self._stop - start
        self._is_begun = False
        self.epoch = 0
        self.position = start

    @property
    def is_endless(self) -> bool:
        """True if epoch 0 has no end."""
        return math.isinf(self._stop)

    @property
    def stop(self) -> float:
        """End of the positions of the current epoch."""
        return self._find_span(self.epoch)[1]

    def count_steps(self) -> int:
        """Returns the number of steps of the whole current epoch. Raises TypeError if it has no end."""
        if self.is_endless:
            raise TypeError("this loader has no end: its stop is infinite")
        first, stop = self._find_span(self.epoch)
        return self._plan.count_steps(first, int(stop))

    def begin(self) -> tuple[int, float]:
        """Begins an iteration and returns the positions (first, end) it serves.

        It serves the rest of a restored epoch, or else a whole one. An epoch that was left early is not continued,
        except one without end.
        """
        # An endless epoch continues at the next position.
        if self._is_begun and not self.is_endless:
            self.set_epoch(self.epoch + 1)
        self._is_begun = True
        return self.position, self.stop

    def advance(self) -> None:
        """Moves `position` to the next step."""
        self.position += self._plan.get_batch_size(self.position)

    def finish(self) -> None:
        """Ends the iteration: the next one serves the next epoch."""
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration serve an epoch from its beginning. Raises UsageError if it is below 0."""
        if epoch < 0:
            raise UsageError(f"epoch {epoch}", fix="Epochs count from 0.")
        self.epoch, self.position, self._is_begun = epoch, self._find_span(epoch)[0], False

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch and the next position, and the facts that they depend on."""
        return {"epoch": self.epoch, "position": self.position, "samples": self._samples, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position.

        Raises:
            CheckpointError: the state is damaged, or of another data set or seed.
        """
        epoch, position, samples, seed = (state.get(key) for key in STATE_KEYS)
        # `type is`, since True would count as an int.
        if not all(type(number) is int and number >= 0 for number in (epoch, position)):
            raise CheckpointError("this is not a state of a loader", fix="Give what Loader.state_dict() returned.")
        # With another data set or seed, the same positions are other samples.
        if (samples, seed) != (self._samples, self._seed):
            what = f"this state is of {samples} samples with seed {seed}, and the loader has {self._samples} samples"
            raise CheckpointError(
                f"{what} with seed {self._seed}", fix="Use the data set and the seed of the saved run."
            )
        assert isinstance(epoch, int)
        assert isinstance(position, int)
        # An epoch and a position that do not belong together: the state was edited, or saved with another batch.
        if position < self._find_span(epoch)[0]:
            raise CheckpointError(f"position {position} lies before epoch {epoch}", fix="Start from the beginning.")
        self.epoch, self.position, self._is_begun = epoch, position, False

    def _find_span(self, epoch: int) -> tuple[int, float]:
        """Finds the first position of an epoch, and the end that its last step reaches or crosses."""
        if epoch == 0 or self._seed is None or self.is_endless:
            return self._start, self._stop
        stop = self._stop + epoch * self._length
        if self._plan.largest_batch <= self._length:
            # An epoch begins where the step that crosses the end of the one before it ends.
            return self._plan.find_step_end(self._start, int(stop - self._length)), stop
        # A step may be longer than an epoch here, and an epoch without a step would surprise: each has one at least.
        first, stop = self._start, self._stop
        for _ in range(epoch if self._length else 0):
            first = self._plan.find_step_end(first, int(max(stop, first + 1)))
            stop = max(stop + self._length, first + 1)
        return first, stop
