"""RunLog: the files that a run writes while it trains: metrics, sample ids, quarantine, best weights, sinks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as save_tensors

from headway.core import row_file
from headway.core.files import write_atomically
from headway.core.run_folder import RunFolder
from headway.data.batch import BadSample
from headway.observe.sinks import PANEL_KINDS, MetricsSink, open_sinks
from headway.page.panel import Panel
from headway.parallel.update_log import UpdateLog

NON_METRIC_KEYS = frozenset(
    {"kind", "step", "position", "epoch", "seconds", "lr", "batch", "images_s", "wait_share", "loss_scale", "damaged"}
    | {"noise_scale", "noise_scale_low", "noise_scale_high", "slowest", "classes", "staleness", "correction", "experts"}
    | {"exchange_share", "exchange", "gpu_memory_bytes", "gpu_temperature_c"}
)
"""Keys of a record of metrics.jsonl that are not metrics. No metric of a task may have such a name."""


class RunLog:
    """The open files of one run folder.

    Args:
        run: the run folder.
        sinks: names of the sinks.
        is_lead: this process is the one that writes metrics, quarantine, weights and sinks. Every rank writes ids.
        name: name of this process among several; its file of ids is named after it.
        weights_metadata: metadata of weights.safetensors, one key at most.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        sinks: Sequence[str],
        is_lead: bool = True,
        name: str = "",
        weights_metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._run = run
        self._weights_metadata = None if weights_metadata is None else dict(weights_metadata)
        self._sink_names = sinks
        self._name = name
        self._ids: IO[bytes] | None = None
        self._updates: UpdateLog | None = None
        self.confirm: Callable[[], None] = lambda: None
        """Called before the best weights are replaced. It raises if the other ranks continued without this process."""
        self._is_lead = False
        self._sinks: list[MetricsSink] = []
        if is_lead:
            self.take_lead()

    @property
    def is_lead(self) -> bool:
        """True if this process writes for all ranks."""
        return self._is_lead

    def take_lead(self, after: tuple[int, int] | None = None) -> None:
        """Makes this process write for all ranks from now on, and opens metrics and sinks.

        Args:
            after: (position, step) from which the run continues. Metrics after it are removed.
        """
        self._is_lead = True
        # The previous lead may have written records of steps that are repeated now.
        if after is not None:
            self._run.truncate_metrics(after[0])
        self._metrics = self._run.metrics_path.open("a", encoding="utf-8")
        self._sinks = open_sinks(self._sink_names, self._run.folder, after_step=after and after[1])

    def write_record(self, record: dict[str, Any]) -> None:
        """Appends a record to metrics.jsonl, with null in place of NaN and infinity, and passes it on to the sinks."""
        if not self._is_lead:
            return
        # JSON has no NaN and no infinity.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        self._metrics.write(json.dumps(finite) + "\n")
        # A process that is killed loses what is in its buffer.
        self._metrics.flush()
        for sink in self._sinks:
            sink.record(record)

    def write_panels(self, panels: Sequence[Panel], step: int) -> None:
        """Writes each panel to panels/NAME.json, and passes images, matrices and tables on to the sinks.

        Args:
            step: step at which they were made.
        """
        if not self._is_lead:
            return
        self._run.panels.mkdir(parents=True, exist_ok=True)
        for panel in panels:
            write_atomically(self._run.panels / f"{panel.name}.json", panel.to_json())
            for sink in self._sinks if panel.kind in PANEL_KINDS else ():
                sink.show_panel(panel, step)

    def write_ids(self, positions: NDArray[np.int64], asked: NDArray[np.int64], served: NDArray[np.int64]) -> None:
        """Appends (position, asked, served) of each sample to ids.bin."""
        if self._ids is None:
            path = self._run.process_ids_path(self._name)
            # On another host than the lead's the run folder may not exist yet.
            path.parent.mkdir(parents=True, exist_ok=True)
            # If one of several ranks is killed, the others continue, so its ids must not be lost in a buffer.
            self._ids = path.open("ab", buffering=0 if self._name else -1)
        self._ids.write(np.stack([positions, asked, served], axis=1).astype("<i8").tobytes())

    def open_updates(self, version: int) -> UpdateLog:
        """Returns the log of an asynchronous run's updates, cut back to so many. It stays open to the end of the run.

        Raises:
            DataError: it has fewer updates, or a damaged one.
        """
        if self._updates is None:
            self._updates = UpdateLog(self._run.updates_path, version)
        else:
            self._updates.rewind(version)
        return self._updates

    def write_quarantine(self, samples: Sequence[BadSample], get_name: Callable[[int], str]) -> None:
        """Appends damaged samples to quarantine.jsonl.

        Args:
            get_name: returns the name of a sample by its index.
        """
        if not self._is_lead:
            return
        with self._run.quarantine_path.open("a", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps({**asdict(sample), "name": get_name(sample.asked)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def write_weights(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Writes weights.safetensors atomically."""
        if not self._is_lead:
            return
        # Cloned, because safetensors refuses tensors that share memory.
        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state_dict.items()}
        data = save_tensors(tensors, self._weights_metadata)
        # A process that the other ranks left behind must not replace newer weights.
        self.confirm()
        write_atomically(self._run.weights_path, data)

    def write_rows(
        self,
        kind: str,
        names: Sequence[str],
        columns: Sequence[str],
        position: int,
        step: int,
        values: NDArray[np.float32],
        *,
        keeps_names: bool = False,
    ) -> None:
        """Appends to a file of rows; see `headway.core.row_file`."""
        if self._is_lead:
            path = self._run.rows_path(kind)
            row_file.append_row(path, names, columns, position, step, values, keeps_names=keeps_names)

    def cut_ids(self, position: int) -> None:
        """Removes the ids of this process from a position on, whose step failed."""
        self._run.truncate_ids(position, self._name)

    def flush(self) -> None:
        """Syncs metrics and ids to disk. Call it before a checkpoint, which relies on them."""
        for file in (self._metrics if self._is_lead else None, self._ids):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    def cut_back(self, position: int, step: int) -> None:
        """Removes all entries after a position, if this process is the lead. `step` is the step at that position."""
        if self._is_lead:
            self._metrics.close()
            for sink in self._sinks:
                sink.close()
            self._run.truncate_logs(position)
            self.take_lead(after=(position, step))

    def close(self) -> None:
        """Closes all files and sinks."""
        if self._is_lead:
            self._metrics.close()
        if self._ids is not None:
            self._ids.close()
        if self._updates is not None:
            self._updates.close()
        for sink in self._sinks:
            sink.close()
        # Results may be written after it, to the run folder alone.
        self._sinks = []
