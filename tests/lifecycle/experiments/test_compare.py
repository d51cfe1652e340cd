"""The page that compares runs: what differs, who is best, and nothing of a run's names that the browser runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests._browser import BROWSER, open_in_browser

from headway.core.errors import UsageError
from headway.lifecycle.experiments import compare
from headway.lifecycle.experiments.compare import build_panels, choose_score, write_page
from headway.lifecycle.experiments.query import Selection, select_runs
from headway.lifecycle.experiments.run_index import RunIndex, UpdateResult, open_index
from headway.lifecycle.experiments.scan import scan_folders
from headway.page.panel import Panel

from ._runs import update, updated, write_mlruns, write_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six runs that differ in three keys, and a damaged one. Tests only read them."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(6):
        accuracy = None if number == 5 else 0.5 + 0.1 * number
        write_run(
            folder / f"r{number}",
            lr=10.0 ** -(number % 4),
            optimizer="<b>sgd</b>" if number % 2 else "adamw",
            summary={"finished": number != 5, "accuracy": accuracy, "seconds": 90.0},
            losses=[2.0 / step for step in range(1, 301)],
            **({"ema": 0.5} if number == 3 else {}),
        )
    (write_run(folder / "torn") / "summary.json").write_text("{")
    update(folder)
    return folder


@pytest.fixture
def index(folder: Path) -> Iterator[RunIndex]:
    with open_index(folder / "index.sqlite") as opened:
        yield updated(opened, folder)


@pytest.fixture
def result(index: RunIndex, folder: Path) -> UpdateResult:
    return index.update(scan_folders([folder]))


def build(
    index: RunIndex, result: UpdateResult, sort: str = "", descending: bool = False, **more: Any
) -> dict[str, Panel]:
    runs = select_runs(index, Selection(sort=sort, descending=descending))
    score = choose_score(index, sort, descending=descending)
    return {one.name: one for one in build_panels(index, runs, result, score=score, **more)}


def test_axes_are_what_differs_and_the_score(index: RunIndex, result: UpdateResult) -> None:
    panels = build(index, result)
    data = panels["parallel"].data
    assert [axis["label"] for axis in data["axes"]] == ["ema", "optimizer.lr", "optimizer.name", "accuracy"]
    ema, rate, optimizer, accuracy = data["axes"]
    assert data["names"] == [f"r{number}" for number in range(6)]
    # The best is rank 1; a score that is not finite has none.
    assert data["ranks"] == [5, 4, 3, 2, 1, None]
    assert ema["values"] == [None, None, None, 0.5, None, None]
    assert (rate["scale"], rate["values"]) == ("log", [1.0, 0.1, 0.01, 0.001, 1.0, 0.1])
    assert (optimizer["scale"], optimizer["categories"]) == ("category", ["<b>sgd</b>", "adamw"])
    assert accuracy["values"] == pytest.approx([0.5, 0.6, 0.7, 0.8, 0.9, None])
    cards = {card["label"]: card for card in panels["result"].data["cards"]}
    assert cards["accuracy"]["value"] == "0.9"
    assert cards["accuracy"]["note"] == "highest of 5 scores, so biased: r4"
    assert cards["runs"]["note"] == "5 finished, 1 stopped"
    assert cards["training time"]["value"] == "9m00s"
    assert cards["left out"]["value"] == "1"
    (damaged,) = panels["damaged"].data["rows"]
    assert damaged[0].endswith("/torn")
    assert [row[1] for row in panels["runs"].data["rows"]] == ["r4", "r3", "r2", "r1", "r0", "r5"]


def test_the_order_of_the_list_ranks(index: RunIndex, result: UpdateResult) -> None:
    assert build(index, result, sort="train/loss")["parallel"].data["axes"][-1]["label"] == "train/loss"
    highest = build(index, result, sort="optimizer.lr", descending=True)["parallel"].data
    assert {highest["names"][highest["ranks"].index(1)], highest["names"][highest["ranks"].index(2)]} == {"r0", "r4"}
    lowest = build(index, result, sort="optimizer.lr")["parallel"].data
    assert lowest["names"][lowest["ranks"].index(1)] == "r3"
    # A field of all runs is no score.
    assert build(index, result, sort="name")["parallel"].data["axes"][-1]["label"] == "accuracy"


def test_axes_and_curves_that_were_chosen(index: RunIndex, result: UpdateResult) -> None:
    panels = build(index, result, columns=["batch", "git"], curves=["train/seconds"])
    assert [axis["label"] for axis in panels["parallel"].data["axes"]] == ["batch", "git", "accuracy"]
    assert [one.title for one in panels.values() if one.kind == "paths"] == ["train/seconds"]
    with pytest.raises(UsageError, match=r"no run has the key 'metric.train/los'"):
        build(index, result, curves=["train/los"])
    with pytest.raises(UsageError, match=r"no run has the key 'bach'. Did you mean 'batch'"):
        build(index, result, columns=["bach"])


def test_long_curves_keep_their_ends(index: RunIndex, result: UpdateResult, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = build(index, result)
    assert [one.title for one in panels.values() if one.kind == "paths"] == ["evaluate/accuracy", "train/loss"]
    curve = panels["curve-1"].data
    assert {len(row) for row in curve["y"]["values"]} == {240}
    assert all(row[0] == 2.0 and row[-1] == pytest.approx(2 / 300, rel=1e-5) for row in curve["y"]["values"])
    assert curve["y"]["scale"] == "log"
    assert curve["x"][0]["values"][0][0] == 1
    # The more runs, the fewer points of each.
    monkeypatch.setattr(compare, "MOST_POINTS", 60)
    assert {len(row) for row in build(index, result)["curve-1"].data["y"]["values"]} == {10}


def test_a_key_of_many_texts_is_no_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MOST_CATEGORIES", 2)
    monkeypatch.setattr(compare, "MOST_AXES", 2)
    for number in range(3):
        write_run(
            tmp_path / f"r{number}",
            lr=0.1 * (1 + number),
            note=f"n{number}",
            a=number,
            b=-number,
            c=[None, 1, 2][number],
        )
    with open_index(tmp_path / "index.sqlite") as index:
        result = index.update(scan_folders([tmp_path]))
        panel = build(index, result)["parallel"]
        assert [axis["label"] for axis in panel.data["axes"]] == ["a", "b", "accuracy"]
        assert "3 more keys differ: --columns chooses." in panel.note
        # null among numbers has a place of its own.
        (axis, _) = build(index, result, columns=["c"])["parallel"].data["axes"]
        assert (axis["values"], axis["missing"]) == ([None, 1, 2], "no number")
        # A text that was asked for is drawn, whatever it holds.
        (axis, _) = build(index, result, columns=["note"])["parallel"].data["axes"]
        assert axis["missing"] == "no number"


def test_runs_of_mlflow_have_no_result_and_are_drawn(tmp_path: Path) -> None:
    for number in range(3):
        write_mlruns(tmp_path, f"{number}" * 32)
    with open_index(tmp_path / "index.sqlite") as index:
        panels = build(index, index.update(scan_folders([tmp_path])))
    assert panels["parallel"].data["names"] == [f"bold-cat {str(number) * 8}" for number in range(3)]
    assert panels["parallel"].data["ranks"] == [None] * 3
    assert [one.title for one in panels.values() if one.kind == "paths"] == ["loss", "top"]


def test_the_page_holds_names_as_text(tmp_path: Path) -> None:
    hostile = "</script><script>document.title='x'</script><img src=x onerror=alert(1)>"
    for number in range(2):
        write_run(tmp_path / f"{number}<img src=x>", optimizer=f"{hostile}{number}", **{f"key{hostile}": number})
    with open_index(tmp_path / "index.sqlite") as index:
        result = index.update(scan_folders([tmp_path]))
        runs = select_runs(index, Selection())
        path = write_page(index, runs, result, tmp_path / "page.html", score=choose_score(index, "", descending=False))
    html = path.read_text(encoding="utf-8")
    assert hostile not in html
    assert "<img" not in html
    assert "http://" not in re.sub(r"http://www.w3.org/\S+", "", html)


def test_a_page_of_no_run_or_too_many(
    index: RunIndex, result: UpdateResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="there is no run to compare"):
        write_page(index, [], result, tmp_path / "p.html", score=None)
    monkeypatch.setattr(compare, "MOST_RUNS", 3)
    with pytest.raises(UsageError, match=r"these are 6. Choose by --where, or take the first by --limit."):
        write_page(index, select_runs(index, Selection()), result, tmp_path / "p.html", score=None)
    assert not (tmp_path / "p.html").exists()
    assert write_page(index, select_runs(index, Selection(limit=1)), result, tmp_path / "p.html", score=None).exists()


PROBE = """
<script>
addEventListener("load", () => requestAnimationFrame(() => requestAnimationFrame(() => {
  const ink = (canvas) => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.filter((value, i) => i % 4 === 3 && value).length / (pixels.length / 4);
  };
  const found = { ink: Array.from(document.querySelectorAll("canvas"), ink) };
  const read = (name) => {
    const chart = document.querySelector(`${name} [data-drawn]`);
    chart.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown", bubbles: true }));
    return [Number(chart.dataset.drawn), document.querySelector(`${name} output`).textContent];
  };
  found.parallel = read("#parallel");
  found.curve = read("#curve-1");
  document.body.dataset.found = JSON.stringify(found);
})));
</script>
"""


@pytest.mark.browser
@pytest.mark.check
@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_draws_a_thousand_runs(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    for number in range(1000):
        write_run(
            folder / f"r{number:03}",
            lr=10 ** (-4 * math.sin(number) ** 2),
            optimizer=("sgd", "adamw", "lars")[number % 3],
            summary={"finished": True, "accuracy": math.cos(number) ** 2},
            losses=[2 / step + 0.1 * math.sin(number) ** 2 for step in range(1, 101)],
        )
    with open_index(folder / "index.sqlite") as index:
        result = index.update(scan_folders([folder]))
        runs = select_runs(index, Selection())
        score = choose_score(index, "", descending=False)
        page = write_page(index, runs, result, tmp_path / "page.html", score=score)
    assert page.stat().st_size < 3_000_000
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    # On a busy machine, the browser may end before it has drawn the second frame of a page with 100,000 points.
    for _ in range(6):
        document, console = open_in_browser(page, "--window-size=1400,900")
        assert console == []
        if match := re.search(r'data-found="([^"]*)"', document):
            break
    assert match is not None
    found = json.loads(unescape(match[1]))
    assert all(0.02 < ink < 1 for ink in found["ink"][::2])
    assert not any(found["ink"][1::2])
    best = max(range(1000), key=lambda number: math.cos(number) ** 2)
    for drawn, text in (found["parallel"], found["curve"]):
        assert drawn == 1000
        assert text.startswith(f"r{best:03}, rank 1\n")
    # A curve's readout has its last point, and not all of them.
    assert found["curve"][1].splitlines()[1] == "the last of 60 points:"
