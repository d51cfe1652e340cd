"""A plan as a page: curves over the nodes, what a step is made of, what moves the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from headway.core.files import write_whole
from headway.page import panel
from headway.page import renderer as pages
from headway.page.panel import Panel
from headway.plan import job_plan_text as said
from headway.plan.convergence import NO_GAIN, PERFECT_SCALING, EpochsLaw
from headway.plan.job_plan import JobPlan
from headway.plan.wording import pluralise

SECTIONS = ("Plan", "Step", "Learning", "How sure it is", "More data")
POINTS = 60


def write_page(found: JobPlan, path: Path) -> None:
    """As one HTML file."""
    html = pages.render(
        build_panels(found),
        title=f"{found.name}: {found.cluster.title}",
        subtitle=" ".join(said.list_verdicts(found)[:1]),
        sections=SECTIONS,
    )
    write_whole(path, html)


def build_panels(found: JobPlan) -> list[Panel]:
    """In the order of the page."""
    best = found.best
    cards = [
        ("nodes that pay", f"{best.nodes:,}", f"of {found.predictions[-1].nodes:,} that were planned"),
        ("images/s", f"{best.images_s:,.0f}", f"{best.scaling:.0%} of linear"),
        (
            "time to target",
            said.format_hours(best.hours),
            f"{said.format_hours_range(best.low_hours, best.high_hours)} (90 %)",
        ),
        ("energy", "-" if best.kwh is None else f"{best.kwh:,.3g} kWh", "of the building"),
        (
            "limit",
            said.describe_bottleneck(found, best),
            f"communication / computation {best.step.communication_ratio:.2f}",
        ),
    ]
    drawn = [
        panel.cards("cards", "The answer", cards, order=1, section="Plan"),
        *_build_warning_panel(found),
        *_build_scaling_panels(found),
        _build_step_panel(found),
        *_build_convergence_panels(found),
        *_build_sensitivity_panels(found),
        *_build_growth_panels(found),
    ]
    cells = said.tabulate_predictions(found)
    drawn.append(
        panel.table(
            "answers",
            "All of them",
            cells[0],
            cells[1:],
            order=9,
            section="Plan",
            width="full",
            note=_describe_sources(found),
        )
    )
    return drawn


def _build_warning_panel(found: JobPlan) -> list[Panel]:
    lines = said.list_warnings(found)
    return [panel.text("warnings", "Beware", "\n".join(lines), order=0, section="Plan", width="full")] if lines else []


def _describe_sources(found: JobPlan) -> str:
    return (
        f"A step by {found.estimate.how}. Epochs: {found.epochs_from}. Memory: {said.describe_memory(found)}. Input:"
        f" {said.describe_input(found)}. comm: seconds of the exchange over those of computing; by: its algorithms."
    )


def _build_scaling_panels(found: JobPlan) -> list[Panel]:
    nodes = [float(one.nodes) for one in found.predictions]
    first = found.predictions[0]
    linear = [first.images_s / first.nodes * count for count in nodes]
    rates = [("planned", nodes, [one.images_s for one in found.predictions]), ("linear", nodes, linear)]
    limits = [one.input_images_s for one in found.predictions]
    if all(map(math.isfinite, limits)):
        rates.append(("what storage and loading give", nodes, limits))
    hours = [("planned", nodes, [one.hours for one in found.predictions])]
    band = [(0, [one.low_hours for one in found.predictions], [one.high_hours for one in found.predictions])]
    shares = [
        ("scaling", nodes, [one.scaling for one in found.predictions]),
        ("learning", nodes, [one.statistical for one in found.predictions]),
        ("both", nodes, [one.efficiency for one in found.predictions]),
    ]
    drawn = [
        panel.lines(
            "images", "Images/s", rates, x_label="nodes", y_label="images/s", order=2, section="Plan", log_x=True,
            log_y=True,
        ),
        panel.lines(
            "hours", "Time to the target", hours, x_label="nodes", y_label="hours", bands=band, order=3, section="Plan",
            note="The band is what errors of the inputs make of it, for 90 %.", log_x=True, log_y=True,
        ),
        panel.lines(
            "efficiency", "Efficiency", shares, x_label="nodes", y_label="share", y_range=(0.0, 1.1), log_x=True,
            order=4, section="Plan", note="Scaling: images/s of a node. Learning: epochs of the first plan over these.",
        ),
    ]  # fmt: skip
    if all(one.kwh is not None for one in found.predictions):
        energy = [("planned", nodes, [one.kwh for one in found.predictions])]
        drawn.append(
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
    return drawn


def _build_step_panel(found: JobPlan) -> Panel:
    names = [pluralise(one.nodes, "node") for one in found.predictions]
    parts: list[tuple[str, Sequence[float]]] = [
        ("samples", [one.step.sample_s * 1e3 for one in found.predictions]),
        ("fixed", [one.step.fixed_s * 1e3 for one in found.predictions]),
        ("slowest device", [one.step.slowest_s * 1e3 for one in found.predictions]),
        ("exchange, exposed", [one.step.exposed_s * 1e3 for one in found.predictions]),
    ]
    note = "What of the exchange is hidden behind the backward pass is not in it."
    return panel.bars("step", "A step", names, parts, x_label="ms", order=1, section="Step", width="full", note=note)


def _build_convergence_panels(found: JobPlan) -> list[Panel]:
    epochs = found.job.epochs
    if not isinstance(epochs, EpochsLaw):
        return []
    low = min(epochs.low, found.predictions[0].batch)
    high = max(epochs.high, found.predictions[-1].batch, low * 2)
    batches = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    steps = [epochs.predict_steps(batch, found.job.samples) for batch in batches]
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
    moved = [one for one in found.sensitivities if one.magnitude >= 0.001]
    drawn = []
    if moved:
        rows = [(one.name, f"{one.less - 1:+.1%}", f"{one.more - 1:+.1%}") for one in moved]
        title = f"What moves the time at {pluralise(found.paying_nodes, 'node')}"
        columns = ("input", "with 20 % less of it", "with 20 % more")
        drawn.append(panel.table("moved", title, columns, rows, order=1, section="How sure it is"))
    ways = [
        (
            one.name,
            f"{one.images_s:,.0f}",
            said.format_hours(one.hours),
            f"{one.gain:.2f}",
            f"{one.memory.used / 1e9:.1f} GB{'' if one.memory.fits else ', too much'}",
            one.note,
        )
        for one in found.strategies
    ]
    title = f"Other ways to spread it over {pluralise(found.paying_nodes, 'node')}"
    drawn.append(
        panel.table(
            "choices",
            title,
            ("way", "images/s", "time", "times as fast", "of a device", "what it takes"),
            ways,
            order=2,
            section="How sure it is",
        )
    )
    return drawn


def _build_growth_panels(found: JobPlan) -> list[Panel]:
    law = found.growth
    if law is None:
        return []
    high = max(one.samples for one in law.sizes)
    low = law.error.low
    samples = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    bands = [law.error.predict_band(one) for one in samples]
    known = all(top < float("inf") for _, top in bands)
    note = f"Measured up to {law.error.high:,.3g}; beyond it the law may end."
    cells = said.tabulate_growth(law)
    return [
        panel.lines(
            "growth", "Error by samples", [("law", samples, [law.error(one) for one in samples])],
            x_label="samples", y_label="error", log_x=True, log_y=True, order=1, section="More data", note=note,
            bands=[(0, [bottom for bottom, _ in bands], [top for _, top in bands])] if known else (),
        ),
        panel.table("grown", "What they would take", cells[0], cells[1:], order=2, section="More data"),
    ]  # fmt: skip
