"""LocalRounds: the steps that this rank makes alone, and the mean of the ranks' weights after them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from headway.checkpoint.pieces import Piece
from headway.core.errors import CommunicationError
from headway.launch.ranks import Ranks
from headway.parallel.own_states import STATES, select_states, wrap_states
from headway.setup.train_setup import TrainSetup
from headway.training.metrics import MetricsAccumulator


@final
class LocalRounds:
    """The round that is under way. With every other strategy than `local` no step is made alone, and it does nothing.

    Attributes:
        is_alone: each rank makes the present step alone.
        steps: steps that this rank has made alone since all ranks had the same weights.
        samples: samples of these steps, of all ranks.
    """

    def __init__(self, setup: TrainSetup, ranks: Ranks | None, accumulator: MetricsAccumulator) -> None:
        self._setup, self._ranks, self._accumulator = setup, ranks, accumulator
        self._outer, self.is_alone = setup.outer, False
        self.steps = self.samples = self._own = self._bad = 0
        self._losses: list[Tensor] = []

    def begin_step(self, step: int) -> None:
        """Sets `is_alone` for a step, and begins a round with it if none is under way."""
        self.is_alone = self._setup.rounds.is_alone(step)
        if self.is_alone and not self.steps and self._outer is not None:
            self._outer.begin_round()

    def add_step(self, loss: Tensor | None, *, own: int, samples: int, bad: int) -> None:
        """Adds a step that was made alone.

        Args:
            loss: this rank's part of the step's loss; None without other ranks.
            own, samples: samples of this rank, and of all ranks.
            bad: damaged samples of this rank.
        """
        self.steps += 1
        self._own, self.samples, self._bad = self._own + own, self.samples + samples, self._bad + bad
        if loss is not None:
            self._losses.append(loss)

    def average(self, position: int, *, stopping: bool, ending: bool) -> int:
        """Gives all ranks the weights of the outer step, the mean of the statistics, and all losses and flags.

        Args:
            position: samples served by all ranks, up to the end of the round.
            stopping, ending: as for `Ranks.finish`.

        Returns:
            the steps of the round.

        Raises:
            CommunicationError: a rank was lost. The weights are as before, and it can be repeated with other ranks.
        """
        outer, ranks, steps = self._outer, self._ranks, self.steps
        assert outer is not None
        # Ranks that have met again have thawed all, and this changes only what the round has trained.
        self._setup.freezing.freeze_until(position - self.samples)
        # By samples, so that one step of plain SGD is one step of data parallel with uneven shares, too. A rank that
        # has just joined has none.
        share = self._own / self.samples
        outer.put_gradients(share)
        total = 1.0
        if ranks is not None:
            change_sq = outer.measure_gradients() / (share or 1.0)
            try:
                reduction = ranks.finish_round(
                    self._losses, share, change_sq, bad=self._bad, stopping=stopping, ending=ending
                )
            except CommunicationError:
                # Else the next backward pass would add to what is half summed.
                outer.drop_gradients()
                raise
            total, mean_sq = self._accumulator.add_round(reduction, steps)
            self._record_distance(mean_sq, float(outer.measure_gradients()) / total**2)
        if outer.takes_mean and (ranks is None or ranks.world.size == 1):
            # The mean is what is there already, and differences would round it.
            outer.drop_gradients()
        else:
            outer.step(total)
        if self._setup.masters is not None:
            self._setup.masters.write_back()
        self._clear()
        return steps

    def _record_distance(self, mean_sq: float, sq: float) -> None:
        """Puts into the next record how far the ranks were apart.

        Args:
            mean_sq: mean squared length of the ranks' changes.
            sq: squared length of their mean change.
        """
        distance = (max(mean_sq - sq, 0.0) / sq) ** 0.5 if sq else 0.0
        self._accumulator.next_record["ranks_apart"] = distance

    def show_agreed(self) -> AbstractContextManager[None]:
        """Gives the network the weights that all ranks had last, for the duration of the block."""
        return self._outer.swap_in() if self._outer is not None and self.steps else nullcontext()

    # The state, for checkpoints and for other ranks.

    def state(self) -> dict[str, Tensor]:
        """Returns the tensors that are equal on all ranks."""
        return {} if self._outer is None else self._outer.state()

    def wrap(self, tensors: Mapping[str, Tensor | Piece], step: int) -> Mapping[str, Tensor | Piece]:
        """Marks those tensors of a checkpoint that each rank has of its own."""
        if self._ranks is None or self._ranks.world.size == 1 or not self._setup.rounds.is_alone(step):
            return tensors
        return wrap_states(tensors, self._ranks.world.rank, self._ranks.world.size)

    def select(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Returns the tensors of a checkpoint for this rank."""
        return select_states(tensors, *((0, 1) if self._ranks is None else self._ranks.launched_place))

    def list_own(self, tensors: Mapping[str, Tensor | Piece]) -> dict[str, Tensor]:
        """Returns the tensors that this rank keeps where it takes the state of another."""
        if self._outer is None:
            return {}
        return {name: value for name, value in tensors.items() if name.startswith(STATES) and isinstance(value, Tensor)}

    def load(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Restores a state between two rounds. Raises CheckpointError: it belongs to another network."""
        self._clear()
        if self._outer is not None:
            self._outer.load(tensors, where)

    def describe(self) -> dict[str, int]:
        """Returns what a rank that joins within the round has to know of it, for JSON."""
        return {"steps": self.steps, "samples": self.samples}

    def join(self, described: Mapping[str, Any]) -> None:
        """Joins the round of the other ranks, without samples of its own."""
        self._clear()
        self.steps, self.samples = described["steps"], described["samples"]
        self._losses = [torch.zeros(()) for _ in range(self.steps)]
        if self._outer is not None:
            self._outer.begin_round()

    def _clear(self) -> None:
        self.steps = self.samples = self._own = self._bad = 0
        self._losses = []
