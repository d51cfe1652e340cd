"""Monitors of a run: samples the load of host and GPU, and serves the newest numbers to Prometheus."""

from __future__ import annotations

import math
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
from headway.observe.nvml import SOURCE_KIND, open_gpu
from headway.observe.prometheus import DEFAULT_ADDRESS, DEFAULT_PORT, PrometheusEndpoint
from headway.training.trainer import Trainer

GPU_NUMBERS = (f"{SOURCE_KIND}_memory_bytes", f"{SOURCE_KIND}_temperature_c")
"""Numbers of the leading rank's GPU in records of metrics.jsonl."""
# The end of metrics.jsonl that is read for the newest records; it holds some hundreds.
TAIL_BYTES = 1 << 16


@contextmanager
def run_monitors(trainer: Trainer) -> Iterator[None]:
    """Runs the monitors of a trainer for the duration of the block.

    With `observe.utilisation`, the load is sampled into `host.rows` and `gpu.rows` of the run folder; of several ranks
    the lead writes these, and each other one `gpu-NAME.rows`. With the sink `prometheus`, the lead serves the newest
    numbers.

    Raises:
        UsageError: the port of Prometheus is taken.
    """
    recipe = trainer.setup.recipe
    sampler: LoadSampler | None = None
    with ExitStack() as stack:
        # The sampler goes first: Prometheus serves its newest row too.
        if recipe.observe.utilisation:
            sampler = LoadSampler(
                _open_sources(trainer.setup.device), partial(_append_row, trainer), trainer.clock.total_seconds()
            )
            stack.enter_context(sampler)
            trainer.accumulator.read_load = partial(_select_gpu_numbers, sampler)
        if "prometheus" in recipe.sinks:
            # The absolute name of the run folder tells several runs apart.
            labels = {"run": trainer.run_folder.folder.resolve().name}
            gauges = partial(_collect_gauges, trainer, sampler)
            address = recipe.observe.prometheus_address or DEFAULT_ADDRESS
            port = recipe.observe.prometheus_port or DEFAULT_PORT
            stack.enter_context(PrometheusEndpoint(address, port, gauges, labels, is_lead=lambda: trainer.is_lead))
        yield


def _open_sources(device: torch.device) -> list[LoadSource]:
    host = HostLoadSource(list_usable_cpus())
    if device.type != "cuda":
        return [host]
    gpu = open_gpu(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return [host] if gpu is None else [host, gpu]


def _append_row(trainer: Trainer, source: LoadSource, row: LoadRow) -> None:
    """Appends a row at the trainer's current step."""
    # Every rank samples, as any rank may become the lead; hosts have several ranks, and a GPU has one. A resumed run
    # cuts the rows back by their step.
    if trainer.is_lead or source.kind == SOURCE_KIND:
        step, values = trainer.step, np.array([row], np.float32)
        position = trainer.setup.plan.find_position(step)
        name = "" if trainer.is_lead or trainer.ranks is None else trainer.ranks.name
        path = trainer.run_folder.process_rows_path(source.kind, name)
        # On another host than the lead's the run folder may not exist yet.
        path.parent.mkdir(parents=True, exist_ok=True)
        row_file.append_row(path, (source.kind,), source.columns, position, step, values)


def _select_gpu_numbers(sampler: LoadSampler) -> dict[str, float]:
    """Returns the newest memory and temperature of this rank's GPU, for its records; empty without one."""
    return {name: value for name in GPU_NUMBERS if math.isfinite(value := sampler.latest.get(name, math.nan))}


def _collect_gauges(trainer: Trainer, sampler: LoadSampler | None) -> dict[str, float]:
    """Returns the current position of the run, its newest records, and its load, by name."""
    epoch = trainer.position / trainer.setup.epoch
    gauges: dict[str, float] = {"step": trainer.step, "steps": trainer.setup.steps, "epoch": epoch}
    for record in _read_newest_records(trainer.run_folder.metrics_path):
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        gauges |= {f"{record['kind']}_{name}": value for name, value in numbers.items() if name != "position"}
    return gauges if sampler is None else gauges | sampler.latest


def _read_newest_records(path: Path) -> list[dict[str, Any]]:
    """Returns the newest records of metrics.jsonl, oldest first."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return []
    records = []
    for line in lines:
        # The first line may be cut by TAIL_BYTES, and the last one is being written.
        try:
            record = parse_object(line)
        except ValueError:
            continue
        if "kind" in record:
            records.append(record)
    return records
