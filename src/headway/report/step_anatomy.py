"""The fifteen parts of one training step, from reading the images to the return to the beginning.

Parts that share one measurement all show their sum: no time is split by a guess. With `observe.layer_times` each
part has a clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from headway.core.exchange_waits import select_exchanges
from headway.core.text_format import pluralise
from headway.observe import host_syncs
from headway.page import panel
from headway.page.panel import Panel
from headway.report.layer_clocks import LayerClocks

# Stages of the loader's thread that make a batch from bytes.
PREPARE_STAGES = ("order", "decode", "labels")
# Stages that do not belong to a step.
OUTSIDE_STAGES = ("evaluate", "checkpoint", "regroup", "first batch")

NO_LAYER_CLOCK = "; observe.layer_times: true times single layers"
# (part, stage of the loop's clock that includes it, remark on the measurement)
NETWORK_PARTS = (
    ("activation, layer 1", "forward", NO_LAYER_CLOCK),
    ("activation, layer 2", "forward", NO_LAYER_CLOCK),
    ("output", "forward", NO_LAYER_CLOCK),
    ("loss", "loss", ""),
    ("back-propagation, layer 3", "backward", NO_LAYER_CLOCK),
    ("back-propagation, layer 2", "backward", NO_LAYER_CLOCK),
    ("back-propagation, layer 1", "backward", NO_LAYER_CLOCK),
    ("optimizer", "optimizer", "; one pass reads the gradients and writes the weights"),
    ("update of the weights", "optimizer", "; one pass reads the gradients and writes the weights"),
    ("return to the beginning", "log", "; progress, and on logging steps reading losses and metrics"),
)


@final
@dataclass(frozen=True, kw_only=True)
class StepPart:
    """One part of a training step."""

    name: str
    # Stage of the loop's clock that includes the part; empty if the loop spends no time on it.
    stage: str
    # Seconds per step of that stage; None if there is no such stage.
    loop_s: float | None
    # True if other parts belong to the same stage; `loop_s` is then their sum.
    is_shared: bool
    # Seconds per step of the loader's thread, which runs in parallel; None if it has no share in the part.
    loader_s: float | None
    # Source of the measurement, or the reason why there is none.
    note: str


def list_step_parts(summary: Mapping[str, Any], device: str, layers: LayerClocks | None = None) -> tuple[StepPart, ...]:
    """Lists the parts of the mean step, as measured on the leading rank; empty if the run made no step.

    Args:
        summary: Summary of the run.
        device: `cpu`, or the name of a GPU.
        layers: Clocks of single layers; None: the run has none.
    """
    steps, seconds = summary["step"], summary["seconds_by_stage"]
    if not steps:
        return ()
    rows = _list_input_parts(summary.get("input"), device)
    for name, stage, more in NETWORK_PARTS:
        # Runs of earlier versions have no stage `loss`.
        known = stage if stage in seconds else "forward"
        rows.append((name, known, None, f"the loop's clock: {known}{more}"))
    sharing = Counter(stage for _, stage, _, _ in rows)
    parts = tuple(
        StepPart(
            name=name,
            stage=stage,
            loop_s=seconds[stage] / steps if stage in seconds else None,
            is_shared=bool(stage) and sharing[stage] > 1,
            loader_s=loader_s,
            note=note,
        )
        for name, stage, loader_s, note in rows
    )
    clocks = {} if layers is None else layers.list_parts(seconds.get("optimizer", 0.0) / steps)
    # A clock of its own takes a part out of the stage that it shared.
    return tuple(
        replace(part, stage=part.name, loop_s=clocks[part.name][0], is_shared=False, note=clocks[part.name][1])
        if part.name in clocks
        else part
        for part in parts
    )


def _list_input_parts(loader: Mapping[str, Any] | None, device: str) -> list[tuple[str, str, float | None, str]]:
    """Lists (part, stage of the loop, seconds per step of the loader's thread, note) of the first five parts."""
    own, queue = "the loop's clock: augment", "the loop's clock: wait, for the next batch"
    if loader is None or "tier" not in loader:
        none = "nothing to do: the images are in memory"
        if loader is not None:
            none = "in another process of the sweep, for several trials at once"
        return [
            ("read", "", None, none),
            ("transport", "", None, none),
            ("pre-process", "augment", None, own),
            ("queue", "wait", None, queue),
            ("transport to the device", "", None, none),
        ]
    thread, place = "the loader's thread", loader["tier"].partition(", ")[0]
    transport = {
        "none": "part of pre-process if files are mapped (pages are loaded on access); else part of read",
        "disk": "part of read: samples that are not in the local cache are fetched",
    }.get(place, "nothing to do: the data was copied here before the first step")
    # A GPU gets its copy while the loop takes the batch, so the time is part of `wait`.
    copied, copy = "", "nothing to do: the network reads the loader's memory"
    if place == "device":
        copy = "nothing to do: the images are on the device"
    elif device != "cpu":
        copied, copy = "wait", "the copy starts when the loop takes a batch, and runs in parallel"
    made = f"{thread}: {', '.join(PREPARE_STAGES)}; {own}"
    return [
        ("read", "", _sum_loader_seconds(loader, ("read",)), f"{thread}: read"),
        ("transport", "", None, transport),
        ("pre-process", "augment", _sum_loader_seconds(loader, PREPARE_STAGES), made),
        ("queue", "wait", None, f"{queue}; {pluralise(loader['ahead'], 'batch')} ahead"),
        ("transport to the device", copied, None, copy),
    ]


def _sum_loader_seconds(loader: Mapping[str, Any], stages: Sequence[str]) -> float | None:
    """Sums the seconds per step of stages of the loader's thread; None if the number of batches is unknown."""
    if not loader.get("batches"):
        return None
    # A stage that took no time has no rate.
    rates: dict[str, float] = loader["stage_images_s"]
    images: float = loader["images"] / loader["batches"]
    return sum(images / rates[stage] for stage in stages if stage in rates)


def build_panels(summary: Mapping[str, Any], device: str, layers: LayerClocks | None = None) -> list[Panel]:
    """Builds the bars of the loop and the loader's thread, and the table of all parts; empty before the run ends."""
    parts = list_step_parts(summary, device, layers) if summary else ()
    if not parts:
        return []
    steps, seconds = summary["step"], summary["seconds_by_stage"]
    # Parts of one stage become one bar, because only their sum was measured.
    bars: dict[str, tuple[float, float]] = {}
    for part in parts:
        label = part.stage if part.is_shared else part.name
        bars[label] = (part.loop_s or 0.0, part.loader_s or 0.0)
    bars |= {exchange: (spent / steps, 0.0) for exchange, spent in select_exchanges(seconds).items()}
    if "reduce" in seconds:
        bars["all-reduce"] = (seconds["reduce"] / steps, 0.0)
    names = ["the loop", "the loader's thread"] if any(beside for _, beside in bars.values()) else ["the loop"]
    stacks = [(label, [_round_ms(one) for one in both[: len(names)]]) for label, both in bars.items() if any(both)]
    note = "The mean step. The loader's thread runs in parallel: it costs time only while the queue waits for it."
    if device != "cpu":
        note += " On a GPU these are host times; device time shows in the stages that wait for the device."
    if rest := [f"{stage} {_round_ms(seconds[stage] / steps):g}" for stage in OUTSIDE_STAGES if stage in seconds]:
        note += f" Not included, in ms per step: {', '.join(rest)}."
    note += f" {reads}" if (reads := _describe_host_syncs(summary, device)) else ""
    more: dict[str, Any] = {"section": "Time", "width": "full"}
    return [
        panel.bars("anatomy", "Step anatomy", names, stacks, x_label="ms per step", order=333, note=note, **more),
        panel.table(
            "anatomy-table",
            "Parts of a step, in order",
            ("part", "ms per step", "loader's thread, ms", "source of the number"),
            _list_rows(parts),
            order=334,
            **more,
        ),
    ]


def _describe_host_syncs(summary: Mapping[str, Any], device: str) -> str:
    """Describes how often a step read tensor values in Python; empty for runs that did not count."""
    if "host_syncs" not in summary:
        return ""
    syncs = summary["host_syncs"]
    if syncs is None:
        return (
            "Values read in Python: not counted, because the process made too few steps. Counting needs "
            f"{host_syncs.COUNTED_STEPS} steps after the first {host_syncs.SKIPPED_STEPS} that neither log, evaluate "
            "nor save."
        )
    if not syncs["a_step"]:
        return f"Values read in Python: none in {syncs['steps']} steps."
    places = ", ".join(f"{one['method']} at {one['place']} ({one['a_step']:g})" for one in syncs["places"])
    text = f"Values read in Python: {syncs['a_step']:.3g} per step, {places}"
    if device == "cpu":
        return f"{text}; on a GPU each read of a tensor there is a host-device sync."
    return f"{text}; {syncs['waits_a_step']:.3g} of them waited for the device."


def _list_rows(parts: Sequence[StepPart]) -> list[tuple[str, str, str, str]]:
    """Lists a row per part. Parts of one stage follow each other: the first has their sum, the others point to it."""
    rows: list[tuple[str, str, str, str]] = []
    seen = set[str]()
    for part in parts:
        number, note = format_ms(part.loop_s), part.note
        if part.stage in seen:
            number, note = "", "in the number above"
        elif part.is_shared:
            seen.add(part.stage)
        rows.append((part.name, number, format_ms(part.loader_s), note))
    return rows


def format_ms(seconds: float | None) -> str:
    """Formats seconds as milliseconds with three digits; `-`: unknown."""
    return "-" if seconds is None else f"{_round_ms(seconds):g}"


def _round_ms(seconds: float) -> float:
    """Converts to milliseconds with three digits."""
    return float(f"{seconds * 1e3:.3g}")
