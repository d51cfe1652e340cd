"""What goes on beside a trainer while it trains: its load is sampled, and its numbers are served."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.core import row_file
from headway.core.cpu_count import list_usable_cpus
from headway.core.files import open_regular
from headway.core.untrusted_json import parse_object
from headway.observe.host_load import HostLoadSource
from headway.observe.load_sampler import LoadRow, LoadSampler, LoadSource
from headway.observe.nvml import open_gpu
from headway.observe.prometheus import ADDRESS, PORT, PrometheusEndpoint
from headway.train.trainer import Trainer

TAIL_BYTES = 1 << 16
"""Of metrics.jsonl, for its newest records: some hundreds."""


@contextmanager
def beside(trainer: Trainer) -> Iterator[None]:
    """The time in which a trainer runs: samples what its recipe's part `observe` asks for into the run folder, as
    `host.rows` and `gpu.rows`, and serves its numbers where `sinks` has `prometheus`. Of several ranks, the one that
    leads does.

    Raises:
        UsageError: the port of Prometheus is taken.
    """
    recipe = trainer.setup.recipe
    sampler: LoadSampler | None = None
    with ExitStack() as stack:
        if recipe.observe.utilisation:
            sampler = LoadSampler(
                _sources(trainer.setup.device), partial(_write, trainer), trainer.clock.total_seconds()
            )
            stack.enter_context(sampler)
        if "prometheus" in recipe.sinks:
            labels = {"run": trainer.run_folder.folder.resolve().name}
            gauges = partial(_gauges, trainer, sampler)
            address = recipe.observe.prometheus_address or ADDRESS
            port = recipe.observe.prometheus_port or PORT
            stack.enter_context(PrometheusEndpoint(address, port, gauges, labels, leads=lambda: trainer.leads))
        yield


def _sources(device: torch.device) -> list[LoadSource]:
    host = HostLoadSource(list_usable_cpus())
    if device.type != "cuda":
        return [host]
    gpu = open_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return [host] if gpu is None else [host, gpu]


def _write(trainer: Trainer, source: LoadSource, row: LoadRow) -> None:
    """Appends a row, at the step that the trainer has come to: a resumed run cuts off what came after its own."""
    if trainer.leads:
        step, values = trainer.step, np.array([row], np.float32)
        position = trainer.setup.plan.find_position(step)
        row_file.append_row(
            trainer.run_folder.rows_path(source.kind), (source.kind,), source.columns, position, step, values
        )


def _gauges(trainer: Trainer, sampler: LoadSampler | None) -> dict[str, float]:
    """What is known now: where the run is, its newest records, and its load."""
    epoch = trainer.position / trainer.setup.epoch
    found: dict[str, float] = {"step": trainer.step, "steps": trainer.setup.steps, "epoch": epoch}
    for record in _newest(trainer.run_folder.metrics_path):
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        found |= {f"{record['kind']}_{name}": value for name, value in numbers.items() if name != "position"}
    return found if sampler is None else found | sampler.latest


def _newest(path: Path) -> list[dict[str, Any]]:
    """The last records of metrics.jsonl, oldest first; torn lines are passed over."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        try:
            record = parse_object(line)
        except ValueError:
            continue
        if "kind" in record:
            records.append(record)
    return records
