"""What a run writes while it trains: metrics, sample ids, quarantine, best weights, sinks."""

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
from headway.observe.sinks import MetricsSink, open_sinks

BESIDES_METRICS = frozenset(
    {"kind", "step", "position", "epoch", "seconds", "lr", "batch", "images_s", "wait_share", "loss_scale", "damaged"}
    | {"noise_scale", "noise_scale_low", "noise_scale_high", "slowest"}
)
"""What a record of metrics.jsonl holds besides metrics."""


class RunLog:
    """The open files of one run folder.

    Args:
        leads: whether this process writes metrics, quarantine, weights and sinks; one of all ranks does.
        name: of this process among several: each writes ids of its own.
    """

    def __init__(self, run: RunFolder, *, sinks: Sequence[str], leads: bool = True, name: str = "") -> None:
        self._run, self._names, self._name = run, sinks, name
        self._ids: IO[bytes] | None = None
        self.confirm: Callable[[], None] = lambda: None
        """Called before the best weights are replaced: who was lost while it slept may not."""
        self._leads = False
        self._sinks: list[MetricsSink] = []
        if leads:
            self.lead()

    @property
    def leads(self) -> bool:
        return self._leads

    def lead(self, after: tuple[int, int] | None = None) -> None:
        """From now on this process writes for all.

        Args:
            after: (position, step): what another process wrote for later ones is taken out.
        """
        self._leads = True
        if after is not None:
            self._run.truncate_metrics(after[0])
        self._metrics = self._run.metrics_path.open("a", encoding="utf-8")
        self._sinks = open_sinks(self._names, self._run.folder, after_step=after and after[1])

    def record(self, record: dict[str, Any]) -> None:
        """Appends to metrics.jsonl, and hands on to the sinks."""
        if not self._leads:
            return
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()
        for sink in self._sinks:
            sink.record(record)

    def ids(self, positions: NDArray[np.int64], asked: NDArray[np.int64], served: NDArray[np.int64]) -> None:
        """Appends (position, asked, served) of each sample to ids.bin."""
        if self._ids is None:
            path = self._run.process_ids_path(self._name)
            path.parent.mkdir(parents=True, exist_ok=True)  # on a host of its own, the lead's folder is elsewhere
            # One of several processes may be killed and the others go on: what it wrote must not be lost with it.
            self._ids = path.open("ab", buffering=0 if self._name else -1)
        self._ids.write(np.stack([positions, asked, served], axis=1).astype("<i8").tobytes())

    def quarantine(self, bad: Sequence[BadSample], name: Callable[[int], str]) -> None:
        """Appends damaged samples to quarantine.jsonl."""
        if not self._leads:
            return
        with self._run.quarantine_path.open("a", encoding="utf-8") as file:
            for entry in bad:
                file.write(json.dumps({**asdict(entry), "name": name(entry.asked)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def weights(self, state: Mapping[str, torch.Tensor]) -> None:
        """Writes weights.safetensors, whole or not at all."""
        if not self._leads:
            return
        data = save_tensors({name: t.detach().cpu().contiguous().clone() for name, t in state.items()})
        self.confirm()
        write_atomically(self._run.weights_path, data)

    def row(
        self,
        kind: str,
        names: Sequence[str],
        columns: Sequence[str],
        position: int,
        step: int,
        values: NDArray[np.float32],
    ) -> None:
        """Appends to a file of rows; see `headway.core.row_file`."""
        if self._leads:
            row_file.append_row(self._run.rows_path(kind), names, columns, position, step, values)

    def cut_ids(self, position: int) -> None:
        """Takes this process's samples from a position on out of its ids: their step did not come about."""
        self._run.truncate_ids(position, self._name)

    def flush(self) -> None:
        """Brings everything logged so far onto the disk; called before a checkpoint that counts on it."""
        for file in (self._metrics if self._leads else None, self._ids):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    def cut_back(self, position: int, step: int) -> None:
        """Takes out what was logged after a position, which came after `step` steps; by whoever leads."""
        if self._leads:
            self._metrics.close()
            for sink in self._sinks:
                sink.close()
            self._run.truncate_logs(position)
            self.lead(after=(position, step))

    def close(self) -> None:
        if self._leads:
            self._metrics.close()
        if self._ids is not None:
            self._ids.close()
        for sink in self._sinks:
            sink.close()
