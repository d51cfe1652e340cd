"""Averaged weights and recomputed batch-norm statistics, which are evaluated and saved in place of the newest ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, final

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch.nn.modules.batchnorm import _BatchNorm

from headway.checkpoint.compatibility import find_mismatch
from headway.core.errors import CheckpointError
from headway.core.modules import switch_to_evaluation
from headway.launch.ranks import Ranks
from headway.model.batch_norm import list_running_statistics, recompute_statistics
from headway.model.ema import Ema
from headway.optim import Lookahead
from headway.setup.divide_layers import join_layers
from headway.setup.prepare import prepare_batch, split_micro_batches
from headway.setup.train_setup import TrainSetup

PREFIX = "statistics/"


@final
class WeightAverages:
    """The weights and statistics for evaluations and for the best weights, as the recipe asks for them.

    The weights are a moving average (`model.ema`), Lookahead's slow weights, or the newest ones. The statistics are
    those of batch norm, over the newest batches (`model.batch_norm.recompute_batches`) or as training left them.
    Training does not see them: they are in the network only inside `swap_in`.
    """

    def __init__(self, setup: TrainSetup) -> None:
        ema, lookahead = setup.recipe.model.ema, setup.recipe.optimizer.lookahead
        norm = setup.recipe.model.batch_norm
        self._setup = setup
        # With half_weights the fp32 masters are averaged: 16-bit weights would lose what a slow average adds.
        whole = setup.stepped
        self._weights: Ema | Lookahead | None = None
        if ema is not None:
            self._weights = Ema(whole, half_life_steps=ema.half_life_steps, every_steps=ema.every_steps)
        elif lookahead is not None:
            self._weights = Lookahead(
                whole,
                alpha=lookahead.alpha,
                every_steps=lookahead.every_steps,
                power=lookahead.power,
                steps=setup.steps,
            )
        self._batches = None if norm is None else norm.recompute_batches
        self._running = list_running_statistics(setup.model) if self._batches else []
        self._statistics: list[torch.Tensor] = []

    @property
    def needs_statistics(self) -> bool:
        """True if `recompute_statistics` must run before an evaluation."""
        return self._batches is not None

    def update(self, step: int, since: int | None = None) -> None:
        """Updates the averages; called after every step, or after a round of `since` steps."""
        if isinstance(self._weights, Lookahead):
            # Training goes on from the slow weights, so the 16-bit weights must follow them.
            if self._weights.update(step) and self._setup.masters is not None:
                self._setup.masters.write_back()
        elif self._weights is not None:
            self._weights.update(step, since)

    @contextmanager
    def swap_in(self) -> Iterator[None]:
        """Puts the averages into the network for the duration of the block."""
        with self._swap_in_weights(), _copy_temporarily(self._running if self._statistics else [], self._statistics):
            yield

    def recompute_statistics(self, step: int, ranks: Ranks | None = None) -> None:
        """Recomputes the statistics of batch norm over the newest training batches.

        Each rank takes its share of the batches; the result is the mean over the ranks.

        Raises:
            CommunicationError: a rank was lost.
        """
        setup = self._setup
        assert self._batches is not None
        rank, world = (0, 1) if ranks is None else (ranks.world.rank, ranks.world.size)
        # Early in a run there are fewer batches than asked for.
        first = max(0, step - self._batches)
        # `setup.batches` replaces this loader, and the statistics of the run's input are read from it.
        loader = setup.inputs.loader
        stream: Any = iter(setup.batches(setup.plan.find_position(first), rank, world))
        before = [value.clone() for value in self._running]
        try:
            with (
                self._swap_in_weights(),
                join_layers(setup.divided),
                torch.no_grad(),
                recompute_statistics(setup.model),
            ):
                for number, batch in enumerate(islice(stream, step - first), first + 1):
                    images, _ = prepare_batch(setup, batch, number)
                    largest = -(-setup.plan.get_batch_size(setup.plan.find_position(number - 1)) // world)
                    for (part,) in split_micro_batches(setup, images, largest=largest):
                        with setup.precision.autocast():
                            setup.model(part)
                # Copied before the block ends: the running statistics are swapped back together with the weights.
                current = [value.clone() for value in self._running]
        finally:
            setup.inputs.loader = loader
            if hasattr(stream, "close"):
                stream.close()
            if before:
                torch._foreach_copy_(self._running, before)
        if ranks is not None:
            mine = {str(place): value.cpu() for place, value in enumerate(current)}
            every = [load_tensors(data) for data in ranks.world.control.gather_bytes(save_tensors(mine))]
            for place, value in enumerate(current):
                # Every rank takes the mean of the same list, so all get the same bits.
                value.copy_(torch.stack([one[str(place)] for one in every]).mean(0))
        self._statistics = current

    def state(self) -> dict[str, torch.Tensor]:
        """Returns the tensors for a checkpoint or another rank."""
        weights = {} if self._weights is None else self._weights.state()
        return weights | {f"{PREFIX}{place}": value for place, value in enumerate(self._statistics)}

    def load_state(self, tensors: Mapping[str, torch.Tensor], where: str) -> None:
        """Restores such a state. Raises CheckpointError: it belongs to another network."""
        if self._weights is not None:
            self._weights.load(tensors)
        weights = {name: value for name, value in tensors.items() if name.startswith(PREFIX)}
        wanted = {f"{PREFIX}{place}": one for place, one in enumerate(self._running)}
        if weights and (fault := find_mismatch(weights, wanted)):
            raise CheckpointError(f"its statistics of batch norm do not fit: {fault}", where=where)
        self._statistics = [weights[name].to(one) for name, one in wanted.items()] if weights else []

    @contextmanager
    def _swap_in_weights(self) -> Iterator[None]:
        if self._weights is None:
            yield
            return
        masters = self._setup.masters
        try:
            # 16-bit weights are written from the fp32 masters, before and after.
            with self._weights.swap_weights():
                if masters is not None:
                    masters.write_back()
                yield
        finally:
            if masters is not None:
                masters.write_back()


def recompute_from_images(setup: TrainSetup, batches: Iterable[torch.Tensor]) -> None:
    """Recomputes the statistics of batch norm in place, as means over batches that are not augmented.

    Args:
        batches: uint8 [b, H, W, C], on the device.
    """
    model = setup.model
    with switch_to_evaluation(model):
        # Only batch norm goes to training mode: dropout would change the statistics.
        for one in model.modules():
            if isinstance(one, _BatchNorm):
                one.train()
        with torch.no_grad(), recompute_statistics(model):
            for images in batches:
                with setup.precision.autocast():
                    model(setup.augment.normalise(images))


@contextmanager
def _copy_temporarily(into: list[torch.Tensor], values: list[torch.Tensor]) -> Iterator[None]:
    # The values of training, which come back at the end.
    kept = [value.clone() for value in into]
    if values:
        torch._foreach_copy_(into, values)
    try:
        yield
    finally:
        if kept:
            torch._foreach_copy_(into, kept)
