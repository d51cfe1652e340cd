"""Panel: the data of one chart, table or text as JSON. Its producer builds it, the page draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, final

from headway.core.errors import HeadwayError
from headway.core.untrusted_json import parse_object

PanelKind = Literal["cards", "lines", "bars", "matrix", "surface", "grid", "images", "table", "text"]


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """Data of one picture: a chart, cards, images, a table or a text.

    `data` holds the fields of the kind's model in `panel_data.py`, `LinesData` for `lines` and so on: plain numbers,
    unescaped texts, and None for a gap. The functions below build it.
    """

    # File name of the panel without extension; also its anchor on the page.
    name: str
    title: str
    kind: PanelKind
    data: dict[str, Any]
    # Panels are sorted by this number, then by name.
    order: int = 100
    # One sentence under the title: how to read the picture, and the limits of its numbers.
    note: str = ""
    width: Literal["full", "half"] = "half"
    # Heading above the panel.
    section: str = field(default="Run")

    def to_json(self) -> str:
        """Returns the panel as JSON text. Characters outside Unicode (a file name in another encoding) become `?`.

        Raises HeadwayError if `data` holds NaN, infinity or an object.
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
        """Reads a panel from JSON text. Raises HeadwayError if the text is not one."""
        try:
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
    **panel: Any,
) -> Panel:
    """Builds a `lines` panel.

    Args:
        series: (name, x, y) of each line. bands: (index of a line, low, high) of a shaded range around it.
    """
    # The index of a band's line is stored as `of`; its bounds belong to the x of that line.
    data = {
        "x_label": x_label,
        "y_label": y_label,
        "y_range": None if y_range is None else list(y_range),
        "log_x": log_x,
        "log_y": log_y,
        "series": [{"name": label, "x": list(x), "y": list(y)} for label, x, y in series],
        "bands": [{"of": number, "low": list(low), "high": list(high)} for number, low, high in bands],
    }
    return Panel(name=name, title=title, kind="lines", data=data, **panel)


def choose_y_range(values: Sequence[float | None]) -> tuple[float, float] | None:
    """Chooses the `y_range` of a quantity that is never negative. None: its values have a range of their own."""
    # Around a constant, plotly's automatic axis would reach below 0.
    found = {value for value in values if value is not None}
    most = max(found, default=0.0)
    # A tenth of room above the constant, so that its line does not lie on the frame.
    return (0.0, 1.1 * most) if len(found) == 1 and most > 0 else None


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
        stacks: (name, one value per bar) of each part. rules: (name, position) of lines across the bars.
    """
    data = {
        "x_label": x_label,
        "names": list(names),
        "stacks": [{"name": label, "values": list(values)} for label, values in stacks],
        "log_x": log_x,
        "rules": [{"name": label, "at": at} for label, at in rules],
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
        z: heights, a row per y. axis_labels: of x, y and z. marks: (name, x, y) of named points; `path` joins them by a
            line.
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
    **panel: Any,
) -> Panel:
    """Builds a `grid` panel, a heat map.

    Args:
        rows: (name, one value per x), from top to bottom.
    """
    labels = {"x_label": x_label, "y_label": y_label, "z_label": z_label}
    names, values = [label for label, _ in rows], [list(row) for _, row in rows]
    data = {**labels, "x": list(x), "names": names, "values": values, "log": log}
    return Panel(name=name, title=title, kind="grid", data=data, **panel)


def cards(name: str, title: str, values: Sequence[tuple[str, str, str]], **panel: Any) -> Panel:
    """Builds a `cards` panel, full width, from (label, value, note) triples."""
    data = {"cards": [{"label": label, "value": value, "note": note} for label, value, note in values]}
    return Panel(name=name, title=title, kind="cards", data=data, **{"width": "full", **panel})


def images(
    name: str, title: str, pictures: Sequence[tuple[str, str, str]], *, whole: bool = False, **panel: Any
) -> Panel:
    """Builds an `images` panel from (data URI, caption, note) triples."""
    found = [{"src": src, "caption": caption, "note": note} for src, caption, note in pictures]
    data = {"images": found, "whole": whole}
    return Panel(name=name, title=title, kind="images", data=data, **panel)


def table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **panel: Any) -> Panel:
    """Builds a `table` panel. Its producer formats every cell."""
    data = {"columns": list(columns), "rows": [list(row) for row in rows]}
    return Panel(name=name, title=title, kind="table", data=data, **panel)


def text(name: str, title: str, content: str, **panel: Any) -> Panel:
    """Builds a `text` panel: monospaced, unchanged."""
    return Panel(name=name, title=title, kind="text", data={"text": content}, **panel)
