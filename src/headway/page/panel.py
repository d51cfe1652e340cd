"""Panel: the data of one picture of a report, as JSON. Its producer writes it, the page draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, final

from headway.core.errors import HeadwayError
from headway.core.outside import parse_object

PanelKind = Literal["cards", "lines", "bars", "matrix", "surface", "grid", "images", "table", "text"]


@final
@dataclass(frozen=True, kw_only=True)
class Panel:
    """One picture. `data` by kind (every number plain, every text unescaped; None is a gap):

    - `cards`: {"cards": [{"label": str, "value": str, "note": str}]}
    - `lines`: {"x_label": str, "y_label": str, "y_range": [lo, hi] | None, "log_x": bool, "log_y": bool,
      "series": [{"name": str, "x": [number], "y": [number | None]}], "bands": [{"of": number of a series,
      "low": [number | None], "high": [number | None]}]} (bounds at the x of that series)
    - `bars`: {"x_label": str, "names": [str], "stacks": [{"name": str, "values": [number]}], "log_x": bool,
      "rules": [{"name": str, "at": number}]} (horizontal, stacked; `log_x`: of the parts of a bar all but one are 0;
      `rules`: lines across the bars)
    - `matrix`: {"x_label": str, "y_label": str, "names": [str], "values": [[number]]} (rows are y; square, none
      negative; the diagonal is where both agree)
    - `surface`: {"x_label": str, "y_label": str, "z_label": str, "x": [number], "y": [number], "z": [[number | None]],
      "log_z": bool, "marks": [{"name": str, "x": number, "y": number}], "path": bool} (rows are y; `path`: the marks
      are joined by a line)
    - `grid`: {"x_label": str, "y_label": str, "z_label": str, "x": [number], "names": [str], "log": bool,
      "values": [[number | None]]} (a row for each name, a value for each x; `log`: shades by powers of ten)
    - `images`: {"images": [{"src": data URI (base64), "caption": str, "note": str}], "whole": bool} (side by side and
      small; `whole`: as wide as they are or as there is room)
    - `table`: {"columns": [str], "rows": [[str]]}
    - `text`: {"text": str} (monospaced, as it is)
    """

    name: str
    """File name of the panel without ending; also its anchor on the page."""
    title: str
    kind: PanelKind
    data: dict[str, Any]
    order: int = 100
    """Panels are drawn in ascending order, then by name."""
    note: str = ""
    """A sentence under the title: what one sees, and what a number leaves out."""
    width: Literal["full", "half"] = "half"
    section: str = field(default="Run")
    """The heading it stands under."""

    def to_json(self) -> str:
        """The panel as one JSON text. What is not Unicode (a file name of another encoding) becomes `?`.

        Raises HeadwayError where `data` holds what JSON cannot: NaN, infinity, an object.
        """
        members = {member.name: getattr(self, member.name) for member in fields(self)}
        try:
            text = json.dumps(members, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise HeadwayError(
                f"panel {self.name!r} holds what JSON cannot: {error}",
                fix="Write plain numbers and texts, and None for a gap.",
            ) from error
        return text.encode("utf-8", errors="replace").decode("utf-8")

    @staticmethod
    def from_json(text: str) -> Panel:
        """The panel of a JSON text; HeadwayError where the text is none."""
        try:
            return Panel(**parse_object(text))
        except (TypeError, ValueError) as error:
            raise HeadwayError(f"this text is no panel: {error}") from error


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
    """A `lines` panel from (name, x, y) triples, and (number of a triple, low, high) of what lies around its line."""
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
    """The `y_range` of a quantity that is never below 0, where it is constant: left to itself, an axis around one value
    reaches below 0. None where the values have a range of their own."""
    found = {value for value in values if value is not None}
    most = max(found, default=0.0)
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
    """A `bars` panel: one horizontal bar per name, made of (stack name, one value per bar) pairs, and (name, where) of
    the lines across them."""
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
    """A `matrix` panel; rows are y (true), columns are x (predicted)."""
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
    x_label: str,
    y_label: str,
    z_label: str,
    marks: Sequence[tuple[str, float, float]] = (),
    path: bool = False,
    log_z: bool = False,
    **panel: Any,
) -> Panel:
    """A `surface` panel, full width: heights z over x and y, as lines of equal height and in three dimensions."""
    data = {
        "x_label": x_label,
        "y_label": y_label,
        "z_label": z_label,
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
    """A `grid` panel, a heat map, from (name, one value per x) pairs from top to bottom."""
    labels = {"x_label": x_label, "y_label": y_label, "z_label": z_label}
    names, values = [label for label, _ in rows], [list(row) for _, row in rows]
    data = {**labels, "x": list(x), "names": names, "values": values, "log": log}
    return Panel(name=name, title=title, kind="grid", data=data, **panel)


def cards(name: str, title: str, values: Sequence[tuple[str, str, str]], **panel: Any) -> Panel:
    """A `cards` panel, full width, from (label, value, note) triples."""
    data = {"cards": [{"label": label, "value": value, "note": note} for label, value, note in values]}
    return Panel(name=name, title=title, kind="cards", data=data, **{"width": "full", **panel})


def images(
    name: str, title: str, pictures: Sequence[tuple[str, str, str]], *, whole: bool = False, **panel: Any
) -> Panel:
    """An `images` panel from (data URI, caption, note) triples."""
    found = [{"src": src, "caption": caption, "note": note} for src, caption, note in pictures]
    data = {"images": found, "whole": whole}
    return Panel(name=name, title=title, kind="images", data=data, **panel)


def table(name: str, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], **panel: Any) -> Panel:
    """A `table` panel; every cell is a text, formatted by its producer."""
    data = {"columns": list(columns), "rows": [list(row) for row in rows]}
    return Panel(name=name, title=title, kind="table", data=data, **panel)


def text(name: str, title: str, content: str, **panel: Any) -> Panel:
    """A `text` panel: monospaced, as it is."""
    return Panel(name=name, title=title, kind="text", data={"text": content}, **panel)
