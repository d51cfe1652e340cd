"""Drawings of facilities: what they count, and that a browser draws no text or shape over another."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests._browser import BROWSER, open_in_browser

from headway.plan.facility import page
from headway.plan.facility.design import plan_facility
from headway.plan.facility.drawing import GREEN, draw_facility
from headway.plan.facility.request import FacilityRequest


@pytest.mark.parametrize(("nodes", "kw"), [(13, 19.2), (144, 16.0), (130, 13.0), (12, 19.2)])
def test_the_drawing_has_a_bar_for_each_node_and_the_racks_of_the_text(nodes: int, kw: float) -> None:
    found = plan_facility(FacilityRequest(nodes=nodes, rack_watts=kw * 1000))
    drawn = draw_facility(found)
    more = sum(int(one) for one in re.findall(r">\+ (\d+)<", drawn))
    assert drawn.count("#e3e8ee") + more == found.racks
    if not more:
        assert drawn.count(GREEN) == nodes


def test_twelve_nodes_are_drawn_as_in_the_deck() -> None:
    """Two switches of 36 ports with six nodes each and 12 links between them, and one switch for each Ethernet."""
    said = [one.text for one in ET.fromstring(draw_facility(plan_facility(FacilityRequest(nodes=12)))).iter()]
    assert [said.count(text) for text in ("switch of 36 ports", "12", "24", "12 x 1 GbE", "of 24 x 1 GbE")] == [
        2, 1, 2, 1, 1,
    ]  # fmt: skip
    assert "24 x 10 GbE" in said


# The box of each text, shape and line, without the ground; a line counts as a shape of its own width.
FIND_OVERLAPS = """
const near = 0.5, found = {};
function overlaps(a, b) {
  return a.x + near < b.x + b.width && b.x + near < a.x + a.width &&
         a.y + near < b.y + b.height && b.y + near < a.y + a.height;
}
function holds(a, b) {
  return a.x <= b.x + near && a.y <= b.y + near && a.x + a.width >= b.x + b.width - near &&
         a.y + a.height >= b.y + b.height - near;
}
for (const [name, svg] of Object.entries(DRAWINGS)) {
  const place = document.createElement('div');
  place.innerHTML = svg;
  document.body.appendChild(place);
  const drawing = place.firstChild, view = drawing.viewBox.baseVal;
  const items = [...drawing.querySelectorAll('rect, text, line')].slice(1).map(
    one => ({kind: one.tagName, says: one.textContent, box: one.getBBox()}));
  const bad = [];
  items.forEach((a, at) => {
    if (!holds(view, a.box)) bad.push([a.kind, a.says, 'outside']);
    items.slice(at + 1).forEach(b => {
      const grown = box => ({x: box.x - 1, y: box.y - 1, width: box.width + 2, height: box.height + 2});
      const [p, q] = [a, b].map(one => one.kind == 'line' ? grown(one.box) : one.box);
      if (!overlaps(p, q)) return;
      if ([a.kind, b.kind].includes('line') && ![a.kind, b.kind].includes('text')) return;
      if (a.kind == 'rect' && holds(p, q)) return;
      bad.push([a.kind, a.says, b.kind, b.says]);
    });
  });
  found[name] = {items: items.length, bad: bad.slice(0, 5)};
  place.remove();
}
document.body.textContent = JSON.stringify(found);
"""


def find_overlaps(drawings: dict[str, str], folder: Path) -> dict[str, Any]:
    """Finds the overlapping texts and shapes of each drawing, in a browser."""
    path = folder / "drawings.html"
    script = f"const DRAWINGS = {json.dumps(drawings)};{FIND_OVERLAPS}"
    path.write_text(f"<!doctype html><meta charset='utf-8'><body><script>{script}</script>", encoding="utf-8")
    dom, console = open_in_browser(path)
    assert not console
    match = re.search(r"<body>(\{.*\})</body>", dom, re.DOTALL)
    assert match is not None
    found: dict[str, Any] = json.loads(unescape(match[1]))
    return found


FEW = (1, 6, 7, 12, 13, 36, 37, 54, 100, 144, 145, 300)


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("sizes", [FEW, pytest.param(range(1, 301), marks=pytest.mark.check)], ids=["few", "all"])
def test_no_text_or_shape_covers_another(sizes: Sequence[int], tmp_path: Path) -> None:
    """1 to 300 nodes, large and odd ones, and storage on the fabric. A text written over another one is found."""
    wanted = {str(nodes): FacilityRequest(nodes=nodes) for nodes in (*sizes, 1000, 2000)}
    for node in ("dgx-2", "dgx-a100", "dgx-h100"):
        for nodes in (1, 7, 40, 120):
            wanted[f"{node} {nodes}"] = FacilityRequest(nodes=nodes, node=node)
    for kw in (3.2, 11.0, 60.0):
        wanted[f"{kw} kW"] = FacilityRequest(nodes=100, rack_watts=kw * 1e3)
    for nodes in (6, 36, 200):
        wanted[f"InfiniBand {nodes}"] = FacilityRequest(nodes=nodes, images_s=30_000)
    drawings = {name: draw_facility(plan_facility(request)) for name, request in wanted.items()}
    text = re.search(r"<text.*?</text>", drawings["12"])
    assert text is not None
    drawings["broken"] = drawings["12"].replace("</svg>", f"{text[0]}</svg>")
    found = find_overlaps(drawings, tmp_path)
    assert len(found) == len(drawings)
    assert found.pop("broken")["bad"]
    assert min(one["items"] for one in found.values()) > 10
    assert {name: one["bad"] for name, one in found.items() if one["bad"]} == {}


# Width of the picture as it is shown, its own width, and whether it or the whole page has to be scrolled.
MEASURE_PICTURE = """
addEventListener('load', () => {
  const box = document.querySelector('.whole'), image = box.querySelector('img'), root = document.documentElement;
  document.title = JSON.stringify({
    shown: image.clientWidth, own: image.naturalWidth, box: box.scrollWidth > box.clientWidth,
    page: root.scrollWidth > root.clientWidth});
});
"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize(("width", "scrolls"), [(500, True), (1400, False)])
def test_on_a_phone_the_drawing_keeps_its_size_and_scrolls_in_its_box(
    width: int, scrolls: bool, tmp_path: Path
) -> None:
    path = tmp_path / "room.html"
    page.write_page(plan_facility(FacilityRequest(nodes=60)), path)
    html = path.read_text(encoding="utf-8")
    path.write_text(html.replace("</body>", f"<script>{MEASURE_PICTURE}</script></body>"), encoding="utf-8")
    dom, console = open_in_browser(path, f"--window-size={width},900")
    assert not console
    match = re.search(r"<title>(\{.*?\})</title>", dom)
    assert match is not None
    found = json.loads(unescape(match[1]))
    assert found["shown"] == found["own"] > 700
    assert (found["box"], found["page"]) == (scrolls, False)
