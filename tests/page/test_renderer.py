"""The page is one file, in order, and whatever users named cannot break out of its text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import HeadwayError
from headway.page import panel, renderer
from headway.page.panel import Panel

SHOWN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40)  # control characters are not kept by HTML
NASTY = [
    "<script>alert(1)</script>",
    "</script><script>alert(2)//",
    "<!--<script>",
    '"><img src=x onerror=alert(3)>',
    "{{ 7 * 7 }}",
]


class Page(HTMLParser):
    """A browser's view of the page: elements with their attributes, texts, and scripts by type."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[tuple[str | None, str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script" and self.cdata_elem == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        else:
            self.texts.append(data)

    def articles(self) -> list[str | None]:
        return [attributes["id"] for tag, attributes in self.elements if tag == "article"]


def draw(*panels: Panel, title: str = "T", sections: list[str] | None = None) -> str:
    return renderer.render(panels, title=title, subtitle="S", sections=sections, footer="F")


def line(name: str, label: str = "a", note: str = "") -> Panel:
    return panel.lines(name, "L", [(label, [1, 2], [3, None])], x_label=label, y_label=label, note=note)


@given(st.sampled_from(NASTY) | SHOWN)
@settings(deadline=None)
def test_texts_are_shown_as_they_are(text: str) -> None:
    html = renderer.render(
        [
            panel.table("t", text, [text], [[text]], note=text, section=text),
            panel.text("p", text, text),
            panel.images("i", "I", [("data:image/png;base64,AAAA", text, text)]),
            panel.cards("c", text, [(text, text, text)]),
        ],
        title=text,
        subtitle=text,
        footer=text,
    )
    page = Page(html)
    plain = Page(
        draw(panel.table("t", "", ["a"], [["b"]]), panel.text("p", "", "t"), panel.cards("c", "", [("", "", "")]))
    )
    assert len(page.scripts) == len(plain.scripts) == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    if text.strip():
        assert page.texts.count(text) >= 9
        assert [attributes["alt"] for tag, attributes in page.elements if tag == "img"] == [text]


@given(st.sampled_from(NASTY) | st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(deadline=None, max_examples=25)
def test_the_data_of_a_chart_stands_in_the_page(text: str) -> None:
    chart = line("chart", text, note=text)
    page = Page(draw(chart))
    (payload,) = [script for kind, script in page.scripts if kind == "application/json"]
    assert Panel.from_json(payload) == chart
    assert "<" not in payload
    assert len(page.scripts) == 3  # the data, plotly, the chart script


def test_plotly_is_inlined_once_and_only_where_a_chart_needs_it() -> None:
    with_charts, without = draw(line("a"), line("b"), line("c")), draw(panel.text("a", "A", "text"))
    assert with_charts.count("/* plotly.js v") == 1
    assert len(without) < 50_000 < len(with_charts) < 1_900_000
    assert "/* plotly.js v" not in without


def test_canvases_need_no_plotly_and_other_charts_no_canvas() -> None:
    crowd = panel.parallel("p", "P", ["a"], [1], [panel.axis("x", [1])])
    canvas = "globalThis.canvasCharts ="
    assert canvas in draw(crowd)
    assert "/* plotly.js v" not in draw(crowd)
    assert canvas not in draw(line("a"))
    assert draw(crowd, line("a")).count(canvas) == 1


def test_nothing_outside_the_file_is_asked_for() -> None:
    pixel = "data:image/png;base64,iVBORw0KGgo="
    page = Page(draw(line("a"), panel.images("i", "I", [(pixel, "c", "n")]), title="https://example.org/title"))
    places = [value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")]
    assert all(value and value.startswith(("#", "data:")) for value in places), places
    styles = re.findall(r"<style>(.*?)</style>", draw(line("a")), re.DOTALL)
    assert len(styles) == 1
    assert not re.search(r"url\(|@import", styles[0])
    (policy,) = [attributes["content"] for tag, attributes in page.elements if attributes.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_sections_and_panels_stand_in_order() -> None:
    panels = [
        panel.text("z", "Z", "t", section="Late", order=90),
        panel.text("y", "Y", "t", section="Early", order=5),
        panel.text("x", "X", "t", section="Late", order=4),
        panel.text("w", "W", "t", section="Late", order=4),
        panel.text("v", "V", "t", section="Named", order=99),
    ]
    assert Page(draw(*panels, sections=["Absent", "Named"])).articles() == ["v", "w", "x", "z", "y"]
    assert Page(draw(*reversed(panels))).articles() == ["w", "x", "z", "y", "v"]


def test_contents_are_listed_above_three_sections() -> None:
    panels = [panel.text(str(i), "T", "t", section=f"s{i}") for i in range(4)]
    assert "<nav" not in draw(*panels[:3])
    assert re.findall(r'<a href="#section-\d">(s\d)</a>', draw(*panels)) == ["s0", "s1", "s2", "s3"]


def test_a_half_panel_without_a_neighbour_takes_the_full_width() -> None:
    widths = ["half", "half", "half", "full", "half", "full", "half", "half"]
    panels = [panel.text(f"p{i}", "T", "t", order=i, width=width) for i, width in enumerate(widths)]
    full = [
        (attributes["class"] or "").endswith(" full")
        for tag, attributes in Page(draw(*panels)).elements
        if tag == "article"
    ]
    assert full == [False, False, True, True, True, True, False, False]


def test_a_bad_panel_is_named() -> None:
    with pytest.raises(HeadwayError, match=r"panel 'bad' \(text\): data\.text is missing"):
        draw(line("good"), Panel(name="bad", title="B", kind="text", data={}))
    with pytest.raises(HeadwayError, match="two panels are called 'a'"):
        draw(line("a"), line("a"))
    with pytest.raises(HeadwayError, match="panel 'a' holds a value that JSON cannot"):
        draw(panel.lines("a", "A", [("s", [1], [float("nan")])], x_label="x", y_label="y"))


def test_an_empty_report_is_a_page() -> None:
    assert "no panels yet" in draw()
    assert "Nothing recorded." in draw(panel.lines("a", "A", [("s", [], [])], x_label="x", y_label="y"))


def test_a_thousand_classes_fit_a_page() -> None:
    names = [f"c{i}" for i in range(1000)]
    values = [[int(y == x) * 40 + int(x == (y * 7) % 1000) for x in range(1000)] for y in range(1000)]
    page = Page(draw(panel.matrix("m", "M", names, values)))
    (payload,) = [script for kind, script in page.scripts if kind == "application/json"]
    assert json.loads(payload)["data"]["values"] == values
