"""Panels of the use of device and host: utilisation over time, statistics, and their meaning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headway.core.run_folder import RunFolder
from headway.core.text_format import format_bytes
from headway.observe import host_load, nvml
from headway.observe.gpu_peaks import compute_model_flops_utilisation, find_peak_flops
from headway.observe.utilisation import (
    LoadStatistics,
    describe_load,
    is_busy_but_light,
    match_intervals,
)
from headway.page import panel
from headway.page.panel import Panel
from headway.report import gpu_panels
from headway.report.load_readings import LoadLine, LoadReadings, average_blocks, choose_time_unit, read_load

SECTION = "Time"


def build_panels(run: RunFolder, records: Sequence[dict[str, Any]], about: Mapping[str, Any]) -> list[Panel]:
    """Builds the panels of a run whose load was sampled long enough for statistics.

    On a CPU, the load is that of this process alone, because other programs may use the processor, too.

    Args:
        records: Records of metrics.jsonl.
        about: Provenance of the run.
    """
    host, gpu = read_load(run.rows_path(host_load.SOURCE_KIND)), read_load(run.rows_path(nvml.SOURCE_KIND))
    main, column = (host, "own") if about["device"] == "cpu" else (gpu, "busy")
    # Too few readings of the GPU say nothing, but those of the host still do.
    if main is None or (statistics := main.summarise(column)) is None:
        return [] if host is None or about["device"] == "cpu" else [_build_host_table(host)]
    summary = run.read_summary()
    out = [_build_utilisation_chart(main, column, host, records)]
    if gpu is not None and np.isfinite(gpu["power_w"]).any():
        out.append(_build_power_chart(gpu))
    if gpu is not None:
        out += gpu_panels.build_panels(run)
    rows = [*_list_load_rows(statistics), *_list_period_rows(statistics, run, summary)]
    rows += _list_host_rows(main) if main is host else [*_list_gpu_rows(main), *_list_host_rows(host)]
    rows += _list_peak_rows(run, summary, about)
    note = describe_load(statistics, _compute_wait_share(summary)) if summary else ""
    title = "Utilisation of the processor in numbers" if main is host else "Utilisation of the GPU in numbers"
    given: dict[str, Any] = {"section": SECTION, "order": 352, "note": note, "width": "full"}
    return [*out, panel.table("utilisation-table", title, ("measure", "value"), rows, **given)]


def read_other_load(run: RunFolder) -> float | None:
    """Reads the mean share of the usable cores that other programs took during a run; None if it is unknown."""
    host = read_load(run.rows_path(host_load.SOURCE_KIND))
    # Runs of earlier versions have no such column.
    if host is None or "others" not in host.columns:
        return None
    share = host.compute_mean("others")
    return share if np.isfinite(share) else None


def _build_host_table(host: LoadReadings) -> Panel:
    note = "The GPU was not sampled, or not for long enough. Install nvidia-ml-py if it is missing."
    given: dict[str, Any] = {"section": SECTION, "order": 352, "note": note, "width": "full"}
    return panel.table("utilisation-table", "Use of the host", ("measure", "value"), _list_host_rows(host), **given)


def _build_utilisation_chart(
    main: LoadReadings, column: str, host: LoadReadings | None, records: Sequence[dict[str, Any]]
) -> Panel:
    """Builds the chart of utilisation, with the share of waiting for data."""
    unit, scale = choose_time_unit(main)
    at, busy, low, high = average_blocks(main, column, 100, scale)
    lines: list[LoadLine] = [("processor, this process" if main is host else "GPU", at, busy)]
    if host is not None:
        lines.append(("processor, all processes", *average_blocks(host, "busy", 100, scale)[:2]))
    train = [record for record in records if record["kind"] == "train"]
    # Waiting comes from the training records, which have the same clock.
    if train:
        waits = LoadReadings({name: np.array([r[name] for r in train], float) for name in ("seconds", "wait_share")})
        lines.append(("waiting for data", *average_blocks(waits, "wait_share", 100, scale)[:2]))
    note = "The band spans the lowest to the highest reading of each point." if low != high else ""
    return panel.lines(
        "utilisation",
        "Utilisation and waiting",
        lines,
        # The band belongs to the first line, the device that trains.
        bands=[(0, low, high)],
        x_label=unit,
        y_label="% of the time",
        y_range=(0.0, 100.0),
        section=SECTION,
        order=350,
        width="full",
        note=note,
    )


def _build_power_chart(gpu: LoadReadings) -> Panel:
    unit, scale = choose_time_unit(gpu)
    at, power, low, high = average_blocks(gpu, "power_w", 1, scale)
    lines: list[LoadLine] = [("power", at, power)]
    if np.isfinite(gpu["power_limit_w"]).any():
        lines.append(("power limit", *average_blocks(gpu, "power_limit_w", 1, scale)[:2]))
    given: dict[str, Any] = {"section": SECTION, "order": 351}
    return panel.lines("power", "Power", lines, bands=[(0, low, high)], x_label=unit, y_label="W", **given)


def _list_load_rows(load: LoadStatistics) -> list[tuple[str, str]]:
    dip = "" if load.dip_s is None else f", median length {load.dip_s:.2g} s"
    variation = "unknown" if load.variation is None else f"{load.variation:.2f}"
    return [
        ("utilisation, mean", f"{load.mean:.1%}"),
        ("variance; standard deviation over mean", f"{load.variance:.4f}; {variation}"),
        ("10th, 50th and 90th percentile", f"{load.p10:.1%}, {load.p50:.1%}, {load.p90:.1%}"),
        ("spikiness, 1 - mean / p90", f"{load.spikiness:.1%}"),
        ("idle (below 5 %)", f"{load.idle_share:.1%} of the time"),
        ("swings between 0 and 100 %", f"{load.swings_s:.2f} per second"),
        ("dips below half of p90", f"{load.dips_min:.1f} per minute{dip}"),
        ("samples", f"{load.seconds / load.spacing_s:,.0f} of {load.spacing_s:.2g} s"),
    ]


def _list_period_rows(load: LoadStatistics, run: RunFolder, summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    if load.period_s is None:
        return [("period", "none found")]
    text = f"every {load.period_s:.3g} s"
    if summary and summary["step"]:
        intervals = _measure_intervals(run, summary)
        names = match_intervals(load.period_s, intervals)
        known = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in intervals.items())
        # A period that matches an interval of the run points to its cause.
        text += f", as the run's {' and '.join(names)}" if names else f", unlike the intervals of the run ({known})"
    return [("period", text)]


def _measure_intervals(run: RunFolder, summary: Mapping[str, Any]) -> dict[str, float]:
    """Measures the mean seconds between steps, epochs, evaluations and checkpoints of a run."""
    recipe = run.read_recipe_tree()
    step_s, epoch_s = summary["seconds"] / summary["step"], summary["seconds"] / summary["epochs"]
    saved = recipe["checkpoint"]
    steps = saved["every_steps"]
    intervals = {"steps": step_s, "epochs": epoch_s}
    if recipe["data"]["eval"] is not None:
        intervals["evaluations"] = epoch_s * recipe["evaluate"]["every_epochs"]
    intervals["checkpoints"] = epoch_s * saved["every_epochs"] if steps is None else step_s * steps
    return intervals


def _list_host_rows(host: LoadReadings | None) -> list[tuple[str, str]]:
    if host is None:
        return []
    columns = (
        ("own", "processor: used by this process", "{:.1%} of the usable cores".format),
        ("busy", "processor: used by all processes", "{:.1%} of the usable cores".format),
        ("others", "processor: used by other programs", "{:.1%} of the usable cores".format),
        ("memory_bytes", "processor: memory of this process, mean", format_bytes),
        ("throttled", "processor: throttled by its quota", "in {:.1%} of the scheduler's periods".format),
        ("read_bytes_s", "read from the disk", lambda rate: f"{format_bytes(rate)}/s"),
    )
    means = [
        (words, format_value, host.compute_mean(name)) for name, words, format_value in columns if name in host.columns
    ]
    return [(words, format_value(value)) for words, format_value, value in means if np.isfinite(value)]


def _list_gpu_rows(gpu: LoadReadings) -> list[tuple[str, str]]:
    rows = []
    if np.isfinite(memory := gpu.compute_mean("memory_busy")):
        rows.append(("GPU: memory read or written", f"{memory:.1%} of the time"))
    power, limit, busy = gpu.compute_mean("power_w"), gpu.compute_mean("power_limit_w"), gpu.compute_mean("busy")
    # Power far below the limit, at full utilisation, tells small kernels from real work.
    if np.isfinite(power) and np.isfinite(limit):
        rows.append(("GPU: power, mean", f"{power:,.0f} W of {limit:,.0f} W"))
        light = "yes: small kernels, memory or launches limit it" if is_busy_but_light(busy, power, limit) else "no"
        rows.append(("GPU: busy but light", light))
    # Each reason is one bit of NVML's mask.
    reasons = gpu["throttle"][np.isfinite(gpu["throttle"])].astype(np.int64)
    if len(reasons):
        slowed = {name: float(((reasons & bit) > 0).mean()) for bit, name in nvml.THROTTLE_REASONS.items()}
        limits = [f"{name}, {share:.1%} of the time" for name, share in slowed.items() if share > 0]
        rows.append(("GPU: clock limited by", "; ".join(limits) or "nothing"))
    for name, words, format_value in (
        ("sm_clock_hz", "clock, mean", lambda clock: f"{clock / 1e6:,.4g} MHz"),
        ("temperature_c", "temperature, mean", "{:,.4g} °C".format),
        ("memory_bytes", "memory, mean", format_bytes),
    ):
        if np.isfinite(value := gpu.compute_mean(name)):
            rows.append((f"GPU: {words}", format_value(value)))
    return rows


def _list_peak_rows(run: RunFolder, summary: Mapping[str, Any], about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Lists the model FLOPs utilisation, or the reason why it is unknown."""
    recipe = run.read_recipe_tree()
    name, work = "model FLOPs utilisation", about.get("multiply_adds")
    peak = find_peak_flops(about["device"], recipe["precision"])
    if peak is None:
        return [(name, f"unknown: no peak is known for {about['device']} in {recipe['precision']}")]
    # The work per image changes with the image size, and with the number of frozen layers.
    if recipe["data"]["progressive"] is not None or any(
        recipe["model"].get(key) for key in ("freeze_after", "unfreeze_at")
    ):
        return [(name, "unknown: the work per image changes during the run")]
    if not summary or work is None or "ranks" not in about:
        return [(name, "unknown: the run has not ended, or the multiply-adds of its network were not counted")]
    share = compute_model_flops_utilisation(summary["images_s"], work, peak, about["ranks"])
    return [(name, f"{share:.1%} of {peak / 1e12:,.0f} TFLOP/s in {recipe['precision']}")]


def _compute_wait_share(summary: Mapping[str, Any]) -> float:
    """Computes the share of waiting in the whole run; the summary's own leaves out evaluations and checkpoints."""
    stages = summary["seconds_by_stage"]
    return float(stages.get("wait", 0.0) / max(sum(stages.values()), 1e-9))
