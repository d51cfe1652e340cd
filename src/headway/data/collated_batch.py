"""CollatedBatch: one rank's share of one step, of a data set of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.random_keys import UInt64, make_keys


@final
@dataclass(slots=True, kw_only=True, repr=False)
class CollatedBatch:
    """One rank's share of one step, as your `collate` returned it. Unpacks and indexes as that: `images, labels =
    batch` or `batch["image"]`. It stays valid as long as you keep it."""

    data: Any
    """The result of `collate`, on the loader's device."""
    positions: NDArray[np.int64]
    epochs: NDArray[np.int64]
    samples: NDArray[np.int64]
    """Indices that your data set was asked for, [b]."""
    seed: int

    def keys(self, view: int = 0) -> UInt64:
        """Keys of the samples, uint64 [b]. The keys of a dict are those of `data`."""
        return make_keys(self.seed, self.epochs, self.samples, view)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __contains__(self, key: object) -> bool:
        return key in self.data

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        first = self.positions[0] if len(self.positions) else 0
        return f"CollatedBatch of {len(self.positions)} samples from position {first}: {type(self.data).__name__}"


def move_data(data: Any, device: torch.device) -> Any:
    """Returns a batch's data with its tensors, and other objects that have `to`, on a device."""
    if isinstance(data, torch.Tensor):
        # From pinned memory the copy is asynchronous, so the host never waits for it.
        return data.pin_memory().to(device, non_blocking=True)
    return _map_items(data, lambda item: move_data(item, device), other=lambda item: _move_object(item, device))


def take_nothing(data: Any) -> Any:
    """Returns the data of an empty batch that is like this one: a rank's share of a last, very short step."""
    if isinstance(data, torch.Tensor | np.ndarray):
        return data[:0] if data.ndim else data
    if isinstance(data, list | tuple) and all(isinstance(item, str | bytes | int | float) for item in data):
        return type(data)()
    return _map_items(data, take_nothing, other=lambda item: item)


def _move_object(item: Any, device: torch.device) -> Any:
    return item.to(device) if hasattr(item, "to") else item


def _map_items(data: Any, change: Any, *, other: Any) -> Any:
    """Applies `change` to the items of a dict, list or (named) tuple, and `other` to anything else."""
    if isinstance(data, Mapping) and not hasattr(data, "to"):
        return {key: change(item) for key, item in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*map(change, data))
    if isinstance(data, Sequence) and not isinstance(data, str | bytes) and not hasattr(data, "to"):
        changed = [change(item) for item in data]
        return tuple(changed) if isinstance(data, tuple) else changed
    return other(data)
