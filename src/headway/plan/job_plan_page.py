"""A job plan as an HTML page: curves over the node counts, the parts of a step, sensitivities, strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from headway.core.files import write_whole
from headway.page import panel
from headway.page import renderer
from headway.page.panel import Panel
from headway.plan import job_plan_text
from headway.plan.convergence import NO_GAIN, PERFECT_SCALING, EpochsLaw
from headway.plan.job_plan import JobPlan, list_warnings
from headway.plan.wording import format_hours, format_hours_range, pluralise

SECTIONS = ("Plan", "Step", "Learning", "Uncertainty", "More data")
# Points of a fitted curve.
POINTS = 60


def write_page(found: JobPlan, path: Path) -> None:
    """Write the plan as one HTML file."""
    html = renderer.render(
        build_panels(found),
        title=f"{found.name}: {found.cluster.title}",
        subtitle=" ".join(job_plan_text.list_verdicts(found)[:1]),
        sections=SECTIONS,
    )
    write_whole(path, html)


def build_panels(found: JobPlan) -> list[Panel]:
    """Build the panels in the order of the page."""
    best = found.best
    cards = [
        ("nodes that pay", f"{best.nodes:,}", f"of {found.predictions[-1].nodes:,} planned"),
        ("images/s", f"{best.images_s:,.0f}", f"{best.scaling:.0%} of linear"),
        (
            "time to target",
            format_hours(best.hours),
            f"{format_hours_range(best.low_hours, best.high_hours)} (90 %)",
        ),
        ("energy", "-" if best.kwh is None else f"{best.kwh:,.3g} kWh", "of the building"),
        (
            "limit",
            job_plan_text.describe_bottleneck(found, best),
            f"communication / computation {best.step.communication_ratio:.2f}",
        ),
    ]
    panels = [
        panel.cards("cards", "Summary", cards, order=1, section="Plan"),
        *_build_warning_panel(found),
        *_build_scaling_panels(found),
        _build_step_panel(found),
        *_build_convergence_panels(found),
        *_build_sensitivity_panels(found),
        *_build_growth_panels(found),
    ]
    cells = job_plan_text.tabulate_predictions(found)
    panels.append(
        panel.table(
            "answers",
            "All node counts",
            cells[0],
            cells[1:],
            order=9,
            section="Plan",
            width="full",
            note=_describe_sources(found),
        )
    )
    return panels


def _build_warning_panel(found: JobPlan) -> list[Panel]:
    """Build the panel of warnings; none without a warning."""
    lines = list_warnings(found)
    return (
        [panel.text("warnings", "Warnings", "\n".join(lines), order=0, section="Plan", width="full")] if lines else []
    )


def _describe_sources(found: JobPlan) -> str:
    """Describe the sources of the numbers, for the note under the table."""
    return (
        f"A step by {found.estimate.how}. Epochs: {found.epochs_from}. Memory: {job_plan_text.describe_memory(found)}."
        f" Input: {job_plan_text.describe_input(found)}. comm: seconds of the exchange over those of computing; by: its"
        " algorithms."
    )


def _build_scaling_panels(found: JobPlan) -> list[Panel]:
    """Build the curves of images/s, time, efficiency and energy over the nodes."""
    nodes = [float(one.nodes) for one in found.predictions]
    first = found.predictions[0]
    linear = [first.images_s / first.nodes * count for count in nodes]
    rates = [("planned", nodes, [one.images_s for one in found.predictions]), ("linear", nodes, linear)]
    # Drawn only if known for every node count: an infinite rate has no place on an axis.
    limits = [one.input_images_s for one in found.predictions]
    if all(map(math.isfinite, limits)):
        rates.append(("limit of storage and loading", nodes, limits))
    hours = [("planned", nodes, [one.hours for one in found.predictions])]
    band = [(0, [one.low_hours for one in found.predictions], [one.high_hours for one in found.predictions])]
    shares = [
        ("scaling", nodes, [one.scaling for one in found.predictions]),
        ("learning", nodes, [one.statistical for one in found.predictions]),
        ("both", nodes, [one.efficiency for one in found.predictions]),
    ]
    panels = [
        panel.lines(
            "images", "Images/s", rates, x_label="nodes", y_label="images/s", order=2, section="Plan", log_x=True,
            log_y=True,
        ),
        panel.lines(
            "hours", "Time to the target", hours, x_label="nodes", y_label="hours", bands=band, order=3, section="Plan",
            note="The band covers 90 %, from the errors of all inputs.", log_x=True, log_y=True,
        ),
        panel.lines(
            "efficiency", "Efficiency", shares, x_label="nodes", y_label="share", y_range=(0.0, 1.1), log_x=True,
            order=4, section="Plan", note="Scaling: images/s per node. Learning: epochs of the first row over these.",
        ),
    ]  # fmt: skip
    if all(one.kwh is not None for one in found.predictions):
        energy = [("planned", nodes, [one.kwh for one in found.predictions])]
        panels.append(
            panel.lines(
                "energy",
                "Energy",
                energy,
                x_label="nodes",
                y_label="kWh",
                log_x=True,
                order=5,
                section="Plan",
                y_range=panel.choose_y_range([one.kwh for one in found.predictions]),
            )
        )
    return panels


def _build_step_panel(found: JobPlan) -> Panel:
    """Build the stacked bars of a step's parts, one bar per node count."""
    names = [pluralise(one.nodes, "node") for one in found.predictions]
    parts: list[tuple[str, Sequence[float]]] = [
        ("samples", [one.step.sample_s * 1e3 for one in found.predictions]),
        ("fixed", [one.step.fixed_s * 1e3 for one in found.predictions]),
        ("slowest device", [one.step.slowest_s * 1e3 for one in found.predictions]),
        ("exchange, exposed", [one.step.exposed_s * 1e3 for one in found.predictions]),
    ]
    note = "Without the part of the exchange that the backward pass hides."
    return panel.bars("step", "A step", names, parts, x_label="ms", order=1, section="Step", width="full", note=note)


def _build_convergence_panels(found: JobPlan) -> list[Panel]:
    """Build the curves of epochs and steps by batch; none if epochs are constant."""
    epochs = found.job.epochs
    if not isinstance(epochs, EpochsLaw):
        return []
    # The curve covers the measured and the planned batches, evenly spaced in logarithms.
    low = min(epochs.low, found.predictions[0].batch)
    high = max(epochs.high, found.predictions[-1].batch, low * 2)
    batches = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    steps = [epochs.predict_steps(batch, found.job.samples) for batch in batches]
    # Perfect scaling: steps fall as the batch grows, from the first point on.
    perfect = [steps[0] * batches[0] / batch for batch in batches]
    planned = [one.batch for one in found.predictions]
    note = f"Critical batch {epochs.critical:,.0f}; epochs were measured from {epochs.low:,.0f} to {epochs.high:,.0f}."
    edges = (PERFECT_SCALING * epochs.critical, NO_GAIN * epochs.critical)
    bounds = [f"perfect scaling up to {edges[0]:,.0f}", f"no gain from {edges[1]:,.0f} on"]
    return [
        panel.lines(
            "epochs", "Epochs to the target",
            [("fit", batches, [epochs.predict_epochs(batch) for batch in batches]),
             ("planned", planned, [one.epochs for one in found.predictions])],
            x_label="batch", y_label="epochs", order=1, section="Learning", note=note, log_x=True, log_y=True,
        ),
        panel.lines(
            "steps", "Steps to the target", [("fit", batches, steps), ("perfect scaling", batches, perfect)],
            x_label="batch", y_label="steps", order=2, section="Learning",
            note=f"Regimes: {bounds[0]}, then diminishing returns, {bounds[1]}.", log_x=True, log_y=True,
        ),
    ]  # fmt: skip


def _build_sensitivity_panels(found: JobPlan) -> list[Panel]:
    """Build the tables of sensitivities and strategies."""
    moved = [one for one in found.sensitivities if one.magnitude >= 0.001]
    panels = []
    if moved:
        rows = [(one.name, f"{one.less - 1:+.1%}", f"{one.more - 1:+.1%}") for one in moved]
        title = f"Sensitivity of the time at {pluralise(found.paying_nodes, 'node')}"
        columns = ("input", "with 20 % less of it", "with 20 % more")
        panels.append(panel.table("moved", title, columns, rows, order=1, section="Uncertainty"))
    ways = [
        (
            one.name,
            f"{one.images_s:,.0f}",
            format_hours(one.hours),
            f"{one.gain:.2f}",
            f"{one.memory.used / 1e9:.1f} GB{'' if one.memory.fits else ', too much'}",
            one.note,
        )
        for one in found.strategies
    ]
    title = f"Strategies at {pluralise(found.paying_nodes, 'node')}"
    panels.append(
        panel.table(
            "choices",
            title,
            ("strategy", "images/s", "time", "times as fast", "memory", "note"),
            ways,
            order=2,
            section="Uncertainty",
        )
    )
    return panels


def _build_growth_panels(found: JobPlan) -> list[Panel]:
    """Build the curve of the error by samples and its table; none without a law."""
    law = found.growth
    if law is None:
        return []
    high = max(one.samples for one in law.sizes)
    low = law.error.low
    samples = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    bands = [law.error.predict_band(one) for one in samples]
    # Two points give no band.
    known = all(top < float("inf") for _, top in bands)
    note = f"Measured up to {law.error.high:,.3g}; beyond it the law may end."
    cells = job_plan_text.tabulate_growth(law)
    return [
        panel.lines(
            "growth", "Error by samples", [("law", samples, [law.error(one) for one in samples])],
            x_label="samples", y_label="error", log_x=True, log_y=True, order=1, section="More data", note=note,
            bands=[(0, [bottom for bottom, _ in bands], [top for _, top in bands])] if known else (),
        ),
        panel.table("grown", "Predictions", cells[0], cells[1:], order=2, section="More data"),
    ]  # fmt: skip
