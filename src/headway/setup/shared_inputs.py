"""SharedInputs: one open data set and one stream of batches for several runs that take turns in one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from headway.core.recipe import LoadedRecipe
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.setup.inputs import Inputs, open_inputs
from headway.setup.recipe import MACHINE_KEYS, TrainRecipe

SHARED_KEYS = ("data", "augment", "batch", "batch_growth", "seed", "device", "transform", "transform_on")
"""Parts of a recipe that decide what a batch holds. Runs with the same values can share their inputs."""

Source = Callable[[Mapping[str, Any], BatchPlan, int], Iterator[Batch] | None]
"""Gives the batches from a position on in host memory, or None; its arguments are `Inputs.build_state` of the runs, the
sizes of their steps, and the position. Where its iterator ends, the loader of the inputs goes on."""


def describe_shared_values(loaded: LoadedRecipe[TrainRecipe]) -> str:
    """Returns the values that must be equal for two runs to share their inputs, as one text."""
    leaves = loaded.list_leaves()
    # What a machine decides for one run, it decides for all of them.
    shared = {key: value for key, value in leaves if key.partition(".")[0] in SHARED_KEYS and key not in MACHINE_KEYS}
    return json.dumps(shared, sort_keys=True)


@final
@dataclass
class _Stream:
    """Batches that follow each other, of which the newest one can be read several times."""

    batches: Iterator[Batch]
    next: int
    newest: tuple[int, Batch] | None = None

    def has(self, position: int) -> bool:
        return self.next == position or (self.newest is not None and self.newest[0] == position)

    def close(self) -> None:
        self.newest = None
        if hasattr(self.batches, "close"):
            self.batches.close()


@final
class SharedInputs:
    """Inputs of several runs in one process: the data are opened, and each batch is decoded, once.

    The first run opens them, and the others take over what it resolved. Close them after the runs have ended.

    Every run gets exactly the batches that it would get alone. Runs that take turns step by step read each batch while
    it is the newest one; a run at another position makes the stream begin anew there, which costs the batches in the
    ring.

    Attributes:
        reads: number of batches that were decoded here, without those of a source.
    """

    def __init__(self) -> None:
        self._inputs: Inputs | None = None
        self._values = ""
        self._resolved: dict[str, tuple[Any, str]] = {}
        self._source: Source | None = None
        # The source's batches, and those of the loader here.
        self._fed: _Stream | None = None
        self._own: _Stream | None = None
        self.reads = 0

    def open(self, loaded: LoadedRecipe[TrainRecipe], device: torch.device) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
        """Returns the resolved recipe and the inputs of one more run.

        Raises:
            HeadwayError: see `open_inputs`.
        """
        if self._inputs is None:
            self._values = describe_shared_values(loaded)
            resolved, self._inputs = open_inputs(loaded, device, opens_data=True)
            before = dict(loaded.list_leaves())
            self._resolved = {
                key: (value, resolved.origins[key].removeprefix("auto: "))
                for key, value in resolved.list_leaves()
                if key in MACHINE_KEYS or value != before.get(key)
            }
            loaded = resolved
        else:
            assert describe_shared_values(loaded) == self._values, "the runs read different batches"
            loaded = loaded.resolve_all(self._resolved)
        lent = replace(self._inputs, is_lent=True, loader=None)
        lent.batch_source = lambda plan, position: self._serve(loaded.recipe, plan, position, lent)
        return loaded, lent

    def follow(self, source: Source | None) -> None:
        """Reads from a source where it has the batches that are asked for; ends the one before it.

        Batches are those of the loader here, bit for bit, so a source that ends early costs time only.
        """
        if self._fed is not None:
            self._fed.close()
        self._fed, self._source = None, source

    def _serve(self, recipe: TrainRecipe, plan: BatchPlan, position: int, lent: Inputs) -> Iterator[Batch]:
        """Yields the batches of one run from a position on."""
        while True:
            batch = self._read(recipe, plan, position, lent)
            # Its stats are those of every run that reads it.
            lent.loader = None if self._inputs is None else self._inputs.loader
            yield batch
            position += plan.get_batch_size(position)

    def _read(self, recipe: TrainRecipe, plan: BatchPlan, position: int, lent: Inputs) -> Batch:
        if (batch := self._read_fed(recipe, plan, position, lent)) is not None:
            lent.fed_batches += 1
            return batch
        assert self._inputs is not None
        if self._own is None or not self._own.has(position):
            self._close_own()
            # The transform of whole batches was set on the inputs that each run has.
            source = replace(lent, batch_source=None)
            batches: Iterable[Batch] = source.build_batches(recipe, plan, position)
            self._own, self._inputs.loader = _Stream(iter(batches), position), source.loader
        if self._own.next == position:
            self.reads += 1
        return _advance(self._own, plan, position)

    def _read_fed(self, recipe: TrainRecipe, plan: BatchPlan, position: int, lent: Inputs) -> Batch | None:
        """Returns the batch of the source; None if it has ended, or is at another position."""
        if self._fed is None and self._source is not None:
            source, self._source = self._source, None
            batches = source(lent.build_state(recipe), plan, position)
            self._fed = None if batches is None else _Stream(batches, position)
        # Statistics of batch norm are computed from earlier batches in between.
        if self._fed is None or not self._fed.has(position):
            return None
        try:
            return _advance(self._fed, plan, position, lent.device)
        except StopIteration:
            self._fed.close()
            self._fed = None
            return None

    def _close_own(self) -> None:
        if self._own is not None:
            self._own.close()
        self._own = None

    def close(self) -> None:
        """Ends the streams and closes the data."""
        self.follow(None)
        self._close_own()
        if self._inputs is not None:
            self._inputs.close()


def _advance(stream: _Stream, plan: BatchPlan, position: int, device: torch.device | None = None) -> Batch:
    """Returns the newest batch of a stream, or the next one. Raises StopIteration at its end."""
    if stream.newest is None or stream.newest[0] != position:
        batch = next(stream.batches)
        if device is not None and device.type == "cuda":
            batch = _upload(batch, device)
        stream.newest, stream.next = (position, batch), position + plan.get_batch_size(position)
    return stream.newest[1]


def _upload(batch: Batch, device: torch.device) -> Batch:
    """Returns the batch on a GPU. The host does not wait: the copies are from pinned memory of their own.

    Has not run on a GPU yet.
    """
    images, labels = (part.pin_memory().to(device, non_blocking=True) for part in (batch.images, batch.labels))
    return replace(batch, images=images, labels=labels)
