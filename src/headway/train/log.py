"""What a run writes while it trains: metrics, sample ids, quarantine, best weights, sinks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save as save_tensors

from headway.core.files import write_whole
from headway.core.run import Run
from headway.data.batch import Bad
from headway.observe.sinks import Sink, open_sinks

BESIDES_METRICS = frozenset(
    {"kind", "step", "position", "epoch", "seconds", "lr", "images_s", "wait_share", "loss_scale", "damaged"}
)
"""What a record of metrics.jsonl holds besides metrics."""


class RunLog:
    """The open files of one run folder."""

    def __init__(self, run: Run, *, log_ids: bool, sinks: Sequence[str]) -> None:
        self._run = run
        self._metrics = run.metrics_path.open("a", encoding="utf-8")
        self._ids = run.ids_path.open("ab") if log_ids else None
        self._names = sinks
        self._sinks: list[Sink] = open_sinks(sinks, run.folder)

    def record(self, record: dict[str, Any]) -> None:
        """Appends to metrics.jsonl, and hands on to the sinks."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._metrics.write(json.dumps(finite) + "\n")
        self._metrics.flush()
        for sink in self._sinks:
            sink.record(record)

    def ids(self, positions: NDArray[np.int64], asked: NDArray[np.int64], served: NDArray[np.int64]) -> None:
        """Appends (position, asked, served) of each sample to ids.bin."""
        assert self._ids is not None
        self._ids.write(np.stack([positions, asked, served], axis=1).astype("<i8").tobytes())

    def quarantine(self, bad: Sequence[Bad], name: Callable[[int], str]) -> None:
        """Appends damaged samples to quarantine.jsonl."""
        with self._run.quarantine_path.open("a", encoding="utf-8") as file:
            for entry in bad:
                file.write(json.dumps({**asdict(entry), "name": name(entry.asked)}) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def weights(self, model: torch.nn.Module) -> None:
        """Writes weights.safetensors, whole or not at all."""
        data = save_tensors({name: t.detach().cpu().contiguous().clone() for name, t in model.state_dict().items()})
        write_whole(self._run.weights_path, data)

    def flush(self) -> None:
        """Brings everything logged so far onto the disk; called before a checkpoint that counts on it."""
        for file in (self._metrics, self._ids):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())

    def cut_back(self, position: int, step: int) -> None:
        """Takes out what was logged after a position, which came after `step` steps."""
        self._metrics.close()
        self._run.cut_back(position)
        self._metrics = self._run.metrics_path.open("a", encoding="utf-8")
        for sink in self._sinks:
            sink.close()
        self._sinks = open_sinks(self._names, self._run.folder, after_step=step)

    def close(self) -> None:
        self._metrics.close()
        if self._ids is not None:
            self._ids.close()
        for sink in self._sinks:
            sink.close()
