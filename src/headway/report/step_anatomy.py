"""Anatomy: the fifteen parts of one training step, from reading the images to the return to the beginning.

Where several parts share one measurement, it stands at all of them as what it is: their sum. Nothing is split by a
guess: the layers of a network have one clock on the host, and on a GPU not even that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from headway.observe import host_syncs
from headway.page import panel
from headway.page.panel import Panel

PREPARE_STAGES = ("order", "decode", "labels")
"""Stages of the loader's thread that make a batch of bytes."""
OUTSIDE_STAGES = ("evaluate", "checkpoint", "regroup", "first batch")
"""Stages that are no part of a step."""

NO_LAYER_CLOCK = "; layers have no clock of their own"
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
"""(part, stage of the loop's clock that it is within, more of how it is known)."""


@final
@dataclass(frozen=True, kw_only=True)
class StepPart:
    """A part of a step.

    Attributes:
        stage: of the loop's clock, in which it is; empty where nothing of it is in the loop.
        loop_s: seconds a step of that stage; None where there is none.
        is_shared: whether other parts are within the same stage: `loop_s` is then of all of them together.
        loader_s: seconds a step of the loader's thread, which works beside the loop; None where it has no part in it.
        note: what measures it, or why nothing does.
    """

    name: str
    stage: str
    loop_s: float | None
    is_shared: bool
    loader_s: float | None
    note: str


def list_step_parts(summary: Mapping[str, Any], device: str) -> tuple[StepPart, ...]:
    """The parts of a run's mean step, on the rank that led it; none where it has made no step.

    Args:
        summary: of the run. device: `cpu`, or the name of a GPU.
    """
    steps, seconds = summary["step"], summary["seconds_by_stage"]
    if not steps:
        return ()
    rows = _list_input_parts(summary.get("input"), device)
    for name, stage, more in NETWORK_PARTS:
        known = stage if stage in seconds else "forward"  # earlier runs have no stage of the loss
        rows.append((name, known, None, f"the loop's clock: {known}{more}"))
    sharing = Counter(stage for _, stage, _, _ in rows)
    return tuple(
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


def _list_input_parts(found: Mapping[str, Any] | None, device: str) -> list[tuple[str, str, float | None, str]]:
    """(part, stage of the loop, seconds a step beside it, note) of the first five."""
    own, queue = "the loop's clock: augment", "the loop's clock: wait, for the next batch"
    if found is None:
        none = "nothing to do: the images are there already"
        return [
            ("read", "", None, none),
            ("transport", "", None, none),
            ("pre-process", "augment", None, own),
            ("queue", "wait", None, queue),
            ("transport to the device", "", None, none),
        ]
    thread, place = "the loader's thread", found["tier"].partition(", ")[0]
    transport = {
        "none": "within pre-process where files are mapped, whose pages come as bytes are touched; else within read",
        "disk": "within read: what is not in the local cache yet is fetched",
    }.get(place, "nothing to do: the set was brought here before the first step")
    copied, copy = "", "nothing to do: the network reads the loader's memory"
    if place == "device":
        copy = "nothing to do: the images lie there"
    elif device != "cpu":
        copied, copy = "wait", "the copy is begun while the loop takes a batch, and goes on beside it"
    made = f"{thread}: {', '.join(PREPARE_STAGES)}; {own}"
    return [
        ("read", "", _sum_loader_seconds(found, ("read",)), f"{thread}: read"),
        ("transport", "", None, transport),
        ("pre-process", "augment", _sum_loader_seconds(found, PREPARE_STAGES), made),
        ("queue", "wait", None, f"{queue}, of {found['ahead']} that are made ahead"),
        ("transport to the device", copied, None, copy),
    ]


def _sum_loader_seconds(found: Mapping[str, Any], stages: Sequence[str]) -> float | None:
    """Seconds of the loader's thread for the images of a step; None where the run does not tell how many those are."""
    if not found.get("batches"):
        return None
    rates: dict[str, float] = found["stage_images_s"]  # of a stage that took no time there is none
    images: float = found["images"] / found["batches"]
    return sum(images / rates[stage] for stage in stages if stage in rates)


def build_panels(summary: Mapping[str, Any], device: str) -> list[Panel]:
    """A bar of the loop and one of what works beside it, and the table of all parts; nothing before the run's end."""
    found = list_step_parts(summary, device) if summary else ()
    if not found:
        return []
    steps, seconds = summary["step"], summary["seconds_by_stage"]
    bars: dict[str, tuple[float, float]] = {}
    for part in found:
        label = part.stage if part.is_shared else part.name
        bars[label] = (part.loop_s or 0.0, part.loader_s or 0.0)
    if "reduce" in seconds:
        bars["sum over the ranks"] = (seconds["reduce"] / steps, 0.0)
    names = ["the loop", "the loader's thread"] if any(beside for _, beside in bars.values()) else ["the loop"]
    stacks = [(label, [_round_ms(one) for one in both[: len(names)]]) for label, both in bars.items() if any(both)]
    note = "The mean step. The loader's thread works beside the loop, and costs time only as far as the queue waits."
    if device != "cpu":
        note += " On a GPU the loop's numbers are the host's, and the device's time is in what waits for it."
    if rest := [f"{stage} {_round_ms(seconds[stage] / steps):g}" for stage in OUTSIDE_STAGES if stage in seconds]:
        note += f" Not in it, in ms for each step: {', '.join(rest)}."
    note += f" {reads}" if (reads := _describe_host_syncs(summary, device)) else ""
    more: dict[str, Any] = {"section": "Time", "width": "full"}
    return [
        panel.bars("anatomy", "Step anatomy", names, stacks, x_label="ms a step", order=333, note=note, **more),
        panel.table(
            "anatomy-table",
            "The parts of a step, in their order",
            ("part", "ms a step", "beside the loop, ms", "how it is known"),
            [(part.name, _format_part(part), _format_ms(part.loader_s), part.note) for part in found],
            order=334,
            **more,
        ),
    ]


def _describe_host_syncs(summary: Mapping[str, Any], device: str) -> str:
    """How often a step read values in Python, and where; nothing of runs before that was counted."""
    if "host_syncs" not in summary:
        return ""
    found = summary["host_syncs"]
    if found is None:
        return (
            "Values read in Python: not counted, this process made too few steps. It takes "
            f"{host_syncs.COUNTED_STEPS} after the first {host_syncs.SKIPPED_STEPS} that neither log nor evaluate nor save."
        )
    if not found["a_step"]:
        return f"Values read in Python: none, in {found['steps']} steps."
    places = ", ".join(f"{one['method']} at {one['place']} ({one['a_step']:g})" for one in found["places"])
    told = f"Values read in Python: {found['a_step']:.3g} a step, {places}"
    if device == "cpu":
        return f"{told}; on a GPU each of a value that lies there waits for the device."
    return f"{told}; {found['waits_a_step']:.3g} of them waited for the device."


def _format_part(part: StepPart) -> str:
    number = _format_ms(part.loop_s)
    return f"within {part.stage}: {number}" if part.is_shared else number


def _format_ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{_round_ms(seconds):g}"


def _round_ms(seconds: float) -> float:
    """Three digits."""
    return float(f"{seconds * 1e3:.3g}")
