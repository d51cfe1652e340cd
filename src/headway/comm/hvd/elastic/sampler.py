"""ElasticSampler: splits a dataset over the ranks, and its unprocessed rest again when their number changes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any, final

from torch.utils.data import Sampler

from headway.comm.hvd import context


@final
class ElasticSampler(Sampler[int]):
    """Yields this rank's indices, shuffled by seed and epoch; every rank gets equally many.

    Call `record_batch` after each batch and `set_epoch` at the end of each epoch, and keep it in a TorchState.

    Args:
        dataset: dataset of constant size.
        shuffle: if False, yields the indices in their order.
        seed: seed, the same on all ranks.

    Attributes:
        processed_num: samples that all ranks together have recorded in this epoch.
        remaining_indices: indices that were not processed when the ranks last changed.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.remaining_indices: list[int] = []
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch: another order, and nothing processed. Call it at the end of the epoch before."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Counts a batch of this size on every rank as processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Returns epoch and count; not the indices, which follow from them."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores epoch and count, and splits the rest over the ranks."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Splits the unprocessed rest over the present ranks."""
        self.num_replicas, self.rank = context.size(), context.rank()
        # The order follows from seed and epoch, so that all ranks split the same list.
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # The first indices come twice, until all ranks get equally many.
        padded = islice(cycle(self.remaining_indices), self.total_size)
        return islice(padded, self.rank, None, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples
