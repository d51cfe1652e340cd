"""LoadSamples: loads the samples of one step from a map-style data set of the user's own, and collates them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, final

import numpy as np
import torch.utils.data._utils.worker as torch_worker
from numpy.typing import NDArray

from headway.core.random_keys import make_keys
from headway.data.collated_batch import take_nothing
from headway.data.order import Order
from headway.data.spans import Span
from headway.data.workers.sample_seeds import seed_generators
from headway.data.workers.user_failure import UserFailure
from headway.data.workers.worker_pool import Work

_MAX_LISTED_SAMPLES = 8


class LoadedSamples(NamedTuple):
    """The data of one batch, their number, and the seconds that they took.

    Attributes:
        first: number of the first sample in an iterable data set.
    """

    data: Any
    samples: int
    samples_s: float
    collate_s: float
    first: int = 0


def choose_samples(order: Order | None, span: Span) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Returns (positions, epochs, samples) of a span; int64 [b] each. Without an order samples are positions."""
    positions = np.arange(*span)
    if order is None:
        return positions, np.zeros_like(positions), positions
    return positions, *order(positions)


@final
@dataclass
class LoadSamples(Work):
    """Turns a span of positions into a collated batch. Each sample is loaded with generators seeded by its key, so it
    is the same in any process.

    Attributes:
        seed: seed of the keys.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any]
    order: Order | None
    seed: int

    def start(self, number: int, workers: int) -> None:
        """Tells torch that this is a worker: `get_worker_info()` answers, and `default_collate` stacks into shared
        memory, which saves a copy of the batch."""
        info = torch_worker.WorkerInfo(id=number, num_workers=workers, seed=self.seed, dataset=self.dataset)
        torch_worker._worker_info = info

    def __call__(self, span: Span) -> LoadedSamples | UserFailure:
        """Returns the batch of positions [low, high)."""
        begun = perf_counter()
        is_empty = span[0] == span[1]
        # An empty share has the form of a batch of one sample, without the sample.
        positions, epochs, samples = choose_samples(self.order, (span[0] - 1, span[0]) if is_empty else span)
        loaded = []
        for position, sample, key in zip(
            positions.tolist(), samples.tolist(), make_keys(self.seed, epochs, samples).tolist(), strict=True
        ):
            seed_generators(key)
            try:
                loaded.append(self.dataset[sample])
            except (Exception, SystemExit) as error:
                return UserFailure.describe(f"sample {sample} of your data set (position {position})", error)
        between = perf_counter()
        try:
            data = self.collate(loaded)
        except (Exception, SystemExit) as error:
            return UserFailure.describe(f"collating {_describe_samples(samples, span)} of your data set", error)
        data = take_nothing(data) if is_empty else data
        return LoadedSamples(data, span[1] - span[0], between - begun, perf_counter() - between)


def _describe_samples(samples: NDArray[np.int64], span: Span) -> str:
    if len(samples) == 1:
        return f"sample {samples[0]}"
    # Shuffled samples are no range: they are listed, and their positions are the range.
    if (np.diff(samples) == 1).all():
        return f"samples {samples[0]} to {samples[-1]}"
    listed = ", ".join(map(str, samples[:_MAX_LISTED_SAMPLES].tolist()))
    more = f" and {len(samples) - _MAX_LISTED_SAMPLES} more" if len(samples) > _MAX_LISTED_SAMPLES else ""
    return f"samples {listed}{more} (positions {span[0]} to {span[1] - 1})"
