"""Panels are checked by kind before they are drawn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.page import panel
from headway.page.panel import Panel
from headway.page.panel_data import MAX_LISTED_CELLS, check_panel

LINES = {"x_label": "x", "y_label": "y", "series": [{"name": "a", "x": [1], "y": [2]}]}
BARS = {"x_label": "s", "names": ["a", "b"], "stacks": [{"name": "p", "values": [1, 2]}]}
MATRIX = {"x_label": "x", "y_label": "y", "names": ["a", "b"], "values": [[1, 2], [3, 4]]}
SURFACE = {"x_label": "x", "y_label": "y", "z_label": "z", "x": [0, 1], "y": [0, 1], "z": [[1, None], [2, 3]]}
GRID = {"x_label": "x", "y_label": "y", "z_label": "z", "x": [1, 2], "names": ["a", "b"], "values": [[1, None], [3, 4]]}
AXIS = {"label": "a", "scale": "linear", "values": [1, None]}
PARALLEL = {"names": ["p", "q"], "ranks": [1, None], "axes": [AXIS]}
PATHS = {
    "names": ["p", "q"],
    "ranks": [1, None],
    "x": [AXIS | {"values": [[1], [2, 3]]}],
    "y": AXIS | {"values": [[1], [2, None]]},
}
POINTS = {"x_label": "x", "y_label": "y", "series": [{"name": "a", "points": [{"name": "p", "x": 0, "y": 2}]}]}
BAD: list[tuple[str, Any, str]] = [
    ("lines", {key: LINES[key] for key in ("x_label", "series")}, "y_label is missing"),
    ("lines", LINES | {"colour": "red"}, "there is no key 'data.colour'"),
    ("lines", LINES | {"series": [{"name": "a", "x": [1, 2], "y": [1]}]}, "2 x and 1 y"),
    ("lines", LINES | {"series": [{"name": "a", "x": [None], "y": [1]}]}, "series.0.x.0"),
    ("lines", LINES | {"series": [{"name": "a", "x": [1], "y": ["0.5"]}]}, "series.0.y.0"),
    ("lines", LINES | {"bands": [{"of": 1, "low": [1], "high": [2]}]}, "a band belongs to series 1, and there are 1"),
    ("lines", LINES | {"bands": [{"of": 0, "low": [1], "high": []}]}, "has 1 low and 0 high bounds for 1 points"),
    ("grid", GRID | {"values": [[1, 2]]}, "2 names and 2 x need as many rows"),
    ("grid", GRID | {"values": [[1, 2], [3]]}, "2 names and 2 x need as many rows"),
    ("grid", GRID | {"x": [2, 2]}, "x must ascend"),
    ("grid", GRID | {"columns": ["a"]}, "there are 1 columns for 2 x"),
    ("grid", GRID | {"texts": [["a", "b"], ["c"]]}, "2 names and 2 x need as many rows of as many texts"),
    ("grid", GRID | {"texts": [["a", "b"]]}, "as many texts"),
    ("points", POINTS | {"log_x": True}, "no points at 0 or below"),
    ("points", POINTS | {"series": [{"name": "a", "points": [{"name": "p", "x": 1}]}]}, "series.0.points.0.y"),
    ("lines", LINES | {"y_range": [0, 1], "log_y": True}, "above 0"),
    ("lines", LINES | {"y_range": [1, 0]}, "must ascend"),
    ("lines", LINES | {"rules": [{"name": "r", "at": 0}], "log_y": True}, "no rules at 0 or below"),
    ("bars", {"x_label": "s", "names": ["a"], "stacks": [{"name": "p", "values": [1, 2]}]}, "2 values for 1 names"),
    ("bars", BARS | {"stacks": [{"name": "p", "values": [1, -2]}], "log_x": True}, "no bars below 0"),
    ("bars", BARS | {"rules": [{"name": "r", "at": 0}], "log_x": True}, "no rules at 0 or below"),
    ("bars", BARS | {"stacks": [{"name": p, "values": [0, 2]} for p in "pq"], "log_x": True}, "bar 'b' has several"),
    ("bars", BARS | {"rules": [{"name": "r"}]}, "rules.0.at is missing"),
    ("matrix", MATRIX | {"values": [[1, 2]]}, "2 rows of 2 values"),
    ("matrix", MATRIX | {"values": [[1, 2], [3]]}, "2 rows of 2 values"),
    ("matrix", MATRIX | {"values": [[1, 2], [3, -4]]}, "must be at least 0"),
    ("surface", SURFACE | {"z": [[1, 2]]}, "2 y and 2 x need 2 rows of 2 heights"),
    ("surface", SURFACE | {"z": [[1, 2], [3]]}, "2 rows of 2 heights"),
    ("surface", SURFACE | {"y": [1, 1]}, "x and y must ascend"),
    ("surface", SURFACE | {"marks": [{"name": "a", "x": 0}]}, "marks.0.y"),
    ("parallel", PARALLEL | {"ranks": [1]}, "2 names need as many ranks, and there are 1"),
    ("parallel", PARALLEL | {"ranks": [0, 1]}, "ranks.0"),
    ("parallel", PARALLEL | {"axes": [AXIS | {"values": [1]}]}, "axis 'a' has 1 values for 2 names"),
    ("parallel", PARALLEL | {"axes": [AXIS | {"scale": "log", "values": [0, 1]}]}, "has no place for 0"),
    ("parallel", PARALLEL | {"axes": [AXIS | {"scale": "category"}]}, "axis 'a' has 0 categories, and none is 1"),
    ("parallel", PARALLEL | {"axes": [AXIS | {"scale": "category", "categories": ["x"], "values": [0, 0.5]}]}, "0.5"),
    ("parallel", PARALLEL | {"axes": [AXIS | {"scale": "power"}]}, "axes.0.scale"),
    ("paths", PATHS | {"y": AXIS | {"values": [[1]]}}, "y has 1 rows for 2 names"),
    ("paths", PATHS | {"x": [AXIS | {"values": [[1], [2]]}]}, "axis 'a' needs as many numbers in each row as y"),
    ("images", {"images": [{"src": "https://example.org/a.png", "caption": "c"}]}, "data:image"),
    ("images", {"images": [{"src": "data:text/html;base64,AAAA", "caption": "c"}]}, "data:image"),
    ("images", {"images": [{"src": 'data:image/png;base64,A" onload="x', "caption": "c"}]}, "data:image"),
    ("table", {"columns": ["a", "b"], "rows": [["1"]]}, "1 cells for 2 columns"),
    ("table", {"columns": ["a"], "rows": [[1]]}, "rows.0.0"),
    ("text", {"texts": "a"}, "text is missing"),
    ("cards", [], "data must be a mapping"),
]


@pytest.mark.parametrize(("kind", "data", "message"), BAD)
def test_bad_data_is_refused_with_the_panel_and_the_place(kind: Any, data: Any, message: str) -> None:
    with pytest.raises(HeadwayError, match=f"panel 'mine' \\({kind}\\)") as caught:
        check_panel(Panel(name="mine", title="T", kind=kind, data=data))
    assert message in str(caught.value)


def test_an_unknown_kind_names_the_nearest() -> None:
    unknown: Any = "line"
    with pytest.raises(HeadwayError, match=r"panel 'mine' has the unknown kind 'line'\. Did you mean 'lines'\?"):
        check_panel(Panel(name="mine", title="T", kind=unknown, data=LINES))


@pytest.mark.parametrize(
    "blank",
    [
        panel.lines("p", "P", [], x_label="x", y_label="y"),
        panel.grid("p", "P", [1], [("a", [None])], x_label="x", y_label="y", z_label="z"),
        panel.lines("p", "P", [("a", [], []), ("b", [1, 2], [None, None])], x_label="x", y_label="y"),
        panel.bars("p", "P", [], [("a", [])], x_label="s"),
        panel.points("p", "P", [("a", [])], x_label="x", y_label="y"),
        panel.bars("p", "P", ["a"], [("a", [0])], x_label="s", log_x=True, rules=[("r", 1)]),
        panel.matrix("p", "P", [], []),
        panel.surface("p", "P", [0], [0], [[None]], axis_labels=("x", "y", "z")),
        panel.parallel("p", "P", [], [], [panel.axis("a", [])]),
        panel.paths("p", "P", ["a"], [None], [panel.axis("x", [[]])], panel.axis("y", [[]])),
        panel.images("p", "P", []),
        panel.table("p", "P", ["a"], []),
        panel.text("p", "P", " \n"),
        panel.cards("p", "P", []),
    ],
)
def test_a_panel_without_data_is_known_to_be_empty(blank: Panel) -> None:
    assert check_panel(blank).is_empty
    assert not check_panel(blank).json


def test_bars_of_one_part_each_may_stand_on_a_logarithmic_axis() -> None:
    parts = [("p", [1e-3, 0]), ("q", [0, 1e6])]
    bars = panel.bars("p", "P", ["a", "b"], parts, x_label="s", log_x=True, rules=[("here", 3)])
    assert Panel.from_json(check_panel(bars).json) == bars
    assert not check_panel(bars).is_empty
    assert not check_panel(
        Panel(name="old", title="T", kind="bars", data=BARS)
    ).is_empty  # written before there were rules
    assert not check_panel(panel.bars("p", "P", ["a"], [("p", [0])], x_label="s")).is_empty


def test_gaps_and_single_points_are_drawn() -> None:
    gap = panel.lines("p", "P", [("a", [1, 2, 3], [1, None, 3])], x_label="x", y_label="y")
    assert Panel.from_json(check_panel(gap).json) == gap
    assert not check_panel(panel.lines("p", "P", [("a", [1], [0])], x_label="x", y_label="y")).is_empty


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=n, max_size=n)
    )
)
def test_the_largest_cells_off_the_diagonal(values: list[list[int]]) -> None:
    names = [f"c{i}" for i in range(len(values))]
    cells = [(value, y, x) for y, row in enumerate(values) for x, value in enumerate(row) if x != y and value]
    wanted = sorted(cells, key=lambda cell: (-cell[0], cell[1], cell[2]))[:MAX_LISTED_CELLS]
    found = check_panel(panel.matrix("m", "M", names, values)).document.data.list_largest_cells()
    assert found == [(names[y], names[x], str(value)) for value, y, x in wanted]


def test_columns_of_numbers_are_known() -> None:
    rows = [["lr", "5e-4", "93.1 %", "1,234", "12 ms", ""], ["wd", "-0.1", "-", "7", "3.5 ms", "x"]]
    numeric = check_panel(panel.table("t", "T", list("abcdef"), rows)).document.data.find_numeric_columns()
    assert numeric == [False, True, True, True, True, False]
