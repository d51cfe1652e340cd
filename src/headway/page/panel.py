"""Panel: the data of one chart, table or text as JSON. Its producer builds it, the page draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, final

from headway.core.errors import HeadwayError
from headway.core.untrusted_json import parse_object

PanelKind = Literal[
    "cards", "lines", "points", "bars", "matrix", "surface", "grid", "parallel", "paths", "images", "table", "text"
]
Scale = Literal["linear", "log", "category"]


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """Data of one picture: a chart, cards, images, a table or a text.

    `data` holds the fields of the kind's model in `panel_data.py`, `LinesData` for `lines` and so on: plain numbers,
    unescaped texts, and None for a gap. The functions below build it; their `**panel` are the other fields.

    Attributes:
        name: File name of the panel without extension; also its anchor on the page.
        title: Heading of the picture.
        kind: Kind of picture.
        data: Numbers and texts of the picture.
        order: Panels are sorted by this number, then by name.
        note: One sentence under the title: how to read the picture, and the limits of its numbers.
        width: Width on the page.
        section: Heading above the panel.
    """

    name: str
    title: str
    kind: PanelKind
    data: dict[str, Any]
    order: int = 100
    note: str = ""
    width: Literal["full", "half"] = "half"
    section: str = field(default="Run")

    def to_json(self) -> str:
        """Returns the panel as JSON text. Characters outside Unicode (a file name in another encoding) become `?`.

        Raises:
            HeadwayError: `data` holds NaN, infinity or an object.
        """
        members = {member.name: getattr(self, member.name) for member in fields(self)}
        try:
            # NaN is not JSON: a browser would refuse the whole page because of one bad number.
            text = json.dumps(members, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HeadwayError(
                f"panel {self.name!r} holds a value that JSON cannot: {error}",
                fix="Write plain numbers and texts, and None for a gap.",
            ) from error
        # A file name in another encoding holds surrogates, which UTF-8 cannot store.
        return text.encode("utf-8", errors="replace").decode("utf-8")

    @staticmethod
    def from_json(text: str) -> Panel:
        """Returns the panel that JSON text describes. Raises HeadwayError if the text is not one."""
        try:
            # An unknown key, or a missing one, is a TypeError.
            return Panel(**parse_object(text))
        except (TypeError, ValueError) as error:
            raise HeadwayError(f"this text is not a panel: {error}") from error


def lines(
    name: str,
    title: str,
    series: Sequence[tuple[str, Sequence[float], Sequence[float | None]]],
    *,
    x_label: str,
    y_label: str,
    y_range: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
    bands: Sequence[tuple[int, Sequence[float | None], Sequence[float | None]]] = (),
    rules: Sequence[tuple[str, float]] = (),
    **panel: Any,
) -> Panel:
    """Builds a `lines` panel.

    Args:
        series: (name, x, y) of each line.
        bands: (index of a line, low, high) of a shaded range around it.
        rules: (name, y) of horizontal lines across the chart.
    """
    # The index of a band's line is stored as `of`; its bounds belong to the x of that line.
    data: dict[str, Any] = {
        "x_label": x_label,
        "y_label": y_label,
        "y_range": None if y_range is None else list(y_range),
        "log_x": log_x,
        "log_y": log_y,
        "series": [{"name": label, "x": list(x), "y": list(y)} for label, x, y in series],
        "bands": [{"of": number, "low": list(low), "high": list(high)} for number, low, high in bands],
    }
    if rules:
        data["rules"] = [{"name": rule_name, "at": position} for rule_name, position in rules]
    return Panel(name=name, title=title, kind="lines", data=data, **panel)


def points(
    name: str,
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[str, float, float]]]],
    *,
    x_label: str,
    y_label: str,
    log_x: bool = False,
    **panel: Any,
) -> Panel:
    """Builds a `points` panel, a scatter plot.

    Args:
        series: (name, points) of each colour; a point is (its name, x, y).
    """
    data = {
        "x_label": x_label,
        "y_label": y_label,
        "log_x": log_x,
        "series": [
            {"name": label, "points": [{"name": point_name, "x": x, "y": y} for point_name, x, y in points_here]}
            for label, points_here in series
        ],
    }
    return Panel(name=name, title=title, kind="points", data=data, **panel)


def choose_y_range(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Returns the `y_range` of a quantity that is never negative: (0, 1.1 * c) for a constant c > 0, else None."""
    # Around a constant, plotly's automatic axis would reach below 0.
    known_values = {value for value in values if value is not None}
    largest = max(known_values, default=0.0)
    # A tenth more than the constant, so that its line does not lie on the frame.
    return (0.0, 1.1 * largest) if len(known_values) == 1 and largest > 0 else None


def bars(
    name: str,
    title: str,
    names: Sequence[str],
    stacks: Sequence[tuple[str, Sequence[float]]],
    *,
    x_label: str,
    log_x: bool = False,
    rules: Sequence[tuple[str, float]] = (),
    **panel: Any,
) -> Panel:
    """Builds a `bars` panel, one horizontal bar per name.

    Args:
        stacks: (name, one value per bar) of each part.
        rules: (name, position) of lines across the bars.
    """
    data = {
        "x_label": x_label,
        "names": list(names),
        "stacks": [{"name": part_name, "values": list(values)} for part_name, values in stacks],
        "log_x": log_x,
        "rules": [{"name": rule_name, "at": position} for rule_name, position in rules],
    }
    return Panel(name=name, title=title, kind="bars", data=data, **panel)


def matrix(
    name: str,
    title: str,
    names: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    x_label: str = "predicted",
    y_label: str = "true",
    **panel: Any,
) -> Panel:
    """Builds a `matrix` panel: rows are y (true), columns are x (predicted)."""
    # Lists throughout: a producer may pass numpy rows or tuples.
    rows = [list(row) for row in values]
    data = {"x_label": x_label, "y_label": y_label, "names": list(names), "values": rows}
    return Panel(name=name, title=title, kind="matrix", data=data, **panel)


def surface(
    name: str,
    title: str,
    x: Sequence[float],
    y: Sequence[float],
    z: Sequence[Sequence[float | None]],
    *,
    axis_labels: tuple[str, str, str],
    marks: Sequence[tuple[str, float, float]] = (),
    path: bool = False,
    log_z: bool = False,
    **panel: Any,
) -> Panel:
    """Builds a `surface` panel, full width: contour lines and, with WebGL, a view in three dimensions.

    Args:
        z: heights, a row per y.
        axis_labels: labels of x, y and z.
        marks: (name, x, y) of named points.
        path: join the marks by a line.
        log_z: colour by powers of ten.
    """
    data = {
        **dict(zip(("x_label", "y_label", "z_label"), axis_labels, strict=True)),
        "x": list(x),
        "y": list(y),
        "z": [list(row) for row in z],
        "log_z": log_z,
        "marks": [{"name": label, "x": across, "y": up} for label, across, up in marks],
        "path": path,
    }
    # The caller's width has priority.
    return Panel(name=name, title=title, kind="surface", data=data, **{"width": "full", **panel})


def grid(
    name: str,
    title: str,
    x: Sequence[float],
    rows: Sequence[tuple[str, Sequence[float | None]]],
    *,
    x_label: str,
    y_label: str,
    z_label: str,
    log: bool = False,
    columns: Sequence[str] = (),
    texts: Sequence[Sequence[str]] = (),
    **panel: Any,
) -> Panel:
    """Builds a `grid` panel, a heat map.

    Args:
        rows: (name, one value per x), from top to bottom.
        log: colour by powers of ten.
        columns: names of the columns, which are then equally wide; x only counts them.
        texts: what each cell shows, in rows of one text per x; a line break begins a new line.
    """
    labels = {"x_label": x_label, "y_label": y_label, "z_label": z_label}
    names = [label for label, _ in rows]
    values = [list(row) for _, row in rows]
    data: dict[str, Any] = {**labels, "x": list(x), "names": names, "values": values, "log": log}
    if columns:
        data["columns"] = list(columns)
    if texts:
        data["texts"] = [list(row) for row in texts]
    return Panel(name=name, title=title, kind="grid", data=data, **panel)


def axis(
    label: str,
    values: Sequence[Any],
    *,
    scale: Scale = "linear",
    categories: Sequence[str] = (),
    ticks: Sequence[tuple[float, str]] = (),
    missing: str = "none",
    missing_is_high: bool = False,
) -> dict[str, Any]:
    """Builds an axis of a `parallel` or `paths` panel.

    Args:
        values: a number per line, in the order of their names, or None if the line lacks it; for `paths` a list of
            numbers per line. On an axis of categories, a number is a place in `categories`.
        ticks: (number, label) of the only ticks, instead of round numbers.
        missing: label of the place of lines that lack a value: below the numbers, or above if `missing_is_high`.
    """
    rows = [list(value) if isinstance(value, list | tuple) else value for value in values]
    written = [{"at": at, "label": text} for at, text in ticks]
    names = list(categories)
    return {
        "label": label,
        "scale": scale,
        "values": rows,
        "categories": names,
        "ticks": written,
        "missing": missing,
        "missing_is_high": missing_is_high,
    }


def parallel(
    name: str,
    title: str,
    names: Sequence[str],
    ranks: Sequence[int | None],
    axes: Sequence[dict[str, Any]],
    **panel: Any,
) -> Panel:
    """Builds a `parallel` panel, full width: parallel coordinates, in which the mouse selects ranges of axes.

    Args:
        names: one per line.
        ranks: decide the colours: 1 is the best. None: the line has no rank, and is drawn in a colour of its own.
        axes: from left to right, each from `axis`.
    """
    data = {"names": list(names), "ranks": list(ranks), "axes": list(axes)}
    return Panel(name=name, title=title, kind="parallel", data=data, **{"width": "full", **panel})


def paths(
    name: str,
    title: str,
    names: Sequence[str],
    ranks: Sequence[int | None],
    x: Sequence[dict[str, Any]],
    y: dict[str, Any],
    **panel: Any,
) -> Panel:
    """Builds a `paths` panel, full width: many lines, or points, coloured by rank, over one or several x.

    Args:
        names: one per line.
        ranks: as for `parallel`.
        x: an axis for each picture; each has as many numbers per line as y.
        y: the axis that they share.
    """
    data = {"names": list(names), "ranks": list(ranks), "x": list(x), "y": y}
    return Panel(name=name, title=title, kind="paths", data=data, **{"width": "full", **panel})


def cards(name: str, title: str, values: Sequence[tuple[str, str, str]], **panel: Any) -> Panel:
    """Builds a `cards` panel, full width, from (label, value, note) triples."""
    data = {"cards": [{"label": label, "value": value, "note": note} for label, value, note in values]}
    return Panel(name=name, title=title, kind="cards", data=data, **{"width": "full", **panel})


def images(
    name: str, title: str, pictures: Sequence[tuple[str, str, str]], *, whole: bool = False, **panel: Any
) -> Panel:
    """Builds an `images` panel from (data URI, caption, note) triples.

    Args:
        whole: show the images one below the other, at their own width.
    """
    image_data = [{"src": src, "caption": caption, "note": note} for src, caption, note in pictures]
    data = {"images": image_data, "whole": whole}
    return Panel(name=name, title=title, kind="images", data=data, **panel)


def table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **panel: Any) -> Panel:
    """Builds a `table` panel. Its producer formats every cell."""
    data = {"columns": list(columns), "rows": [list(row) for row in rows]}
    return Panel(name=name, title=title, kind="table", data=data, **panel)


def text(name: str, title: str, content: str, **panel: Any) -> Panel:
    """Builds a `text` panel: monospaced, unchanged."""
    return Panel(name=name, title=title, kind="text", data={"text": content}, **panel)
