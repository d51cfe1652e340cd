"""Draws a profile as one HTML file with charts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.profile import PipelineSide, Profile, ShortRun, StageCeiling
from headway.core.recipe import flatten
from headway.core.text_format import format_bytes, pluralise
from headway.doctor.roofline import SAME_SIZE
from headway.doctor.terminal_text import (
    SIDES,
    compute_stage_rates,
    describe_certainty,
    describe_change,
    describe_contention,
    describe_cost,
    describe_disturbance,
    describe_prediction,
    format_number,
    format_percent,
    format_signed,
)
from headway.page import panel, renderer
from headway.page.panel import Panel

SECTIONS = ("Verdict", "Stages", "Whole runs", "Knobs", "Machine")
# Image sides in the chart of rates by image size; too many for a marker on each.
SIDES_PX = range(64, 513, 8)
# Stages whose time grows with the pixels of an image in the batch.
BY_PIXEL = frozenset({"augment", "collate", "copy", "normalise", "transform", "compute"})
# Stages whose time grows with the pixels of an image in the set.
OF_THE_SET = frozenset({"storage", "decode"})
FIXED = "but not those of storage and decode, because the images of the set keep their size"
# FLOP of a training step per multiply-add of the forward pass: two there, and four in the backward pass.
FLOPS = 6.0


def write_page(profile: Profile, path: Path) -> None:
    """Writes one self-contained HTML file; the same profile gives the same file. Raises OSError."""
    how = "quick" if profile.quick else "full"
    html = renderer.render(
        build_panels(profile),
        title=f"{profile.name}: {profile.verdict.kind}",
        subtitle=f"What limits the recipe on this machine: {profile.regime}, batch {profile.batch:,}, "
        f"{pluralise(profile.ranks, 'rank')}",
        sections=SECTIONS,
        footer=f"A {how} examination of {format_number(profile.seconds)} s.",
    )
    write_atomically(path, html)


def build_panels(profile: Profile) -> list[Panel]:
    """Builds every panel for which the profile has the numbers."""
    drawn: tuple[Callable[[Profile], Panel | None], ...] = (
        *(_draw_verdict, _draw_pipeline),
        *(_draw_anatomy, _draw_threads, _draw_sizes, _draw_launch, _draw_flops, _draw_ceilings),
        *(_draw_runs, _draw_run_table),
        _draw_knobs,
        *(_draw_environment, _draw_not_measured, _draw_ranks, _draw_machine, _draw_facts),
    )
    return [drawn_panel for one in drawn if (drawn_panel := one(profile)) is not None]


def _draw_verdict(profile: Profile) -> Panel:
    verdict = profile.verdict
    values: list[tuple[str, str, str]] = [("limit", verdict.stage, verdict.kind)]
    values.append(
        ("predicted images/s", format_number(profile.predicted), "from loader and loop, alone and at the same time")
    )
    if profile.measured is not None:
        error = format_signed(profile.predicted / profile.measured - 1)
        word = "confirmed" if verdict.confirmed else "not confirmed"
        values.append(("measured images/s", format_number(profile.measured), f"the prediction is {error} off: {word}"))
    without = f"the images/s, if {verdict.stage} took no time"
    values.append(("at most", f"{verdict.most:.2f} times", without))
    values.append(("next limit", verdict.next_stage or "none", "once the first is removed"))
    if profile.knobs:
        best = profile.knobs[0]
        doubt = " (over a prediction that is not confirmed)" if verdict.unexplained else ""
        values.append(("best knob", f"{best.gain:.2f} times", f"{best.name}: {describe_change(best)}{doubt}"))
    note = " ".join(filter(None, (verdict.sentence, verdict.unexplained)))
    return panel.cards("verdict", "Verdict", values, section="Verdict", order=100, note=note)


def _draw_pipeline(profile: Profile) -> Panel:
    """Draws a bar for each stage and side, with lines at the job's rate now and with the best knob."""
    rates = compute_stage_rates(profile)
    marks = {profile.verdict.next_stage: "next", profile.verdict.stage: "the limit"}
    names = [f"{one.name} ({marks[one.name]})" if one.name in marks else one.name for one in rates]
    # One series per side, so that each gets its own colour; other sides have bars of length 0.
    groups: list[tuple[str, PipelineSide | None]] = [
        *((name, side) for side, name in SIDES.items()),
        ("together", None),
    ]
    stacks = []
    for name, side in groups:
        of = [one.images_s if (None if one.several else one.side) == side else 0.0 for one in rates]
        # A side without a stage would only fill the legend.
        if any(of):
            stacks.append((name, of))
    now, what = (profile.predicted, "predicted") if profile.measured is None else (profile.measured, "measured")
    rules = [(f"{what}: {format_number(now)}", now)]
    if profile.knobs:
        best = profile.knobs[0]
        rules.append((f"with {best.name}: {format_number(best.images_s)}", best.images_s))
    ranks = f", of all {profile.ranks} ranks" if profile.ranks > 1 else ""
    return panel.bars(
        "pipeline",
        "Pipeline roofline: rate of each stage alone",
        names,
        stacks,
        x_label=f"images/s{ranks}, logarithmic",
        log_x=True,
        rules=rules,
        section="Verdict",
        order=110,
        width="full",
        note="The shortest bar is the lowest ceiling. Loader and loop work at the same time; the stages of one side "
        "share its time, so together they are slower than the slowest of them. " + describe_prediction(profile),
    )


def _draw_anatomy(profile: Profile) -> Panel:
    sides = [side for side in SIDES if any(one.side == side and one.seconds > 0 for one in profile.ceilings)]
    parts = []
    for one in profile.ceilings:
        if one.seconds > 0:
            step_ms = 1e3 * one.seconds * profile.batch
            parts.append((one.stage, [step_ms if one.side == side else 0.0 for side in sides]))
    return panel.bars(
        "anatomy",
        "Anatomy of a step",
        [SIDES[side] for side in sides],
        parts,
        x_label=f"milliseconds of a step of {profile.batch:,} images",
        section="Stages",
        order=200,
        width="full",
        note="Each stage with nothing else running. Loader and loop run at the same time, so the longer one sets the "
        "pace; stalls, spread over all steps, are added.",
    )


def _draw_threads(profile: Profile) -> Panel | None:
    """Draws the loader's rate by threads, the fit through it, and the loop's rate."""
    scaling = profile.threads
    if scaling is None or not scaling.threads:
        return None
    # The fit is drawn up to the usable cores only: beyond, threads share cores and the fit does not hold.
    cores = max(scaling.threads) if profile.together is None else profile.together.cores
    counts = list(range(min(scaling.threads), min(max(scaling.threads), cores) + 1))
    seconds = [scaling.serial_s + scaling.parallel_s / count for count in counts]
    series: list[tuple[str, list[float], list[float | None]]] = [
        ("fit", [*counts], [1 / taken if taken > 0 else None for taken in seconds]),
    ]
    if profile.together is not None:
        ends: list[float] = [min(scaling.threads), max(scaling.threads)]
        # The threads of the loader do not change the loop alone, so its line is level.
        takes = 1 / profile.together.loop_alone
        series.append(("the loop alone", ends, [takes, takes]))
    # The last series is drawn above the others.
    series.append(("measured", list(scaling.threads), list(scaling.images_s)))
    rates = [rate for _, _, values in series for rate in values if rate is not None]
    most = f"at most {format_number(1 / scaling.serial_s)} images/s" if scaling.serial_s > 0 else "no visible bound"
    return panel.lines(
        "threads",
        "Loader by threads",
        series,
        x_label="threads",
        y_label="images/s",
        y_range=(0.0, 1.1 * max(rates) or 1.0),
        section="Stages",
        order=210,
        note=f"Fit: {1e6 * scaling.serial_s:,.4g} us + {1e6 * scaling.parallel_s:,.4g} us / threads per image. "
        f"The serial part bounds the rate: {most}.",
    )


def _draw_sizes(profile: Profile) -> Panel | None:
    """Draws computed rates of loader and loop by image size; None: the size is unknown."""
    height, width = profile.facts.get("height", 0.0), profile.facts.get("width", 0.0)
    here = math.sqrt(height * width)
    if here <= 0:
        return None
    # If all images of the set have the batch's size, another size means another set: reading and decoding grow too.
    growing = BY_PIXEL | OF_THE_SET if profile.facts.get(SAME_SIZE) == 1.0 else BY_PIXEL
    sizes: list[float] = sorted({*SIDES_PX, here})
    series: list[tuple[str, list[float], list[float | None]]] = []
    for side in ("input", "loop"):
        stages = [one for one in profile.ceilings if one.side == side and one.seconds > 0]
        if stages:
            rates: list[float | None] = [
                profile.ranks / _sum_seconds(stages, growing, (size / here) ** 2) for size in sizes
            ]
            series.append((f"{SIDES[side]}, computed", sizes, rates))
    if profile.measured is not None:
        series.append((f"measured, at {height:.0f} x {width:.0f}", [here], [profile.measured]))
    return panel.lines(
        "sizes",
        "Rate by image size, computed",
        series,
        x_label="side of a square image, pixels",
        y_label="images/s",
        log_x=True,
        log_y=True,
        section="Stages",
        order=220,
        note="Computed from one size: seconds of augment, collate, copy, normalise, transform and compute grow with "
        "the pixels, "
        + ("and so do those of storage and decode" if growing > BY_PIXEL else FIXED)
        + "; the others stay. The lower line limits; where they cross, the limit changes.",
    )


def _sum_seconds(stages: list[StageCeiling], growing: frozenset[str], pixels: float) -> float:
    """Returns the seconds of a sample with this many times the pixels."""
    return sum(one.seconds * (pixels if one.stage in growing else 1.0) for one in stages)


def _draw_launch(profile: Profile) -> Panel | None:
    """Draws the seconds of forward and backward by batch size, with the fixed time of a step."""
    if not profile.launch:
        return None
    points = sorted((float(batch), seconds) for batch, seconds in profile.launch.items())
    series = list[tuple[str, list[float], list[float]]]()
    # The intercept of the line is the fixed time of a step, and its slope the time of a sample.
    launch, compute, note = profile.find_ceiling("launch"), profile.find_ceiling("compute"), ""
    if launch is not None and compute is not None:
        fixed = launch.seconds * profile.batch
        ends = [0.0, points[-1][0]]
        series.append(("line", ends, [1e3 * (fixed + batch * compute.seconds) for batch in ends]))
        share = fixed / (fixed + compute.seconds * profile.batch) if fixed else 0.0
        note = (
            f"The line starts at {1e3 * fixed:.3g} ms, the fixed time of a step: "
            f"{format_percent(share)} of forward and backward at a batch of {profile.batch:,}."
        )
    series.append(("measured", [batch for batch, _ in points], [1e3 * seconds for _, seconds in points]))
    return panel.lines(
        "launch",
        "Forward and backward by batch",
        series,
        x_label="images of a batch",
        y_label="milliseconds",
        y_range=(0.0, 1.1 * max(value for _, _, values in series for value in values) or 1.0),
        section="Stages",
        order=230,
        note=note,
    )


def _draw_flops(profile: Profile) -> Panel | None:
    """Draws the reached FLOP/s below the measured roofline; None: no peak was measured."""
    peak, intensity = profile.facts.get("peak_flops", 0.0), profile.facts.get("intensity", 0.0)
    compute = profile.find_ceiling("compute")
    if not (peak > 0 and intensity > 0 and profile.multiply_adds and compute is not None and compute.seconds > 0):
        return None
    launch = profile.find_ceiling("launch")
    # The launch time is part of forward and backward, so it counts against the reached rate.
    reached = FLOPS * profile.multiply_adds / (compute.seconds + (launch.seconds if launch is not None else 0.0))
    bandwidth = profile.facts.get("peak_bytes_s", 0.0)
    places = [intensity / 10, intensity * 10]
    note = f"Forward and backward reach {format_percent(reached / peak)} of the measured peak"
    if bandwidth > 0:
        # Left of the knee memory bandwidth limits, right of it arithmetic.
        knee = peak / bandwidth
        places = sorted({min(intensity, knee) / 10, knee, max(intensity, knee) * 10})
        bound = "the memory" if intensity < knee else "arithmetic"
        roof = min(peak, bandwidth * intensity)
        note += f", and {format_percent(reached / roof)} of the roof above, set by {bound}"
    if reached > peak:
        note += " (Winograd's filtering, where it is used, takes fewer products than are counted)"
    roofs = [min(peak, bandwidth * place) if bandwidth > 0 else peak for place in places]
    return panel.lines(
        "flops",
        "Roofline of forward and backward",
        [("roof, measured", places, roofs), ("this network", [intensity], [reached])],
        x_label="FLOP for each byte of memory traffic",
        y_label="FLOP/s",
        log_x=True,
        log_y=True,
        section="Stages",
        order=240,
        note=f"{note}. A backward pass counts as two forward passes.",
    )


def _draw_ceilings(profile: Profile) -> Panel:
    rows = []
    for one in profile.ceilings:
        rate = "-" if one.images_s is None else format_number(one.images_s)
        taken = f"{1e6 * one.seconds:,.4g}" if one.seconds else "0"
        rows.append((one.stage, SIDES[one.side], one.resource, one.how, taken, rate))
    columns = ("stage", "side", "resource", "how it was measured, or why not", "us per image", "images/s alone")
    note = "Numbers of one process." if profile.ranks > 1 else ""
    return panel.table(
        "ceilings", "Stages in numbers", columns, rows, section="Stages", order=290, width="full", note=note
    )


def _draw_runs(profile: Profile) -> Panel | None:
    names, predicted, measured = [], list[float](), list[float]()
    for run in profile.runs:
        # Two rows per run, so that prediction and measurement lie next to each other.
        if run.predicted is not None:
            names.append(f"{run.name}, predicted")
            predicted.append(run.predicted)
            measured.append(0.0)
        if run.images_s is not None:
            names.append(f"{run.name}, measured")
            predicted.append(0.0)
            measured.append(run.images_s.value)
    if not names:
        return None
    return panel.bars(
        "runs",
        "Predicted and measured",
        names,
        [("predicted", predicted), ("measured", measured)],
        x_label="images/s",
        section="Whole runs",
        order=300,
        width="full",
        note=describe_contention(profile),
    )


def _draw_run_table(profile: Profile) -> Panel:
    columns = ("run", "content", "steps", "predicted", "measured", "from", "to", "error", "waiting")
    rows = [(run.name, run.note, f"{run.steps:,}", *_format_run(run)) for run in profile.runs]
    return panel.table(
        "run-table",
        "Short runs of the whole job",
        columns,
        rows,
        section="Whole runs",
        order=310,
        width="full",
        note="In images/s; from and to: the 95 % interval. Error: predicted / measured - 1. "
        + describe_prediction(profile),
    )


def _format_run(run: ShortRun) -> Iterator[str]:
    rate = run.images_s
    yield "-" if run.predicted is None else format_number(run.predicted)
    yield "-" if rate is None else format_number(rate.value)
    yield "-" if rate is None else format_number(rate.low)
    yield "-" if rate is None else format_number(rate.high)
    yield "-" if run.error is None else format_signed(run.error)
    yield "-" if run.wait_share is None else format_percent(run.wait_share)


def _draw_knobs(profile: Profile) -> Panel:
    columns = ("setting", "override", "cost", "helps stage", "how sure", "images/s", "times")
    rows = [
        (
            knob.name,
            describe_change(knob),
            describe_cost(knob),
            knob.cures,
            describe_certainty(knob, profile),
            format_number(knob.images_s),
            f"{knob.gain:.2f}",
        )
        for knob in profile.knobs
    ]
    return panel.table(
        "knobs",
        "Settings that help",
        columns,
        rows,
        section="Knobs",
        order=400,
        width="full",
        note=f"Each alone, against the predicted {format_number(profile.predicted)} images/s, the best first. "
        "A question mark: the short run of the whole job did not confirm the prediction. "
        f"Append an override to: headway train RECIPE. {describe_disturbance(profile)}".strip(),
    )


def _draw_environment(profile: Profile) -> Panel:
    # Faults first.
    findings = sorted(profile.environment, key=lambda one: not one.cure)
    rows = [(one.what, one.cure or "-") for one in findings]
    faults = sum(bool(one.cure) for one in findings)
    note = f"{faults} to fix." if faults else "No faults."
    wide: dict[str, Any] = {"section": "Machine", "order": 500, "width": "full", "note": note}
    return panel.table("environment", "Environment", ("fact", "cure"), rows, **wide)


def _draw_not_measured(profile: Profile) -> Panel | None:
    if not profile.not_measured:
        return None
    rows = [(what,) for what in profile.not_measured]
    wide: dict[str, Any] = {"section": "Machine", "order": 510, "width": "full"}
    return panel.table("not-measured", "Not measured", ("measurement, and why not",), rows, **wide)


def _draw_ranks(profile: Profile) -> Panel | None:
    """Draws a bar for each rank, from facts named `rank N seconds a step`."""
    times = []
    for name, seconds in profile.facts.items():
        if match := re.fullmatch(r"rank (\d+) seconds( a step)?", name):
            times.append((int(match[1]), 1e3 * seconds))
    if not times:
        return None
    times.sort()
    return panel.bars(
        "ranks",
        "Ranks",
        [f"rank {rank}" for rank, _ in times],
        [("own time", [taken_ms for _, taken_ms in times])],
        x_label="milliseconds of a step, without waiting for others",
        section="Machine",
        order=520,
        width="full",
        note="All ranks wait for the slowest one in each step.",
    )


def _draw_machine(profile: Profile) -> Panel:
    rows = [
        (key.removesuffix("_bytes"), format_bytes(value))
        if key.endswith("_bytes") and isinstance(value, int | float)
        else (key, "-" if value is None else str(value))
        for key, value in flatten(profile.machine)
        if value != {}
    ]
    return panel.table("machine", "Machine and versions", ("item", "value"), rows, section="Machine", order=530)


def _draw_facts(profile: Profile) -> Panel:
    rows = [(name, f"{value:,.6g}") for name, value in profile.facts.items()]
    if profile.multiply_adds is not None:
        rows.append(("multiply-adds of an image, forward", f"{profile.multiply_adds:,}"))
    return panel.table("facts", "Other facts", ("fact", "value"), rows, section="Machine", order=540)
