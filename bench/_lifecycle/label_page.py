"""The label page in headless Chromium: from a key to the next image, a large data set, labels beside killed servers.

Keys are typed over the DevTools protocol, and the times are the page's own: from the key's time stamp to the first
frame after it, in which the next image has to be decoded and drawn. The next key is pressed then, as by a person who
looks at the image first: typed as quickly as DevTools sends them, about 80 a second, keys would wait for each other,
and the times would be those of the queue. The server and the browser share the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from bench._common import Claim, table
from bench._devtools import BROWSER, Browser, browsing
from bench._lifecycle.kills import kill
from bench._lifecycle.uploads import ask, serve
from bench._lifecycle.versions import write_large
from headway.lifecycle.store.store import Store

CLASSES = tuple(f"class-{number}" for number in range(10))
GRID, LABELS, LARGE = 24, 240, 100_000
SIDE = 160
JSON = {"Content-Type": "application/json"}
AHEAD = (
    "Object.keys(localStorage).some(one => one.startsWith('headway.current') && "
    "JSON.parse(localStorage[one])[1]?.samples.length)"
)
# Notes for each key when the frame after it is drawn, and for each new page when its first grid is.
WATCH = """
window.keyMs = []; window.openMs = 0;
const isDrawn = () => {
  const images = [...document.querySelectorAll('.tile img')];
  return images.length > 0 && images.every((one) => one.complete && one.naturalWidth > 0);
};
const afterPaint = (work) => requestAnimationFrame(() => {
  const channel = new MessageChannel();
  channel.port1.onmessage = work;
  channel.port2.postMessage(0);
});
addEventListener('keydown', (event) => {
  const before = document.querySelector('.tile')?.title;
  const look = () => {
    const isNext = event.key !== 'Enter' || document.querySelector('.tile')?.title !== before;
    if (!isNext || !isDrawn()) return afterPaint(look);
    window.keyMs.push([event.key, performance.now() - event.timeStamp]);
    tell();
  };
  afterPaint(look);
}, true);
let tell = () => null;
window.waitForKeys = (count) => new Promise((resolve) => {
  tell = () => window.keyMs.length >= count && resolve(count);
  tell();
});
const wait = () => isDrawn() ? (window.openMs = performance.now()) : afterPaint(wait);
addEventListener('DOMContentLoaded', wait);
"""


def measure_label_page(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Returns the claims of the page; none, with a line that says so, where there is no Chromium."""
    if BROWSER is None:
        print("no chromium on the PATH: the label page is not measured")
        return []
    labels, large = (3 * GRID, 2_000) if options.quick else (LABELS, LARGE)
    with browsing(folder, width=1280, height=800) as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        # CPU of the page's main thread, so that other programs do not count.
        browser.call("Performance.enable", timeDomain="threadTicks")
        opened_ms = time_opening(browser, folder / "large", large, 2 if options.quick else 5)
        key_ms, grid_ms, cpu_ms, lost, doubled = label_while_killed(browser, folder / "keys", labels)
    rows = [("what", "median", "p95", "highest")]
    for what, values in (("key to next image", key_ms), ("Enter to next grid", grid_ms), ("open", opened_ms)):
        shown = (f"{np.percentile(values, share):.1f} ms" for share in (50, 95, 100))
        rows.append((what, *shown))
    rows.append(("CPU of the page for each key", f"{cpu_ms:.1f} ms", "", ""))
    table(rows)
    how = f"{len(key_ms)} digits of {labels} labels, 1280 x 800, images of {SIDE} pixels, server on the same machine"
    return [
        Claim("label_key_ms_p95", float(np.percentile(key_ms, 95)), "ms", f"from a key to the next image; {how}"),
        Claim(
            "label_grid_ms_p95",
            float(np.percentile(grid_ms, 95)),
            "ms",
            f"from Enter to 24 new images, one restart left out; {how}",
        ),
        Claim("label_key_cpu_ms", cpu_ms, "ms", f"CPU of the page's main thread for each key, Enter included; {how}"),
        Claim("label_open_s", max(opened_ms) / 1e3, "s", f"slowest of {len(opened_ms)} openings of {large:,} samples"),
        Claim("labels_lost", lost, "", f"of {labels}, while the server was killed twice"),
        Claim("labels_doubled", doubled, "", f"versions more than grids, of {labels} labels with two kills"),
    ]


def time_opening(browser: Browser, place: Path, samples: int, rounds: int) -> list[float]:
    """Returns milliseconds from the navigation to the drawn grid; the first is the server's first request too."""
    store = Store.make(place)
    store.create("large")
    write_large(store, samples, record=draw(0), classes=10)
    times = list[float]()
    with serve(place) as (address, _):
        for _ in range(rounds):
            browser.open(f"http://{address[0]}:{address[1]}/label/large")
            times.append(browser.wait("window.openMs"))
            # Another page, so that each opening is a new one.
            browser.open("about:blank")
            browser.wait("location.href === 'about:blank'")
    return times


def label_while_killed(browser: Browser, place: Path, labels: int) -> tuple[list[float], list[float], float, int, int]:
    """Labels images by keys; returns milliseconds of digits and of Enter, CPU, and labels that were lost or doubled.

    The server is killed while a grid is being labelled, and again right after one was sent.
    """
    images = place / "images"
    images.mkdir(parents=True)
    for number in range(labels):
        (images / f"{number:05d}.jpg").write_bytes(draw(number))
    store = Store.make(place / "store")
    store.create("keys", splits={"train": 1.0}, classes=CLASSES)
    store.add("keys", images, unlabelled=True)
    wanted = {f"{number:05d}.jpg": CLASSES[(7 * number + 3) % 10] for number in range(labels)}
    middle = labels // GRID // 2 * GRID
    kills = (middle - GRID // 2, labels - GRID)
    with contextlib.ExitStack() as stack:
        address, process = stack.enter_context(serve(store.folder))
        base = f"http://{address[0]}:{address[1]}"
        picks = [{"name": name, "proposed": CLASSES[0], "probability": 0.5, "arm": "margin"} for name in wanted]
        ask(address, "POST", "/datasets/keys/mine", json.dumps({"picks": picks}).encode(), JSON)
        browser.open(f"{base}/label/keys")
        browser.wait("window.openMs")
        cpu_s, pressed = count_page_cpu_s(browser), 0
        for number, label in enumerate(wanted.values()):
            if number in kills:
                if number == kills[0]:
                    # With the next grid in the browser, labelling goes on while the server is away.
                    browser.wait(AHEAD)
                kill(process)
            browser.press(str((CLASSES.index(label) + 1) % 10))
            pressed += 1
            browser.evaluate(f"waitForKeys({pressed})")
            if number % GRID == GRID - 1:
                # One whole grid later, or at the end, the server is there again.
                if number + 1 == kills[0] + GRID // 2 + GRID or number == labels - 1:
                    process = stack.enter_context(serve(store.folder, address[1]))[1]
                if number + 1 in kills:
                    # The images that come next are in the browser: without a server nobody could see them.
                    browser.wait(AHEAD)
                title = browser.evaluate("document.querySelector('.tile').title")
                browser.press("Enter")
                pressed += 1
                done = f"document.querySelector('.tile')?.title !== {json.dumps(title)}"
                browser.wait(done if number < labels - 1 else "!document.getElementById('empty').hidden")
        browser.wait("document.getElementById('saved').textContent === 'saved'")
        times: list[tuple[str, float]] = browser.evaluate("window.keyMs")
        cpu_s = count_page_cpu_s(browser) - cpu_s
    found = {one.name: one.label for one in store.list_samples("keys")}
    lost = sum(found[name] != label for name, label in wanted.items())
    doubled = len(store.log("keys")) - 2 - labels // GRID
    digits = [ms for name, ms in times if name != "Enter"]
    # One Enter waited until the server was started again, which measures the restart. The last one has no next grid.
    left_out = (kills[0] // GRID + 1, labels // GRID - 1)
    enters = [ms for name, ms in times if name == "Enter"]
    grids = [ms for number, ms in enumerate(enters) if number not in left_out]
    return digits, grids, 1e3 * cpu_s / len(times), lost, doubled


def count_page_cpu_s(browser: Browser) -> float:
    """Returns the CPU seconds that the page's main thread has taken."""
    found = {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}
    return float(found["TaskDuration"])


def draw(number: int) -> bytes:
    """Returns a JPEG of noise that no other number has."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIDE // 8, SIDE // 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((SIDE, SIDE)).save(file, "JPEG", quality=85)
    return file.getvalue()
