"""SharedInputs: one open data set and one stream of batches for several runs that take turns in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, final

import torch

from headway.core.recipe import LoadedRecipe
from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.setup.inputs import Inputs, open_inputs
from headway.setup.recipe import MACHINE_KEYS, TrainRecipe

SHARED_KEYS = ("data", "augment", "batch", "seed", "device", "transform", "transform_on")
"""Parts of a recipe that decide what a batch holds. Runs with the same values can share their inputs."""


def select_shared_values(loaded: LoadedRecipe[TrainRecipe]) -> dict[str, Any]:
    """Returns the values that must be equal for two runs to share their inputs, by dotted key."""
    leaves = loaded.list_leaves()
    # What a machine decides for one run, it decides for all of them.
    return {key: value for key, value in leaves if key.partition(".")[0] in SHARED_KEYS and key not in MACHINE_KEYS}


@final
class SharedInputs:
    """Inputs of several runs in one process: the data are opened, and each batch is decoded, once.

    The first run opens them, and the others take over what it resolved. Close them after the runs have ended.

    Every run gets exactly the batches that it would get alone. Runs that take turns step by step read each batch while
    it is the newest one; a run at another position makes the stream begin anew there, which costs the batches in the
    ring.

    Attributes:
        reads: number of batches that were decoded.
    """

    def __init__(self) -> None:
        self._inputs: Inputs | None = None
        self._values: dict[str, Any] = {}
        self._resolved: dict[str, tuple[Any, str]] = {}
        self._stream: Iterator[Batch] | None = None
        self._newest: tuple[int, Batch] | None = None
        self._next = -1
        self.reads = 0

    def open(self, loaded: LoadedRecipe[TrainRecipe], device: torch.device) -> tuple[LoadedRecipe[TrainRecipe], Inputs]:
        """Returns the resolved recipe and the inputs of one more run.

        Raises:
            HeadwayError: see `open_inputs`.
        """
        if self._inputs is None:
            self._values = select_shared_values(loaded)
            resolved, self._inputs = open_inputs(loaded, device, opens_data=True)
            before = dict(loaded.list_leaves())
            self._resolved = {
                key: (value, resolved.origins[key].removeprefix("auto: "))
                for key, value in resolved.list_leaves()
                if key in MACHINE_KEYS or value != before.get(key)
            }
            loaded = resolved
        else:
            assert select_shared_values(loaded) == self._values, "the runs read different batches"
            loaded = loaded.resolve_all(self._resolved)
        lent = replace(self._inputs, is_lent=True, loader=None)
        lent.batch_source = lambda plan, position: self._serve(loaded.recipe, plan, position, lent)
        return loaded, lent

    def _serve(self, recipe: TrainRecipe, plan: BatchPlan, position: int, lent: Inputs) -> Iterator[Batch]:
        """Yields the batches of one run from a position on."""
        while True:
            batch = self._read(recipe, plan, position, lent)
            # Its stats are those of every run that reads it.
            lent.loader = None if self._inputs is None else self._inputs.loader
            yield batch
            position += plan.get_batch_size(position)

    def _read(self, recipe: TrainRecipe, plan: BatchPlan, position: int, lent: Inputs) -> Batch:
        assert self._inputs is not None
        if self._newest is not None and self._newest[0] == position:
            return self._newest[1]
        if self._stream is None or position != self._next:
            self._close_stream()
            # The transform of whole batches was set on the inputs that each run has.
            source = replace(lent, batch_source=None)
            batches: Iterable[Batch] = source.build_batches(recipe, plan, position)
            self._stream, self._inputs.loader = iter(batches), source.loader
        batch = next(self._stream)
        self.reads += 1
        self._newest, self._next = (position, batch), position + plan.get_batch_size(position)
        return batch

    def _close_stream(self) -> None:
        if self._stream is not None and hasattr(self._stream, "close"):
            self._stream.close()
        self._stream = self._newest = None

    def close(self) -> None:
        """Ends the stream and closes the data."""
        self._close_stream()
        if self._inputs is not None:
            self._inputs.close()
