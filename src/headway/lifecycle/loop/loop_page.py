"""Page of a loop: accuracy by round, what each arm of the picks gave, the gate, and what the labels have cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.statistics import compute_interval
from headway.core.text_format import format_duration, pluralise
from headway.lifecycle.loop.answers import describe_points
from headway.lifecycle.loop.loop_folder import LoopFolder
from headway.lifecycle.loop.summary import LoopSummary, RoundSummary
from headway.lifecycle.mining.choose import RANDOM
from headway.page import panel, renderer
from headway.page.panel import Panel

SECTIONS = ("Result", "Picks", "Cost")
_MEMBERS, _POOL = "members, evaluation split", "members, pool (random arm)"


def write_page(summary: LoopSummary) -> Path:
    """Writes loop.html into the folder of a loop and returns its path."""
    path = LoopFolder(summary.folder).page_path
    html = renderer.render(
        build_panels(summary),
        title=summary.name,
        subtitle=f"Headway loop on {summary.data}, {summary.state}; {pluralise(summary.planned, 'round')} planned",
        sections=SECTIONS,
    )
    write_atomically(path, html)
    return path


def build_panels(summary: LoopSummary) -> list[Panel]:
    """Builds the panels of the page."""
    panels = [_build_cards(summary)]
    if any(one.accuracy for one in summary.rounds):
        panels += [_build_accuracy(summary), _build_round_table(summary)]
    panels += _build_verification(summary)
    if any(one.arms for one in summary.rounds):
        panels.append(_build_arm_table(summary))
    if summary.rounds:
        panels += [_build_cost_bars(summary), _build_cost_table(summary)]
    return panels


def _build_cards(summary: LoopSummary) -> Panel:
    rounds = [one for one in summary.rounds if one.accuracy]
    cards = []
    if rounds:
        newest = rounds[-1]
        note = f"mean of {pluralise(len(newest.accuracy), 'member')}, {pluralise(summary.eval_images, 'image')}"
        cards.append(("accuracy of the newest round", f"{compute_interval(newest.accuracy)[0]:.1%}", note))
        if (gain := newest.gain_in_all) is not None:
            note = f"95 % interval {100 * gain.low:+.1f} to {100 * gain.high:+.1f}"
            cards.append(("gain over round 0", f"{100 * gain.mean:+.1f} points", note))
    cards.append(("accepted network", f"round {summary.accepted}", "its first member, by the gate"))
    labels = sum(one.labelled for one in summary.rounds)
    note = f"{pluralise(summary.missing, 'label')} to go" if summary.missing else ""
    cards.append(("labels", f"{labels:,}", note))
    cards.append(("CPU time", format_duration(sum(one.cpu_s for one in summary.rounds)), "of all stages"))
    return panel.cards("result", "Result", cards, section="Result", order=100)


def _build_accuracy(summary: LoopSummary) -> Panel:
    rounds = [one for one in summary.rounds if one.accuracy and one.images is not None]
    x = [float(one.images or 0) for one in rounds]
    means, halves = zip(*(compute_interval(one.accuracy) for one in rounds), strict=True)
    series: list[tuple[str, Sequence[float], Sequence[float | None]]] = [(_MEMBERS, x, [100 * mean for mean in means])]
    bands = []
    if not any(math.isnan(half) for half in halves):
        ends = [(max(0.0, mean - half), min(1.0, mean + half)) for mean, half in zip(means, halves, strict=True)]
        bands.append((0, [100 * low for low, _ in ends], [100 * high for _, high in ends]))
    # The picks of round 2 say how good the networks of round 1 are.
    judged = {one.number - 1: arm for one in summary.rounds for arm in one.arms if arm.name == RANDOM and arm.labelled}
    pool = [(float(one.images or 0), judged[one.number]) for one in rounds if one.number in judged]
    if pool:
        bands.append((1, [100 * (1 - arm.high) for _, arm in pool], [100 * (1 - arm.low) for _, arm in pool]))
        series.append((_POOL, [images for images, _ in pool], [100 * (1 - arm.share) for _, arm in pool]))
    note = (
        "Bands are 95 % intervals: over members, and of the share in the random picks of the next round, which are an "
        "unbiased sample of the pool without its near copies. Their probabilities are averaged there."
    )
    return panel.lines(
        "accuracy",
        "Accuracy by labelled images",
        series,
        bands=bands,
        x_label="images in train",
        y_label="accuracy, %",
        section="Result",
        order=110,
        width="full",
        note=note,
    )


def _build_round_table(summary: LoopSummary) -> Panel:
    rows = []
    for one in summary.rounds:
        gains = ["-" if gain is None else gain.describe() for gain in (one.gain, one.gain_in_all)]
        bound = "-" if one.verdict is None else f"{max(one.verdict.bound, 0):.1f}"
        changed = "-" if one.verdict is None else f"{one.verdict.won:,} won, {one.verdict.lost:,} lost"
        version = "-" if one.version is None else f"v{one.version}"
        images = "-" if one.images is None else f"{one.images:,}"
        cells = [f"{one.number}", version, images, one.describe_accuracy(), *gains, changed, bound]
        rows.append([*cells, one.describe_gate(), one.export or "-"])
    columns = (
        *("round", "version", "images", "accuracy of the members", "gain over the accepted", "gain over round 0"),
        *("first member", "worse by at most, points", "gate", "export"),
    )
    note = (
        f"On the {pluralise(summary.eval_images, 'image')} of the first version's split eval, in all rounds. Gains in "
        "points with 95 % intervals, by a bootstrap over images and members. The gate compares the first member with "
        "the accepted one; the bound holds with 95 %."
    )
    return panel.table("rounds", "Rounds", columns, rows, section="Result", order=120, width="full", note=note)


def _build_verification(summary: LoopSummary) -> list[Panel]:
    """Builds the line and the table of what the program of the user has said; nothing if there is none."""
    rounds = [(one.number, one.verification, one) for one in summary.rounds if one.verification is not None]
    if not rounds:
        return []
    # The newest program's: numbers of others do not compare.
    newest = rounds[-1][1]
    drawn = [(number, found.value) for number, found, _ in rounds if found.program == newest.program]
    label = f"{newest.metric}, {newest.better} is better"
    series = [(newest.metric, [float(number) for number, _ in drawn], [value for _, value in drawn])]
    rows = []
    for number, found, one in rounds:
        accepted = "-" if found.before is None else f"{found.before:g} (round {found.against})"
        worse = "-" if found.worse is None else f"{found.worse:+g}"
        seconds = format_duration(one.sum_seconds("verify"))
        cells = [f"{number}", found.metric, f"{found.value:g}", accepted, worse, f"{found.allowed:g}"]
        rows.append([*cells, "-" if number == 0 else "accepted" if found.passed else "refused", seconds])
    columns = ("round", "number", "value", "accepted network", "worse by", "allowed", "verdict", "took")
    note = "What the program of verify.command has printed about the export of each round."
    more: dict[str, Any] = {"section": "Result", "width": "full"}
    return [
        panel.lines("verification", "Verification", series, x_label="round", y_label=label, order=130, **more),
        panel.table("verifications", "Verification by round", columns, rows, order=140, note=note, **more),
    ]


def _build_arm_table(summary: LoopSummary) -> Panel:
    rows = []
    for one in summary.rounds:
        for arm in one.arms:
            found = [f"{arm.share:.1%}", f"{arm.low:.1%} to {arm.high:.1%}"] if arm.labelled else ["-", "-"]
            gain = next((found for found in one.arm_gains if found.name == arm.name), None)
            found.append("-" if gain is None else describe_points(gain.difference, gain.low, gain.high))
            rows.append([f"{one.number}", arm.name, f"{arm.picks:,}", f"{arm.labelled:,}", f"{arm.wrong:,}", *found])
    note = (
        "A label teaches most where the networks were wrong. The random arm shows how often that is without mining: "
        "only an interval of the difference above 0 shows that mining finds more."
    )
    columns = ("round", "arm", "picks", "labelled", "networks wrong", "share", "95 % interval", "less random, points")
    title = "What each arm gave"
    return panel.table("arms", title, columns, rows, section="Picks", order=200, width="full", note=note)


def _build_cost_bars(summary: LoopSummary) -> Panel:
    names = [f"round {one.number}" for one in summary.rounds]
    verifies = any(one.verification is not None for one in summary.rounds)
    stacks = [
        (word, [sum(stage.cpu_s for stage in one.stages if stage.name == word) for one in summary.rounds])
        for word in ("train", "mine", "export", *(("verify",) if verifies else ()))
    ]
    title = "CPU seconds by stage"
    return panel.bars("cpu", title, names, stacks, x_label="CPU seconds", section="Cost", order=300)


def _build_cost_table(summary: LoopSummary) -> Panel:
    rows = [_list_costs(one) for one in summary.rounds]
    note = (
        "The wait for labels runs from the picks to the version that has them, over nights too. The time of people is "
        "that of the label page; other labels have none. A stage that was killed counts with its last try."
    )
    columns = ("round", "labels", "wait for labels", "people, s a label", "machine time", "CPU time", "CPU s a label")
    return panel.table("cost", "Cost", columns, rows, section="Cost", order=310, note=note)


def _list_costs(one: RoundSummary) -> list[str]:
    wait = one.sum_seconds("label")
    machine = one.sum_seconds() - wait
    each = [f"{value / one.labelled:.2f}" if one.labelled and value else "-" for value in (one.people_s, one.cpu_s)]
    waited = format_duration(wait) if one.labelled else "-"
    times = [format_duration(machine), format_duration(one.cpu_s)]
    return [f"{one.number}", f"{one.labelled:,}", waited, each[0], *times, each[1]]
