"""Panels of the GPUs of all ranks over time: utilisation, memory and temperature."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from headway.core.run_folder import RunFolder
from headway.core.text_format import format_bytes
from headway.observe import nvml
from headway.page import panel
from headway.page.panel import Panel
from headway.report.load_readings import LoadLine, LoadReadings, average_blocks, choose_time_unit, read_load

SECTION = "Time"
# GPUs that are drawn as lines: those with the lowest utilisation. The table has all.
DRAWN_GPUS = 16
# (name, title, column, factor, unit, order)
CHARTS = (
    ("gpu-busy", "Utilisation of each GPU", "busy", 100.0, "% of the time", 354),
    ("gpu-memory", "Memory in use on the GPU", "memory_bytes", 1e-9, "GB", 355),
    ("gpu-temperature", "Temperature of the GPU", "temperature_c", 1.0, "°C", 356),
)


def build_panels(run: RunFolder) -> list[Panel]:
    """Builds charts of memory and temperature over time, and for several ranks of utilisation, with a table of all."""
    paths = run.list_process_rows(nvml.SOURCE_KIND)
    gpus = {name: gpu for name, path in paths.items() if (gpu := read_load(path)) is not None}
    if not gpus:
        return []
    slowest = sorted(gpus, key=lambda name: gpus[name].compute_mean("busy"))[:DRAWN_GPUS]
    drawn = {name: gpu for name, gpu in gpus.items() if name in slowest}
    note = f"The {len(drawn)} GPUs with the lowest utilisation of {len(gpus)}." if len(drawn) < len(gpus) else ""
    panels = []
    unit, scale = choose_time_unit(max(gpus.values(), key=lambda gpu: float(gpu["seconds"].max())))
    for name, title, column, factor, y_label, order in CHARTS:
        # Of one GPU the chart of utilisation has its own band and waiting share.
        lines = _list_lines(drawn, column, factor, scale) if len(gpus) > 1 or column != "busy" else []
        if lines:
            given: dict[str, Any] = {"x_label": unit, "y_label": y_label, "section": SECTION, "order": order}
            panels.append(panel.lines(name, title, lines, note=note, **given))
    if len(gpus) > 1:
        columns = ("GPU of", "utilisation, mean", "power, mean", "memory, most", "temperature, most")
        rows = [_build_row(name, gpu) for name, gpu in gpus.items()]
        more: dict[str, Any] = {"section": SECTION, "order": 357, "width": "full"}
        panels.append(panel.table("gpu-table", "The GPUs of all ranks", columns, rows, **more))
    return panels


def _list_lines(gpus: dict[str, LoadReadings], column: str, factor: float, scale: float) -> list[LoadLine]:
    known = {name: gpu for name, gpu in gpus.items() if np.isfinite(gpu[column]).any()}
    return [(_name_rank(name), *average_blocks(gpu, column, factor, scale)[:2]) for name, gpu in known.items()]


def _name_rank(name: str) -> str:
    return f"rank {name}" if name.isdigit() else name or "the leading rank"


def _build_row(name: str, gpu: LoadReadings) -> tuple[str, ...]:
    busy, power = gpu.compute_mean("busy"), gpu.compute_mean("power_w")
    memory, temperature = (_find_most(gpu, column) for column in ("memory_bytes", "temperature_c"))
    cells = (
        (busy, f"{busy:.1%}"),
        (power, f"{power:,.0f} W"),
        (memory, "" if math.isnan(memory) else format_bytes(memory)),
        (temperature, f"{temperature:,.4g} °C"),
    )
    return (_name_rank(name), *("unknown" if math.isnan(value) else text for value, text in cells))


def _find_most(gpu: LoadReadings, column: str) -> float:
    known = gpu[column][np.isfinite(gpu[column])]
    return float(known.max()) if len(known) else math.nan
