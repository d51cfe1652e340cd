"""The batch of ranks that compute the same samples: each decodes a share, and all get all of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headway.core.group import Group
from headway.core.rows import divide
from headway.data.batch import BadSample, Batch
from headway.parallel.fetch import exchange_pieces
from headway.parallel.towers import Towers
from headway.setup.train_setup import TrainSetup

ARRAYS = ("positions", "epochs", "samples", "served", "boxes", "flips", "vertical_flips", "shifts")
"""Arrays that a batch has besides images and labels, with an entry for each sample; some may be None."""


def gather_batch(setup: TrainSetup, batch: Batch, batch_size: int) -> tuple[Batch, slice | None]:
    """Returns the samples that this rank computes: with towers, those that all ranks of its place have decoded.

    Args:
        batch: this rank's share.
        batch_size: samples of the step over all ranks.

    Returns:
        the samples in the order of positions; and which of them are this rank's own, whose losses and metrics it
        counts. None: all of them.
    """
    if not isinstance(setup.divided, Towers):
        return batch, None
    return gather_place(setup.divided, batch, batch_size)


def gather_place(towers: Towers, batch: Batch, batch_size: int) -> tuple[Batch, slice]:
    """Gathers the shares of all ranks of a place, as `gather_batch` does. Images are sent as the loader gives them."""
    shares = divide(batch_size, towers.count * towers.places)
    first = towers.place * towers.count
    ranges = shares[first : first + towers.count]
    sizes = [one.length for one in ranges]
    names = [name for name in ARRAYS if getattr(batch, name) is not None]
    arrays = _gather_arrays([getattr(batch, name) for name in names], sizes, towers.host_group)
    images, labels = (_gather(one, sizes, towers.group) for one in (batch.images, batch.labels))
    by_name: dict[str, Any] = dict(zip(names, arrays, strict=True))
    whole = replace(batch, images=images, labels=labels, **by_name)
    facts = zip(whole.positions.tolist(), whole.samples.tolist(), whole.served.tolist(), strict=True)
    # Their reasons are told by the rank that has decoded them.
    whole.bad = tuple(BadSample(at, asked, served, "") for at, asked, served in facts if asked != served)
    start = ranges[towers.own].start - ranges[0].start
    return whole, slice(start, start + sizes[towers.own])


def _gather(own: torch.Tensor, sizes: list[int], group: Group) -> torch.Tensor:
    shapes = [(size, *own.shape[1:]) for size in sizes]
    return torch.cat(exchange_pieces([own] * group.size, shapes, own, group, "samples of a place"))


def _gather_arrays(arrays: list[NDArray[np.generic]], sizes: list[int], group: Group) -> list[NDArray[np.generic]]:
    """Gathers arrays [b, ...] in one exchange, as bytes."""
    rows = [np.ascontiguousarray(one).reshape(len(one), -1).view(np.uint8) for one in arrays]
    together = _gather(torch.from_numpy(np.concatenate(rows, axis=1)), sizes, group).numpy()
    columns = np.split(together, np.cumsum([one.shape[1] for one in rows])[:-1], axis=1)
    return [
        np.ascontiguousarray(column).view(one.dtype).reshape(-1, *one.shape[1:])
        for column, one in zip(columns, arrays, strict=True)
    ]
