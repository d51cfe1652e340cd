"""Panels of sharpness beside accuracy: heat maps over two recipe keys, scatter plots, rank correlations."""

from __future__ import annotations

from typing import Any

from headway.core.recipe import format_value
from headway.page import panel
from headway.page.panel import Panel
from headway.report.landscape_grid import MEASURES, GridCell, RunGrid, RunScore, SharpnessComparison
from headway.report.run_report import format_metric

# Ratio of the largest to the smallest sharpness from which a logarithmic axis or colour is used.
LOG_RATIO = 20.0
# Columns up to which two heat maps stand side by side.
NARROW_COLUMNS = 5
# Values of a key up to which each has a colour of its own in the scatter plots.
MOST_COLOURS = 6

TITLES = {
    "keskar": "Keskar's sharpness",
    "eigenvalue": "the largest eigenvalue",
    "relative": "the largest eigenvalue by relative change",
}
NOTES = {
    "keskar": "Highest loss in a small box around the solution.",
    "eigenvalue": "Of the Hessian: the curvature in the steepest direction.",
    "relative": "The same in units of each filter's norm: it does not change if weights are rescaled.",
}


def build_comparison_panels(comparison: SharpnessComparison, order: int, **shared: Any) -> list[Panel]:
    """Builds the heat maps of the grid, a scatter plot for each measure, and the table of correlations.

    Args:
        order: order of the first panel; the others follow.
        shared: the section, and what else all panels have in common.
    """
    out = []
    if comparison.grid is not None:
        out += _build_grids(comparison, comparison.grid)
    out += [_build_scatter(comparison, measure) for measure in _list_measured(comparison)]
    if comparison.correlations:
        out.append(_build_correlations(comparison))
    # In the order of reading: where each setting lies, then whether the numbers go together.
    return [Panel(**{**vars(one), "order": order + place, **shared}) for place, one in enumerate(out)]


def describe_comparison(comparison: SharpnessComparison) -> list[str]:
    """Describes the grid and the correlations for the terminal, in lines."""
    out = []
    if (grid := comparison.grid) is not None:
        rows = [[f"{grid.keys[1]} \\ {grid.keys[0]}", *map(format_value, grid.columns)]]
        for value in grid.rows:
            cells = [grid.find(column, value) for column in grid.columns]
            rows.append([format_value(value), *(_describe_cell(comparison, cell, "; ") for cell in cells)])
        widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        out += ["", f"{_name_metric(comparison)}; Keskar's sharpness; largest eigenvalue:"]
        for row in rows:
            out.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if comparison.correlations:
        out += ["", f"Spearman's rank correlation with {_name_metric(comparison)}:"]
        out += [f"  {MEASURES[one.measure]}: {one.describe()}" for one in comparison.correlations]
    return out


def _list_measured(comparison: SharpnessComparison) -> list[str]:
    return [one.measure for one in comparison.correlations]


def _name_metric(comparison: SharpnessComparison) -> str:
    return f"{comparison.metric.replace('_', ' ')}, {comparison.which}"


def _build_grids(comparison: SharpnessComparison, grid: RunGrid) -> list[Panel]:
    """Builds the same cells twice, coloured by the metric and by Keskar's sharpness."""
    texts = [[_describe_cell(comparison, grid.find(column, row), "\n") for column in grid.columns] for row in grid.rows]
    metric = _name_metric(comparison)
    measured = _list_measured(comparison)
    note = f"{metric[0].upper()}{metric[1:]}"
    note += (
        "; Keskar's sharpness (K); largest eigenvalue of the Hessian (\N{GREEK SMALL LETTER LAMDA})."
        if measured
        else "."
    )
    most = max(len(cell.runs) for cell in grid.cells)
    note += f" Means over up to {most} runs." if most > 1 else ""
    width = "half" if len(grid.columns) <= NARROW_COLUMNS and measured else "full"

    def build(name: str, title: str, label: str, values: list[list[float | None]], *, log: bool) -> Panel:
        return panel.grid(
            f"landscape-grid-{name}",
            f"{title} by {grid.keys[0]} and {grid.keys[1]}",
            list(range(len(grid.columns))),
            [(format_value(row), here) for row, here in zip(grid.rows, values, strict=True)],
            x_label=grid.keys[0],
            y_label=grid.keys[1],
            z_label=label,
            log=log,
            columns=[format_value(value) for value in grid.columns],
            texts=texts,
            note=note,
            width=width,
        )

    found = [[grid.find(column, row) for column in grid.columns] for row in grid.rows]
    metrics = [[cell and cell.metric for cell in row] for row in found]
    out = [build("metric", comparison.metric.replace("_", " ").capitalize(), comparison.metric, metrics, log=False)]
    if measured:
        sharpness = [[cell and cell.sharpness["keskar"] for cell in row] for row in found]
        log = _spans_decades([value for row in sharpness for value in row if value is not None])
        out.append(build("sharpness", "Sharpness", MEASURES["keskar"], sharpness, log=log))
    return out


def _describe_cell(comparison: SharpnessComparison, cell: GridCell | None, separator: str) -> str:
    if cell is None:
        return ""
    parts = [_format_score(comparison, cell.metric)]
    if comparison.correlations:
        keskar, eigenvalue = cell.sharpness["keskar"], cell.sharpness["eigenvalue"]
        parts.append(f"K {_format_number(keskar)}{'%' * (keskar is not None)}")
        parts.append(f"\N{GREEK SMALL LETTER LAMDA} {_format_number(eigenvalue)}")
    return separator.join(parts)


def _format_score(comparison: SharpnessComparison, value: float | None) -> str:
    return "-" if value is None else format_metric(comparison.metric, value)


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e3 <= value < 1e6 else f"{value:.3g}"


def _build_scatter(comparison: SharpnessComparison, measure: str) -> Panel:
    (correlation,) = (one for one in comparison.correlations if one.measure == measure)
    series = []
    for label, scores in _group_scores(comparison):
        known = [(one.name, one.sharpness.get(measure), one.metric) for one in scores]
        points = [(name, x, y) for name, x, y in known if x is not None and y is not None]
        series.append((label, points))
    values = [x for _, points in series for _, x, _ in points]
    note = f"{NOTES[measure]} Spearman's rank correlation: {correlation.describe()}."
    return panel.points(
        f"landscape-scatter-{measure}",
        f"{comparison.metric.replace('_', ' ').capitalize()} against {TITLES[measure]}",
        series,
        x_label=MEASURES[measure],
        y_label=_name_metric(comparison),
        log_x=_spans_decades(values),
        note=note,
    )


def _group_scores(comparison: SharpnessComparison) -> list[tuple[str, list[RunScore]]]:
    """Groups runs by their value of the grid's first key, so that each has a colour; one group without a grid."""
    grid = comparison.grid
    if grid is None or len(grid.columns) > MOST_COLOURS:
        return [("runs", comparison.scores)]
    key = grid.keys[0]
    return [
        (
            f"{key} {format_value(value)}",
            [one for one in comparison.scores if format_value(one.recipe.get(key)) == format_value(value)],
        )
        for value in grid.columns
    ]


def _build_correlations(comparison: SharpnessComparison) -> Panel:
    rows = []
    for one in comparison.correlations:
        value = "-" if one.rank_correlation is None else f"{one.rank_correlation:+.2f}"
        rows.append([MEASURES[one.measure], value, str(one.runs)])
    note = f"Spearman's, with {_name_metric(comparison)}; with few runs, a large value may be chance."
    columns = ["measure", "rank correlation", "runs"]
    title = f"Does sharpness go with {comparison.metric.replace('_', ' ')}?"
    return panel.table("landscape-correlations", title, columns, rows, note=note)


def _spans_decades(values: list[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) > LOG_RATIO * min(values)
