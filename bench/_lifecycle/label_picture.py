"""Draws the pictures of docs/labelling.md: `python -m bench._lifecycle.label_picture FOLDER`.

Photographs and labels are real; proposals, runs and their accuracies are invented, so that there is something to
see. Needs the photographs of the tests, and Chromium.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

from bench._data import images
from bench._devtools import Browser, browsing
from bench._lifecycle.label_page import JSON
from bench._lifecycle.uploads import ask, serve
from headway.lifecycle.store.store import Store

# Families of ImageNet's classes by the number of their synset.
FAMILIES = (
    (1_496_000, "fish"),
    (1_630_000, "bird"),
    (1_770_000, "reptile"),
    (1_795_000, "insect"),
    (1_860_000, "bird"),
    (2_000_000, "sea animal"),
    (2_084_000, "bird"),
    (2_120_000, "dog"),
    (2_135_000, "cat or bear"),
    (2_325_000, "insect"),
    (2_700_000, "mammal"),
    (7_500_000, "thing"),
    (8_000_000, "food"),
    (99_000_000, "place or plant"),
)
SIZES = {"light": (1280, 800), "dark": (1920, 1080)}


def name_family(name: str) -> str:
    """Returns the family of an image such as `n01440764/n01440764_tench.JPEG`."""
    number = int(name[1:9])
    return next(family for end, family in FAMILIES if number < end)


def build_store(folder: Path, photographs: Path) -> bytes:
    """Makes a data set with labels of two people, and runs of three versions; returns a queue of what is left."""
    store, draw = Store.make(folder), random.Random(0)
    store.create("photos", splits={"train": 0.8, "eval": 0.2}, by="anna")
    store.add("photos", photographs, unlabelled=True, by="anna", message="250 photographs")
    listed = [one.name for one in store.list_samples("photos")]
    families = {name: name_family(name) for name in listed}
    names = sorted(set(families.values()))
    accuracy = 0.42
    for number in range(6):
        chosen = listed[16 * number : 16 * number + 16]
        outcome = store.label("photos", {name: families[name] for name in chosen}, by=("anna", "ben")[number % 2])
        if number % 2:
            accuracy += (0.14, 0.1, 0.06)[number // 2]
            write_run(folder / "runs" / f"photos-{number // 2 + 1}", outcome.version.version, accuracy)
    picks = [
        {
            "name": name,
            "proposed": families[name] if draw.random() < 0.8 else draw.choice(names),
            "probability": round(draw.uniform(0.3, 0.7), 3),
            "arm": "random" if draw.random() < 0.2 else "margin",
            "score": round(draw.random(), 3),
            "copies": int(draw.random() < 0.08),
        }
        for name in listed[96:216]
    ]
    tree = {"picks": picks, "strategy": "margin", "runs": [{"run": "runs/photos-3"}]}
    return json.dumps(tree).encode()


def write_run(folder: Path, version: str, accuracy: float) -> None:
    folder.mkdir(parents=True)
    data = f"{{train: 'store:photos@{version}', eval: 'store:photos@{version}/eval'}}"
    (folder / "recipe.yaml").write_text(f"data: {data}\n")
    (folder / "provenance.json").write_text(json.dumps({"started": "2026-01-01T12:00:00+0000"}))
    (folder / "summary.json").write_text(json.dumps({"finished": True, "step": 1, "accuracy": accuracy}))
    (folder / "metrics.jsonl").write_text("")


def draw_pages(browser: Browser, url: str, out: Path) -> None:
    browser.open(url)
    is_drawn = "[...document.querySelectorAll('.tile img')].every(one => one.naturalWidth > 0)"
    browser.wait(f"document.querySelectorAll('.tile').length === 24 && {is_drawn}")
    browser.press("3", "x", "ArrowRight", " ")
    for theme, (width, height) in SIZES.items():
        browser.resize(width, height)
        browser.set_dark(theme == "dark")
        browser.wait("document.querySelector('#strip-drawing circle') !== null")
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        browser.draw(out / f"label-page-{theme}.webp")
    browser.press("Enter")
    browser.wait("document.getElementById('saved').textContent === 'saved'")
    browser.evaluate("document.getElementById('open-loop').click()")
    browser.wait("document.querySelector('#loop table') !== null")
    for theme, (width, height) in SIZES.items():
        browser.resize(width, height)
        browser.set_dark(theme == "dark")
        browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        browser.draw(out / f"label-loop-{theme}.webp")
    assert not browser.faults, browser.faults


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("folder", type=Path, help="where the pictures are written")
    out: Path = asked.parse_args().folder
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        photographs = images(Path(place) / "images")
        if photographs is None:
            return
        folder = Path(place) / "store"
        queue = build_store(folder, photographs)
        with serve(folder) as (address, _), browsing(Path(place)) as browser:
            ask(address, "POST", "/datasets/photos/mine", queue, JSON)
            draw_pages(browser, f"http://{address[0]}:{address[1]}/label/photos", out)


if __name__ == "__main__":
    main()
