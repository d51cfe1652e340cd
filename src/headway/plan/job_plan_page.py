"""A job plan as an HTML page: curves over the node counts, the parts of a step, sensitivities, strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.text_format import pluralise
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.plan import growth_text, job_plan_text
from headway.plan.convergence import NO_GAIN, PERFECT_SCALING, EpochsLaw
from headway.plan.job_plan import JobPlan, list_warnings
from headway.plan.published import PUBLISHED_TITLE, list_published_rows
from headway.plan.wording import UNIT_NAMES, choose_unit, format_hours, format_hours_range

SECTIONS = ("Plan", "Step", "Learning", "Uncertainty", "More data")
# Points of a fitted curve.
POINTS = 60
# Node counts double from row to row: a logarithmic axis spaces them evenly.
BY_NODES: dict[str, Any] = {"x_label": "nodes", "log_x": True, "section": "Plan"}


def write_page(plan: JobPlan, path: Path) -> None:
    """Writes the plan as one HTML file."""
    title, subtitle = f"{plan.name}: {plan.cluster.title}", " ".join(job_plan_text.list_verdicts(plan)[:1])
    write_atomically(path, renderer.render(build_panels(plan), title=title, subtitle=subtitle, sections=SECTIONS))


def build_panels(plan: JobPlan) -> list[Panel]:
    """Builds the panels in the order of the page."""
    best, ratio = plan.best, plan.best.step.communication_ratio
    cards = [
        ("nodes that pay", f"{best.nodes:,}", f"of {plan.predictions[-1].nodes:,} planned"),
        (f"{plan.job.unit}/s", f"{best.images_s:,.0f}", f"{best.scaling:.0%} of linear"),
        ("time to target", format_hours(best.hours), f"{format_hours_range(best.low_hours, best.high_hours)} (90 %)"),
        ("energy", "-" if best.kwh is None else f"{best.kwh:,.3g} kWh", "of the building"),
        ("limit", job_plan_text.describe_bottleneck(plan, best), f"communication / computation {ratio:.2f}"),
    ]
    columns, *rows = job_plan_text.tabulate_predictions(plan)
    note = (
        f"A step by {plan.estimate.how}. Batch: {job_plan_text.describe_batch(plan)}. Epochs: {plan.epochs_from}."
        f" Memory: {job_plan_text.describe_memory(plan)}. Input: {job_plan_text.describe_input(plan)}. comm: seconds of"
        " the exchange over those of computing; by: its algorithms."
    )
    return [
        panel.cards("cards", "Summary", cards, order=1, section="Plan"),
        *_build_warning_panel(plan),
        *_build_scaling_panels(plan),
        _build_step_panel(plan),
        *_build_convergence_panels(plan),
        *_build_sensitivity_panels(plan),
        *_build_growth_panels(plan),
        *_build_input_panels(plan),
        panel.table("answers", "All node counts", columns, rows, order=9, section="Plan", width="full", note=note),
        *_build_other_tables(plan),
    ]


def _build_other_tables(plan: JobPlan) -> list[Panel]:
    """Builds the tables of a growing batch, of some devices of one node, and of published runs, where there are any."""
    tables = []
    if plan.grown:
        rows = job_plan_text.list_brief_rows(plan, "nodes", plan.grown)
        tables.append(("per_device", job_plan_text.describe_grown(plan), rows, ""))
    if len(plan.within_node) > 1:
        rows = job_plan_text.list_brief_rows(plan, "devices", plan.within_node)
        verdict = job_plan_text.describe_paying_devices(plan)
        tables.append(("within_node", job_plan_text.WITHIN_NODE_TITLE, rows, verdict))
    if plan.published:
        tables.append(("published", PUBLISHED_TITLE, list_published_rows(plan.published), ""))
    return [
        panel.table(name, title, rows[0], rows[1:], order=10 + at, section="Plan", width="full", note=note)
        for at, (name, title, rows, note) in enumerate(tables)
    ]


def _build_warning_panel(plan: JobPlan) -> list[Panel]:
    """Builds the panel of warnings; none without a warning."""
    text = "\n".join(list_warnings(plan))
    return [panel.text("warnings", "Warnings", text, order=0, section="Plan", width="full")] if text else []


def _build_scaling_panels(plan: JobPlan) -> list[Panel]:
    """Builds the curves of images/s, time, efficiency and energy over the nodes."""
    nodes, rate = [float(one.nodes) for one in plan.predictions], f"{plan.job.unit}/s"
    first = plan.predictions[0]
    # From the smallest planned node count: one node may not have been planned.
    linear = [first.images_s / first.nodes * count for count in nodes]
    rates = [("planned", nodes, [one.images_s for one in plan.predictions]), ("linear", nodes, linear)]
    # Drawn only if known for every node count: an infinite rate has no place on an axis.
    limits = [one.input_images_s for one in plan.predictions]
    if all(map(math.isfinite, limits)):
        rates.append(("limit of storage and loading", nodes, limits))
    # In the unit of the shortest time, as fractions of an hour are hard to read.
    unit, hours_each = choose_unit(min(one.hours for one in plan.predictions))
    times = [("planned", nodes, [one.hours / hours_each for one in plan.predictions])]
    lows = [one.low_hours / hours_each for one in plan.predictions]
    highs = [one.high_hours / hours_each for one in plan.predictions]
    shares = [
        ("scaling", nodes, [one.scaling for one in plan.predictions]),
        ("learning", nodes, [one.statistical for one in plan.predictions]),
        ("both", nodes, [one.efficiency for one in plan.predictions]),
    ]
    panels = [
        panel.lines("images", rate.capitalize(), rates, y_label=rate, order=2, log_y=True, **BY_NODES),
        panel.lines(
            "hours", "Time to the target", times, y_label=UNIT_NAMES[unit], bands=[(0, lows, highs)], order=3,
            log_y=True, note="The band covers 90 %, from the errors of all inputs.", **BY_NODES,
        ),
        panel.lines(
            "efficiency", "Efficiency", shares, y_label="share", y_range=(0.0, 1.1), order=4, **BY_NODES,
            note=f"Scaling: {rate} per node. Learning: epochs of the first row over these.",
        ),
    ]  # fmt: skip
    kwh = [one.kwh for one in plan.predictions]
    # The power of some clusters is unknown, and a curve with holes would suggest zeros.
    if None not in kwh:
        bounds = panel.choose_y_range(kwh)
        energy = [("planned", nodes, kwh)]
        panels.append(panel.lines("energy", "Energy", energy, y_label="kWh", y_range=bounds, order=5, **BY_NODES))
    return panels


def _build_input_panels(plan: JobPlan) -> list[Panel]:
    """Builds the lines of networks by image size beside those of a node's input, and the sizes up to which a network
    waits; none if nothing is known of the input."""
    roofline = plan.compute_input_roofline()
    if roofline is None:
        return []
    sides, last = [float(side) for side in roofline.sides], roofline.sides[-1]
    note = (
        f"A network above a dashed line waits for it: {pluralise(plan.cluster.devices, 'device')} of one node, loading"
        " encoded images of such a side, whose time is assumed to grow as the pixels, and the storage while caches are"
        " cold."
    )
    waits = [roofline.find_limited(limit) for limit in roofline.limits]
    rows = []
    for network in roofline.networks:
        found = [one.get(network.name) for one in waits]
        cells = ["never" if side is None else f"{side} px" if side < last else "all" for side in found]
        rows.append((network.name, *cells))
    return [
        panel.lines(
            "input", "Which networks wait for their input",
            [(one.name, sides, one.images_s) for one in roofline.networks], x_label="side of the image in pixels",
            y_label=f"{plan.job.unit}/s", log_y=True, order=8, section="Plan", width="full", note=note,
            rules=[(one.name, one.images_s) for one in roofline.limits],
        ),
        panel.table(
            "input_limits", "Sides of the image up to which they wait",
            ("network", *(one.name for one in roofline.limits)), rows, order=8, section="Plan", width="full",
        ),
    ]  # fmt: skip


def _build_step_panel(plan: JobPlan) -> Panel:
    """Builds the stacked bars of a step's parts, one bar per node count."""
    names = [pluralise(one.nodes, "node") for one in plan.predictions]
    parts: list[tuple[str, Sequence[float]]] = [
        ("samples", [one.step.sample_s * 1e3 for one in plan.predictions]),
        ("fixed", [one.step.fixed_s * 1e3 for one in plan.predictions]),
        ("contention", [one.step.contention_s * 1e3 for one in plan.predictions]),
        ("slowest device", [one.step.slowest_s * 1e3 for one in plan.predictions]),
        ("exchange, exposed", [one.step.exposed_s * 1e3 for one in plan.predictions]),
    ]
    note = "Without the part of the exchange that the backward pass hides."
    return panel.bars("step", "A step", names, parts, x_label="ms", order=1, section="Step", width="full", note=note)


def _build_convergence_panels(plan: JobPlan) -> list[Panel]:
    """Builds the curves of epochs and steps by batch; none if epochs are constant."""
    epochs = plan.job.epochs
    if not isinstance(epochs, EpochsLaw):
        return []
    # The curve covers the measured and the planned batches, evenly spaced in logarithms.
    low = min(epochs.low, plan.predictions[0].batch)
    high = max(epochs.high, plan.predictions[-1].batch, low * 2)
    batches = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    steps = [epochs.predict_steps(batch, plan.job.samples) for batch in batches]
    # Perfect scaling: steps fall as the batch grows, from the first point on.
    perfect = [steps[0] * batches[0] / batch for batch in batches]
    planned = [one.batch for one in plan.predictions]
    note = f"Critical batch {epochs.critical:,.0f}; epochs were measured from {epochs.low:,.0f} to {epochs.high:,.0f}."
    edges = (PERFECT_SCALING * epochs.critical, NO_GAIN * epochs.critical)
    bounds = [f"perfect scaling up to {edges[0]:,.0f}", f"no gain from {edges[1]:,.0f} on"]
    return [
        panel.lines(
            "epochs", "Epochs to the target",
            [("fit", batches, [epochs.predict_epochs(batch) for batch in batches]),
             ("planned", planned, [one.epochs for one in plan.predictions])],
            x_label="batch", y_label="epochs", order=1, section="Learning", note=note, log_x=True, log_y=True,
        ),
        panel.lines(
            "steps", "Steps to the target", [("fit", batches, steps), ("perfect scaling", batches, perfect)],
            x_label="batch", y_label="steps", order=2, section="Learning",
            note=f"Regimes: {bounds[0]}, then diminishing returns, {bounds[1]}.", log_x=True, log_y=True,
        ),
    ]  # fmt: skip


def _build_sensitivity_panels(plan: JobPlan) -> list[Panel]:
    """Builds the tables of sensitivities and strategies."""
    # Inputs that move the time by less than 0.1 % would only lengthen the table.
    moved = [one for one in plan.sensitivities if one.magnitude >= 0.001]
    panels = []
    columns: Sequence[str] = ("input", "with 20 % less of it", "with 20 % more")
    if moved:
        rows = [(one.name, f"{one.less - 1:+.1%}", f"{one.more - 1:+.1%}") for one in moved]
        title = f"Sensitivity of the time at {pluralise(plan.paying_nodes, 'node')}"
        panels.append(panel.table("moved", title, columns, rows, order=1, section="Uncertainty"))
    columns, *ways = job_plan_text.tabulate_strategies(plan)
    menu = [(*cells, one.note) for cells, one in zip(ways, plan.strategies, strict=True)]
    title = f"Strategies at {pluralise(plan.paying_nodes, 'node')}"
    note = "sent: by a device in a step; recipe: keys that choose it."
    table = panel.table("choices", title, (*columns, "note"), menu, order=2, section="Uncertainty", note=note)
    return [*panels, table]


def _build_growth_panels(plan: JobPlan) -> list[Panel]:
    """Builds the curve of the error by samples and its table; none without a law."""
    law = plan.growth
    if law is None:
        return []
    high = max(one.samples for one in law.sizes)
    low = law.error.low
    samples = [low * (high / low) ** (at / (POINTS - 1)) for at in range(POINTS)]
    bands = [law.error.predict_band(one) for one in samples]
    # Two points give no band.
    known = all(top < float("inf") for _, top in bands)
    note = f"Measured up to {law.error.high:,.3g}; beyond it the law may end."
    cells = growth_text.tabulate_growth(law)
    return [
        panel.lines(
            "growth", "Error by samples", [("law", samples, [law.error(one) for one in samples])],
            x_label="samples", y_label="error", log_x=True, log_y=True, order=1, section="More data", note=note,
            bands=[(0, [bottom for bottom, _ in bands], [top for _, top in bands])] if known else (),
        ),
        panel.table("grown", "Predictions", cells[0], cells[1:], order=2, section="More data"),
    ]  # fmt: skip
