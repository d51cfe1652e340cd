"""A real browser draws the page of a thousand trials, and its brushes and keys work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests._browser import BROWSER, open_in_browser

from headway.sweep.page import write_page
from headway.sweep.sweep_summary import SweepSummary, summarise_sweep

from ._folders import write_sweep

pytestmark = [
    pytest.mark.browser,
    pytest.mark.check,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine"),
]

# What the page looks like after it was drawn, and after each of some events, as JSON in an attribute.
PROBE = """
<script>
const look = (drawn_ms) => {
  const found = { drawn_ms };
  const chart = document.querySelector("#parallel .chart > div");
  const stage = chart.querySelector(".stage");
  const readout = document.querySelector("#parallel output");
  const ink = (canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, i) => i % 4 === 3 && value).length / (pixels.length / 4);
  };
  const at = (type, x, y) => {
    const box = stage.getBoundingClientRect();
    const where = { clientX: box.left + x, clientY: box.top + y };
    stage.dispatchEvent(new PointerEvent(type, { ...where, bubbles: true, pointerType: "mouse" }));
  };
  const drag = (x, from, to) => [at("pointerdown", x, from), at("pointermove", x, to), at("pointerup", x, to)];
  const press = (key) => chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const count = () => [document.querySelector("#parallel .count").textContent, Number(chart.dataset.selected)];
  found.ink = Array.from(document.querySelectorAll("canvas"), ink);
  const canvas = stage.querySelector("canvas");
  const bottom = canvas.clientHeight - 18;
  const right = canvas.clientWidth - 76;
  found.height = bottom - 48;
  // The upper half of the learning rates, then of these the upper half of the scores.
  drag(14, 40, (48 + bottom) / 2);
  found.first = count();
  drag(right, 40, (48 + bottom) / 2);
  found.both = count();
  // A click removes a brush.
  drag(14, 100, 100);
  found.second = count();
  document.querySelector("#parallel .clear").click();
  found.cleared = count();
  press("ArrowDown");
  found.best = readout.textContent;
  press("ArrowDown");
  found.next = readout.textContent;
  press("ArrowRight");
  press("Enter");
  found.entered = count();
  press("Escape");
  found.escaped = [...count(), readout.hidden];
  document.body.dataset.found = JSON.stringify(found);
};
// Two frames later a scroll bar has its place.
addEventListener("load", () => {
  const now = performance.now();
  requestAnimationFrame(() => requestAnimationFrame(() => look(now)));
});
</script>
"""


def probe(summary: SweepSummary, *flags: str) -> dict[str, Any]:
    page = write_page(summary)
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    document, console = open_in_browser(page, *flags)
    assert console == []
    found = re.search(r'data-found="([^"]*)"', document)
    assert found is not None
    result: dict[str, Any] = json.loads(found[1].replace("&quot;", '"').replace("&lt;", "<").replace("&amp;", "&"))
    return result


@pytest.mark.parametrize(
    "flags", [("--window-size=1400,900",), ("--window-size=500,900", "--blink-settings=preferredColorScheme=0")]
)
def test_a_thousand_trials_are_drawn_and_selected(tmp_path: Path, flags: tuple[str, ...]) -> None:
    write_sweep(tmp_path / "s", budget=120, max_trials=1000)
    summary = summarise_sweep(tmp_path / "s")
    found = probe(summary, *flags)
    print(f"drawn after {found['drawn_ms']:.0f} ms")
    # Each chart has a layer with the lines, and an empty one for the line under the mouse.
    assert all(0.03 < ink < 1 for ink in found["ink"][::2])
    assert not any(found["ink"][1::2])
    trials = summary.trials
    rates = [trial.values["optimizer.lr"] for trial in trials]
    # The axis goes from the lowest to the highest rate.
    middle = (min(rates) * max(rates)) ** 0.5
    assert found["first"][1] == sum(rate >= middle for rate in rates)
    scores = [trial.score for trial in trials if trial.score is not None]
    # Below the scores is the place of failed trials, 26 pixels high.
    share = (found["height"] / 2 - 26) / (found["height"] - 26)
    limit = min(scores) + (max(scores) - min(scores)) * share
    good = [trial for trial in trials if trial.score is not None and trial.score >= limit]
    assert found["second"] == [f"{len(good)} of 1000 selected", len(good)]
    assert found["both"][1] == sum(trial.values["optimizer.lr"] >= middle for trial in good)
    assert found["cleared"] == ["", 1000]
    names = {trial.rank: f"trial {trial.trial}, rank {trial.rank}\n" for trial in trials}
    assert found["best"].startswith(names[1])
    assert found["next"].startswith(names[2])
    assert f"optimizer.name: {next(one for one in trials if one.rank == 2).values['optimizer.name']}" in found["next"]
    assert 0 < found["entered"][1] < 1000
    assert found["escaped"] == ["", 1000, True]
