"""Panels survive their JSON, and refuse what JSON cannot hold."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.page import panel
from headway.page.panel import Panel

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**53), 2**53)


@given(TEXT, TEXT, st.lists(st.tuples(NUMBERS, st.none() | NUMBERS)), st.integers())
def test_a_panel_survives_its_json(title: str, note: str, points: list[tuple[float, float | None]], order: int) -> None:
    x, y = [point[0] for point in points], [point[1] for point in points]
    made = panel.lines(
        "p", title, [(note, x, y)], x_label=note, y_label=title, y_range=(0, 1), note=note, order=order, log_y=True
    )
    assert Panel.from_json(made.to_json()) == made


def test_every_constructor_survives_its_json() -> None:
    made = [
        panel.cards("a", "A", [("label", "value", "note")]),
        panel.bars("b", "B", ["one", "two"], [("part", [1, 2])], x_label="seconds", rules=[("r", 1.5)], section="Time"),
        panel.matrix("c", "C", ["x", "y"], [(1, 2), (3, 4)], width="full"),
        panel.surface("s", "S", [0, 1], [0], [(1, None)], axis_labels=("x", "y", "z"), marks=[("here", 0.5, 0.0)]),
        panel.points("p", "P", [("a", [("one", 1, 2.5)]), ("b", [])], x_label="x", y_label="y", log_x=True),
        panel.grid("g", "G", [0], [("r", [1])], x_label="x", y_label="y", z_label="z", columns=["c"], texts=[["t"]]),
        panel.images("d", "D", [("data:image/png;base64,AAAA", "caption", "")]),
        panel.table("e", "E", ("k", "v"), [("1", "2")]),
        panel.text("f", "F", "as\n  it is", order=3),
    ]
    assert [Panel.from_json(one.to_json()) for one in made] == made
    assert [one.kind for one in made] == [
        "cards",
        "bars",
        "matrix",
        "surface",
        "points",
        "grid",
        "images",
        "table",
        "text",
    ]
    assert [one.width for one in made] == ["full", "half", "full", "full", "half", "half", "half", "half", "half"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, object()])
def test_what_json_cannot_hold_is_refused_by_name(value: float) -> None:
    with pytest.raises(HeadwayError, match="panel 'loss' holds a value that JSON cannot"):
        panel.lines("loss", "Loss", [("a", [1], [value])], x_label="step", y_label="loss").to_json()


def test_a_file_name_of_another_encoding_is_written() -> None:
    text = panel.text("names", "Names", "caf\udce9.jpg").to_json()
    assert Panel.from_json(text).data["text"] == "caf?.jpg"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"name": "a"}', '{"colour": 1}'])
def test_a_text_that_is_no_panel_is_refused(text: str) -> None:
    with pytest.raises(HeadwayError, match="this text is not a panel"):
        Panel.from_json(text)
