"""StreamCursor: the epoch and position of a loader over an iterable data set, whose length may be unknown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from headway.core.errors import CheckpointError, UsageError


@final
class StreamCursor:
    """Position of a loader over an iterable data set. An epoch is one pass, from its first element to its last.

    Args:
        samples: number of elements; None: unknown.
        batch: elements of a step.
        shards: number of shards that are read side by side; a saved position only holds with as many.

    Attributes:
        epoch: the epoch that is served, or that the next iteration serves.
        position: elements of the epoch before the next step.
    """

    def __init__(self, samples: int | None, batch: int, seed: int, shards: int) -> None:
        self._samples, self._batch = samples, batch
        self._facts = {"seed": seed, "batch": batch, "shards": shards}
        self._is_begun = False
        self.epoch = self.position = 0

    def count_steps(self) -> int:
        """Counts the steps of an epoch. Raises TypeError if the number of elements is unknown."""
        if self._samples is None:
            raise TypeError("this loader serves an iterable data set without __len__, so its end is unknown")
        return -(-self._samples // self._batch)

    def begin(self) -> tuple[int, float]:
        """Begins an iteration and returns its first position, and an end that a worker finds."""
        if self._is_begun:
            self.set_epoch(self.epoch + 1)
        self._is_begun = True
        return self.position, math.inf

    def advance(self) -> None:
        """Counts a step as served."""
        self.position += self._batch

    def finish(self) -> None:
        """Ends the iteration: the next one serves the next epoch."""
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration serve an epoch from its beginning. Raises UsageError if it is below 0."""
        if epoch < 0:
            raise UsageError(f"epoch {epoch}", fix="Epochs count from 0.")
        self.epoch, self.position, self._is_begun = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, the next position, and the facts that they depend on."""
        return {"epoch": self.epoch, "position": self.position, **self._facts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue at a saved position.

        Raises:
            CheckpointError: the state is damaged, or was saved with other options.
        """
        epoch, position = state.get("epoch"), state.get("position")
        for number in (epoch, position):
            if type(number) is not int or number < 0:
                raise CheckpointError("this is not a state of a loader", fix="Give what Loader.state_dict() returned.")
        for name, value in self._facts.items():
            if state.get(name) != value:
                what = f"this state was saved with {name} {state.get(name)}, and the loader has {value}"
                raise CheckpointError(what, fix="Use the seed, batch, workers and ranks of the saved run.")
        assert isinstance(epoch, int)
        assert isinstance(position, int)
        self.epoch, self.position, self._is_begun = epoch, position, False
