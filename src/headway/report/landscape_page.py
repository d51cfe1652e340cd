"""Page of a loss landscape: panels for the report of one run, or a page for several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.recipe import format_value
from headway.core.run_folder import RunFolder
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.report.landscape import Landscape, LandscapeRun, LossLine, LossPlane
from headway.report.landscape_grid_page import build_comparison_panels, describe_comparison
from headway.training.evaluation_panels import write_panels

SECTION = "Loss landscape"
# Prefix of the panels' names.
PREFIX = "landscape-"
# Ratio of the highest to the lowest loss from which a logarithmic axis is used.
LOG_AXIS_RATIO = 50.0
# Runs up to which the title names each.
MOST_TITLE_NAMES = 6

STATISTICS_NOTES = {
    "kept": "batch norm statistics are those of the solution",
    "recomputed": "batch norm statistics are recomputed at every place",
    "none": "the network has no batch norm statistics",
}


def write_page(landscape: Landscape, out: Path | None = None) -> Path:
    """Writes the page and returns its path.

    The panels of a single run also go into its report, and replace those of an earlier landscape.

    Args:
        out: Path of the page; default: landscape.html in the run's folder, or here for several runs.
    """
    made = build_panels(landscape)
    if len(landscape.runs) == 1:
        run = RunFolder(Path(landscape.runs[0].folder))
        # An earlier landscape may have had more planes: none of its panels may stay.
        for old in run.panels.glob(f"{PREFIX}*.json"):
            old.unlink()
        write_panels(run, made)
        out = out or run.folder / "landscape.html"
    out = out or Path("landscape.html")
    count = len(landscape.runs)
    names = ", ".join(one.name for one in landscape.runs) if count <= MOST_TITLE_NAMES else f"{count} runs"
    html = renderer.render(
        made, title=f"{names}: loss landscape", subtitle=_describe_data(landscape), sections=(SECTION,)
    )
    write_atomically(out, html)
    return out


def _describe_data(landscape: Landscape) -> str:
    counts = landscape.runs[0].samples
    sizes = " and ".join(f"{count:,} {name} images" for name, count in counts.items())
    return f"Measured on {sizes} (seed {landscape.options.seed}); the loss does not include weight decay"


def format_numbers(landscape: Landscape) -> str:
    """Formats the numbers of the runs, and the barriers between them, for the terminal."""
    columns, rows = _list_rows(landscape)
    widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
    lines = []
    for row in (columns, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    lines += [f"{line.name}: {_describe_barrier(line)}" for line in landscape.lines if line.kind == "between"]
    if landscape.comparison is not None:
        lines += describe_comparison(landscape.comparison)
    return "\n".join(lines)


def _describe_barrier(line: LossLine) -> str:
    barriers = [f"{_format_number(value)} ({name})" for name, value in line.barrier.items()]
    return f"Distance {_format_number(line.distance)}; barrier {', '.join(barriers)}."


def build_panels(landscape: Landscape) -> list[Panel]:
    """Builds the tables of numbers, sharpness beside accuracy, then lines and planes by data set and metric."""
    around = [line for line in landscape.lines if line.kind == "around"]
    out = [_build_numbers_table(landscape), *_build_recipe_table(landscape)]
    if landscape.comparison is not None:
        out += build_comparison_panels(landscape.comparison, 602, section=SECTION)
    out += _build_lines_around(around)
    # Orders leave room for ten panels of each line and plane.
    for place, line in enumerate(line for line in landscape.lines if line.kind == "between"):
        out += _build_lines_between(line, 640 + 10 * place, place)
    for place, plane in enumerate(landscape.planes):
        out += _build_surfaces(plane, 700 + 10 * place, place)
    return out


def _list_rows(landscape: Landscape) -> tuple[list[str], list[list[str]]]:
    """Lists column titles and rows of the numbers at each solution."""
    sets = list(landscape.runs[0].numbers)
    metrics = list(next(iter(landscape.runs[0].numbers.values())))
    # Metrics outside and sets inside: the same number of both sets stands side by side.
    columns = ["run", *(f"{metric.replace('_', ' ')}, {name}" for metric in metrics for name in sets)]
    # A run without sharpness has dashes if another run has some.
    how = [one.sharpness for one in landscape.runs]
    if any(how):
        columns += ["largest eigenvalue", "by relative change", "Keskar's sharpness, %"]
    rows = []
    for one in landscape.runs:
        row = [
            one.name,
            *(_format_number(one.numbers.get(name, {}).get(metric)) for metric in metrics for name in sets),
        ]
        rows.append(row + (_format_sharpness(one) if any(how) else []))
    return columns, rows


def _build_numbers_table(landscape: Landscape) -> Panel:
    columns, rows = _list_rows(landscape)
    note = "Measured at the solution itself."
    if landscape.options.sharpness:
        note += (
            " Sharpness is that of the training loss. Largest eigenvalue: of the Hessian, by power iteration. Compare "
            "runs by the second one, by relative change in units of each filter's norm: the other two numbers change "
            "if weights are rescaled, even if the network computes the same. Keskar's sharpness: from the highest "
            f"loss found in a box of epsilon {landscape.options.epsilon:g}, so a lower bound."
        )
    table: dict[str, Any] = {"section": SECTION, "order": 600, "width": "full", "note": note}
    return panel.table(f"{PREFIX}numbers", "Solutions", columns, rows, **table)


def _format_sharpness(one: LandscapeRun) -> list[str]:
    sharpness = one.sharpness
    if sharpness is None:
        return ["-"] * 3
    values = [sharpness.eigenvalue and sharpness.eigenvalue.value, sharpness.relative and sharpness.relative.value]
    return [*map(_format_number, values), _format_number(sharpness.keskar and sharpness.keskar.percent)]


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _build_recipe_table(landscape: Landscape) -> list[Panel]:
    if len(landscape.runs) < 2:
        return []
    keys = list(landscape.runs[0].recipe)
    rows = [[one.name, *(format_value(one.recipe[key]) for key in keys)] for one in landscape.runs]
    note = "Batch, learning rate and weight decay, and all other differences between the recipes."
    table: dict[str, Any] = {"section": SECTION, "order": 601, "width": "full", "note": note}
    return [panel.table(f"{PREFIX}recipes", "Differences between the runs", ["run", *keys], rows, **table)]


def _build_lines_around(lines: list[LossLine]) -> list[Panel]:
    """Builds a panel per metric; for several runs a panel per metric and data set."""
    if not lines:
        return []
    how = STATISTICS_NOTES[lines[0].statistics]
    note = f"Along one random direction with the filter norms of the network (Li et al. 2018); {how}."
    out, order = [], 610
    # One run: both data sets in a chart. Several runs: a chart for each data set, with a line per run.
    for metric in _list_metrics(lines[0]):
        for name in lines[0].curves if len(lines) > 1 else [""]:
            if len(lines) > 1:
                series = [(one.name, one.x, one.curves[name][metric]) for one in lines if name in one.curves]
            else:
                series = [(which, lines[0].x, curve[metric]) for which, curve in lines[0].curves.items()]
            title = f"{metric.replace('_', ' ').capitalize()} around {'each solution' if name else 'the solution'}"
            file = f"around-{metric}{'-' * bool(name)}{name}"
            out.append(_build_chart(file, title, series, metric, name, order=order, note=note))
            order += 1
    return out


def _build_lines_between(line: LossLine, order: int, number: int) -> list[Panel]:
    how = STATISTICS_NOTES[line.statistics]
    note = f"Straight line from one solution (0) to the other (1), and beyond; {how}. {_describe_barrier(line)}"
    out = []
    for place, metric in enumerate(_list_metrics(line)):
        series = [(which, line.x, curve[metric]) for which, curve in line.curves.items()]
        title = f"{metric.replace('_', ' ').capitalize()}, {line.name}"
        given: dict[str, Any] = {"order": order + place, "note": note, "x_label": "position on the line"}
        out.append(_build_chart(f"between-{number}-{metric}", title, series, metric, "", **given))
    return out


def _build_chart(
    name: str,
    title: str,
    series: list[tuple[str, list[float], list[float | None]]],
    metric: str,
    which: str,
    *,
    order: int,
    note: str,
    x_label: str = "distance along the direction, in filter norms",
) -> Panel:
    # Only the loss spans powers of ten; accuracies do not.
    values = [value for _, _, curve in series for value in curve if value is not None]
    return panel.lines(
        PREFIX + name,
        f"{title}, {which} set" if which else title,
        series,
        x_label=x_label,
        y_label=metric.replace("_", " "),
        log_y=metric == "loss" and _is_steep(values),
        section=SECTION,
        order=order,
        note=note,
    )


def _build_surfaces(plane: LossPlane, order: int, number: int) -> list[Panel]:
    titles = {
        "around": f"Loss around {plane.name}",
        "between": f"Loss in the plane through {plane.name}",
        "path": f"Loss along the training path of {plane.name}",
    }
    notes = {
        "around": "Two random directions with the filter norms of the network (Li et al. 2018)",
        "between": "The plane through the three solutions, true to scale",
        "path": "The checkpoints in the plane through the last one that is nearest to them; its axes show "
        f"{plane.shares[0]:.0%} and {plane.shares[1]:.0%} of their squared distances from it",
    }
    # A path is seen along its principal axes, the other planes along chosen directions.
    labels = ("first direction", "second direction") if plane.kind != "path" else ("first axis", "second axis")
    out = []
    for place, (which, surface) in enumerate(plane.surfaces.items()):
        values = [value for row in surface["loss"] for value in row if value is not None]
        out.append(
            panel.surface(
                f"{PREFIX}plane-{number}-{which}",
                f"{titles[plane.kind]}, {which} set",
                plane.x,
                plane.y,
                surface["loss"],
                axis_labels=(*labels, "loss"),
                marks=plane.marks,
                path=plane.kind == "path",
                log_z=_is_steep(values),
                section=SECTION,
                order=order + place,
                note=f"{notes[plane.kind]}; {STATISTICS_NOTES[plane.statistics]}.",
            )
        )
    return out


def _is_steep(values: list[float]) -> bool:
    # A logarithm needs losses above 0.
    return bool(values) and min(values) > 0 and max(values) > LOG_AXIS_RATIO * min(values)


def _list_metrics(line: LossLine) -> list[str]:
    return list(next(iter(line.curves.values())))
