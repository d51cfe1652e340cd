"""Page that compares two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.text_format import format_duration
from headway.page import panel
from headway.page import renderer as page
from headway.page.panel import Panel
from headway.report.comparison import Comparison, compute_ratio
from headway.report.run_report import format_metric
from headway.report.step_anatomy import format_ms

SECTIONS = ("Result", "Time", "Training", "Differences")
# Labels of the numbers that are not metrics.
NUMBER_LABELS = {
    "images_s": "images/s",
    "seconds": "time",
    "wait_share": "waiting for data",
    "seconds_to_reach": "time to goal",
}


def write_page(comparison: Comparison, out: Path | None = None) -> Path:
    """Writes the page as one self-contained file; default: against-NAME.html in the first run's folder."""
    name = comparison.against.run.folder.resolve().name
    path = out or comparison.run.run.folder / f"against-{name}.html"
    html = page.render(
        build_panels(comparison),
        title=f"{comparison.run.name} against {comparison.against.name}",
        subtitle=f"Headway runs, started {comparison.run.about['started']} and {comparison.against.about['started']}",
        sections=SECTIONS,
        footer=f"headway {comparison.run.about['versions']['headway']}",
    )
    write_atomically(path, html)
    return path


def build_panels(comparison: Comparison) -> list[Panel]:
    """Builds the panels of the page: result, time, curves and differences."""
    return [
        _build_cards(comparison),
        *_build_time_panels(comparison),
        *_build_curves(comparison),
        *_build_difference_tables(comparison),
    ]


def _build_cards(comparison: Comparison) -> Panel:
    cards = []
    for name, (mine, theirs) in comparison.list_numbers().items():
        times = compute_ratio(mine, theirs)
        ratio = "" if times is None else f": {times:.3g} x"
        label = NUMBER_LABELS.get(name, name.replace("_", " "))
        cards.append((label, _format_number(name, mine), f"against {_format_number(name, theirs)}{ratio}"))
    title = f"{comparison.run.name} against {comparison.against.name}"
    return panel.cards("result", title, cards, section="Result", order=100, note=comparison.describe())


def _format_number(name: str, value: float | None) -> str:
    if value is None:
        return "not reached" if name == "seconds_to_reach" else format_metric(name, value)
    if name in ("seconds", "seconds_to_reach"):
        return format_duration(value)
    if name == "wait_share":
        return f"{value:.1%}"
    return f"{value:,.0f}" if name == "images_s" else format_metric(name, value)


def _build_time_panels(comparison: Comparison) -> list[Panel]:
    stages = comparison.list_stages()
    # Totals of both runs, never 0, for the shares.
    totals = [max(sum(both[place] for both in stages.values()), 1e-12) for place in (0, 1)]
    rows = []
    for stage, (mine, theirs) in stages.items():
        times = compute_ratio(mine, theirs)
        shares = (f"{mine / totals[0]:.1%}", f"{theirs / totals[1]:.1%}")
        rows.append((stage, format_ms(mine), format_ms(theirs), "-" if times is None else f"{times:.2f}", *shares))
    names = [side.name for side in comparison.sides]
    note = "Host time by stage, over the whole run. On a GPU, forward, loss, backward and optimizer are kernel launch "
    note += "times."
    # Four digits: the times are not known any better, and the page stays small.
    stacks = [(stage, [float(f"{seconds * 1e3:.4g}") for seconds in both]) for stage, both in stages.items()]
    columns = ("stage", *names, "ratio", *(f"share, {name}" for name in names))
    wide: dict[str, Any] = {"section": "Time", "width": "full"}
    return [
        panel.bars("stages", "Time by stage", names, stacks, x_label=comparison.unit, order=300, note=note, **wide),
        panel.table("stage-table", f"Stages, {comparison.unit}", columns, rows, order=310, **wide),
    ]


def _build_curves(comparison: Comparison) -> list[Panel]:
    out = []
    metrics = [name for name in comparison.run.list_metrics() if name in comparison.against.list_metrics()]
    # Training curves exist in every run; metrics are drawn only if both runs have them.
    wanted = [("images_s", "Throughput", "images/s", "train"), ("loss", "Training loss", "loss", "train")]
    for name in metrics:
        words = name.replace("_", " ")
        wanted.append((name, f"{words.capitalize()} on the evaluation set", words, "evaluate"))
    for place, (name, title, label, kind) in enumerate(wanted):
        series = []
        for side in comparison.sides:
            records = side.train if kind == "train" else side.evaluated
            series.append((side.name, [one["epoch"] for one in records], [one.get(name) for one in records]))
        # With a constant rate, the automatic axis would go below 0.
        given: dict[str, Any] = {"section": "Training", "order": 200 + place}
        if name == "images_s":
            given["y_range"] = panel.choose_y_range([value for _, _, values in series for value in values])
        out.append(panel.lines(f"{kind}-{name}", title, series, x_label="epoch", y_label=label, **given))
    return out


def _build_difference_tables(comparison: Comparison) -> list[Panel]:
    """Builds a table of recipe differences and one of machine differences, if there are any."""
    out = []
    recipe, machine = comparison.list_recipe_differences(), comparison.list_machine_differences()
    kinds = ("recipe", "Recipe", "key", recipe), ("machine", "Machine, versions and data", "property", machine)
    for place, (name, title, first, rows) in enumerate(kinds):
        if rows:
            columns = (first, *(side.name for side in comparison.sides))
            cells = [(one.what, one.run, one.against) for one in rows]
            section = "Differences"
            out.append(panel.table(name, title, columns, cells, section=section, order=500 + place, width="full"))
    return out
