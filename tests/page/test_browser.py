"""A real browser draws every chart, in light and in dark, wide and narrow, and has nothing to complain of."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tests._browser import BROWSER, open_in_browser

from headway.page import panel, renderer
from headway.page.panel import Panel

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine"),
]


def panels() -> list[Panel]:
    pixels = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 30, 30)).save(pixels, "PNG")
    uri = "data:image/png;base64," + base64.b64encode(pixels.getvalue()).decode()
    nasty = ["</script><b>bold</b>", "same", "same", "", "2026-01-01", "7", "<a href='https://example.org'>link</a>"]
    steps = list(range(300))
    wave = [None if 100 < step < 120 else 1 + step % 7 for step in steps]
    large = [[30 if x == y else int((x * y) % 97 == 5) for x in range(300)] for y in range(300)]
    small = [[9 if x == y else x * y % 3 for x in range(7)] for y in range(7)]
    return [
        panel.cards("cards", "Cards", [("accuracy", "93.4 %", "best")]),
        panel.lines("gaps", "G", [(name, steps, wave) for name in nasty], x_label=nasty[0], y_label=nasty[6]),
        panel.lines("log", "L", [("a", [1, 1e6], [1e-5, 3])], x_label="x", y_label="y", log_x=True, log_y=True),
        panel.lines(
            "levels",
            "L",
            [("a", [1, 2, 4], [3, 9, 27])],
            x_label="x",
            y_label="images/s",
            log_y=True,
            rules=[("<i>high</i>", 90.0), ("low", 5.0)],
        ),
        panel.lines("point", "P", [("a", [3], [0.5]), ("none", [], [])], x_label="x", y_label="y", y_range=(0, 1)),
        panel.bars("stacks", "S", nasty, [("one", [1.0] * 7), ("two", [1e6] * 7)], x_label="seconds"),
        panel.bars(
            "rules",
            "R",
            nasty,
            [("p", [9.0] * 6 + [0.0]), ("q", [0.0] * 6 + [2e6])],
            x_label="x",
            log_x=True,
            rules=[("near", 5.0), ("<b>far</b>", 9e5)],
        ),
        panel.lines(
            "band", "B", [("a", steps, wave), ("b", steps, wave)], bands=[(0, wave, wave)], x_label="x", y_label="y"
        ),
        panel.grid(
            "grid",
            "H",
            [1, 2, 5],
            [(name, [1e-3, None, 9.0]) for name in nasty],
            x_label="x",
            y_label="y",
            z_label=nasty[0],
            log=True,
        ),
        panel.grid(
            "long", "H", steps, [(f"layer {i}", wave) for i in range(161)], x_label="x", y_label="y", z_label="z"
        ),
        panel.grid(
            "cells",
            "H",
            range(3),
            [(name, [1.0, None, 9.0]) for name in nasty[:3]],
            x_label="x",
            y_label="y",
            z_label="z",
            columns=["same", "same", "<b>c</b>"],
            texts=[["first\nsecond", "", "<i>t</i>"]] * 3,
            width="full",
        ),
        panel.points(
            "scatter",
            "S",
            [(name, [(nasty[0], 1.0 + n, 2e-5), (name, 1e4, n)]) for n, name in enumerate(nasty)],
            x_label=nasty[6],
            y_label="y",
            log_x=True,
        ),
        panel.matrix("small", "M", nasty, small),
        panel.matrix("large", "M", [f"class {i}" for i in range(300)], large, width="full"),
        surface("surface", [[(x - 5) ** 2 + y**2 + 0.01 for x in range(9)] for y in range(7)], log_z=True),
        surface("gap", [[None if x == y else x * y for x in range(9)] for y in range(7)], path=True),
        surface("flat", [[2.0] * 9] * 7),
        panel.parallel(
            "parallel",
            "P",
            nasty,
            [3, 1, 2, 1, 1, None, None],
            [
                panel.axis("<b>a</b>.lr", [1e-9, 1e-3, 1, 2, 3, None, None], scale="log"),
                panel.axis("c", [0, 1, 2, 3, 4, 5, 6], scale="category", categories=nasty),
                panel.axis("all", [None] * 7),
                panel.axis("one", [5] * 7),
            ],
        ),
        panel.paths(
            "paths",
            "P",
            nasty,
            [3, 1, 2, 1, 1, None, None],
            [
                panel.axis(
                    "x", [[1 / 27, 1 / 9, 1]] * 6 + [[]], scale="log", ticks=[(1 / 27, "1/27"), (1, "<b>1</b>")]
                ),
                panel.axis("c", [[0, None, 2]] * 6 + [[]], scale="category", categories=nasty),
            ],
            panel.axis("y", [[1, 2, None]] * 6 + [[]], missing_is_high=True),
        ),
        panel.images("images", "I", [(uri, "<script>alert(1)</script>", "note")]),
        panel.table("table", "T", nasty, [nasty]),
        panel.text("text", "T", "</pre>"),
    ]


def surface(name: str, heights: Sequence[Sequence[float | None]], **more: Any) -> Panel:
    places = [("<b>here</b>", 0.0, 0.0), ("", 3.5, 2.0), ("there", 8.0, 6.0)]
    return panel.surface(
        name, "S", range(9), range(7), heights, axis_labels=("<i>x", "y", "loss"), marks=places, **more
    )


@pytest.mark.parametrize(
    "flags", [("--window-size=1400,900",), ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")]
)
@pytest.mark.check
def test_every_chart_is_drawn_and_the_console_stays_empty(tmp_path: Path, flags: tuple[str, ...]) -> None:
    page = tmp_path / "report.html"
    page.write_text(renderer.render(panels(), title="<b>Run</b>", subtitle="S", footer="F"), encoding="utf-8")
    document, console = open_in_browser(page, "--disable-3d-apis", *flags)
    assert console == []
    articles = dict(re.findall(r'<article id="([^"]+)"(.*?)</article>', document, re.DOTALL))
    marks = {"gaps": 7, "log": 1, "levels": 3, "point": 1, "band": 6, "stacks": 14, "rules": 7}
    for name, count in marks.items():
        assert 'class="main-svg"' in articles[name], name
        drawn = 'class="point"' if name in ("stacks", "rules") else "trace scatter"
        assert articles[name].count(drawn) >= count, name
    assert articles["band"].count('class="js-fill"') >= 2  # a gap divides it
    assert articles["scatter"].count('class="point"') == 14
    if "1400" in flags[0]:
        # The gap shows no text.
        assert re.findall(r"<tspan[^>]*>([^<]*)</tspan>", articles["cells"]).count("second") == 3
        assert articles["cells"].count("&lt;i&gt;t&lt;/i&gt;</text>") == 3
    for name in ("small", "large", "grid", "long", "cells"):
        assert re.search(r'class="heatmaplayer mlayer">.*?<image', articles[name]), name
    for name in ("surface", "gap", "flat"):
        assert 'class="contourbg"><path' in articles[name], name
        assert 'class="gl-container"><div' not in articles[name], "no 3-D without WebGL"
    assert re.findall(r">([^<>]*(?:here)[^<>]*)</text>", articles["gap"]) == ["&lt;b&gt;here&lt;/b&gt;", "there"]
    shown = re.findall(r'class="annotation-text"[^>]*>([^<]*)<', articles["gaps"])
    assert shown == ["&lt;a href='https://example.org'&gt;link&lt;/a&gt;"]
    rules = re.findall(r'class="annotation-text"[^>]*>([^<]*)<', articles["rules"])
    assert rules == ["near", "&lt;b&gt;far&lt;/b&gt;"]
    assert re.search(r'class="shapelayer">(?:<g[^>]*>)?<path', articles["rules"])
    levels = re.findall(r'class="annotation-text"[^>]*>([^<]*)<', articles["levels"])
    assert levels == ["images/s", "low", "&lt;i&gt;high&lt;/i&gt;"]
    for name, layers in {"parallel": 2, "paths": 4}.items():
        assert articles[name].count('<canvas aria-hidden="true"') == layers, name
        assert 'data-drawn="7"' in articles[name], name
    assert "2 classes to a cell" in articles["large"]
    assert 'class="small"' in articles["images"]
    assert "https://example.org" not in "".join(re.findall(r'(?:src|href)="([^"]*)"', document))
    assert "<b>bold" not in document


@pytest.mark.check
def test_a_surface_stands_in_three_dimensions_where_the_browser_can(tmp_path: Path) -> None:
    """Software draws it here, which the browser warns of; what it may not do is refuse the page's own script."""
    page = tmp_path / "report.html"
    bowl = [[(x - 4) ** 2 + (y - 3) ** 2 + 0.1 for x in range(9)] for y in range(7)]
    page.write_text(renderer.render([surface("bowl", bowl)], title="T", subtitle="S"), encoding="utf-8")
    document, console = open_in_browser(page, "--enable-unsafe-swiftshader", "--window-size=1400,900")
    if re.search("could not create|WebGL is not|blocklisted", " ".join(console), re.IGNORECASE):
        pytest.skip("no WebGL here, not even in software")
    assert 'id="scene"' in document
    assert not [line for line in console if re.search("error|refused|violates|eval", line, re.IGNORECASE)]


@pytest.mark.check
def test_the_console_is_really_read(tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text("<!doctype html><script>missing()</script>", encoding="utf-8")
    assert "missing is not defined" in "".join(open_in_browser(page)[1])
