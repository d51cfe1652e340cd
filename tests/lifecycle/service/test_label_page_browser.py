"""The label page in a real browser: keys, reloads, killed servers, hostile names, and the loop above the grid."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench._devtools import BROWSER, Browser, browsing
from tests._support import free_port, headway
from tests.lifecycle.service._labelling import (
    CLASSES,
    add_pool,
    add_queue,
    find_id,
    list_versions,
    propose,
    read_labels,
    set_labels,
)
from tests.lifecycle.service._service import Served, add_images, build_tar, create, draw, serving_data

from headway.lifecycle.store.store import Store

pytestmark = [
    pytest.mark.check,
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH"),
]

TILES = "document.querySelectorAll('.tile').length"
# Of the grid: the image of the first tile is there.
DRAWN = "[...document.querySelectorAll('.tile img')].every(one => one.complete && one.naturalWidth > 0)"
SAVED = "document.getElementById('saved').textContent === 'saved'"
OUTBOX = "Object.keys(localStorage).filter(name => name.startsWith('headway.outbox')).length"
# The grid after this one is there, with its images.
AHEAD = (
    "Object.keys(localStorage).some(one => one.startsWith('headway.current') && "
    "JSON.parse(localStorage[one])[1]?.samples.length)"
)
AT = "[...document.querySelectorAll('.tile')].findIndex(one => one.classList.contains('at'))"
CHIPS = "[...document.querySelectorAll('.chip')].map(one => one.textContent)"
ASKS = "document.getElementById('token-dialog').open"
IN_THE_MIDDLE = "document.elementFromPoint(innerWidth / 2, 280).textContent"
TITLES = "[...document.querySelectorAll('.tile')].map(one => one.title)"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving_data(tmp_path_factory.mktemp("page") / "store") as found:
        yield found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as found:
        yield found


@pytest.fixture(autouse=True)
def _expect_no_fault(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "browser" in request.fixturenames:
        browser = request.getfixturevalue("browser")
        faults, browser.faults = browser.faults, []
        assert faults == []


def show(browser: Browser, served: Served, name: str, tiles: int) -> None:
    browser.open(f"{served.started['url']}/label/{name}")
    browser.wait(f"location.pathname === '/label/{name}' && {TILES} === {tiles} && {DRAWN}")


def wait_until_saved(browser: Browser) -> None:
    browser.wait(f"{SAVED} && {OUTBOX} === 0")


def fill(browser: Browser, field: str, text: str) -> None:
    """Types a text into a field and leaves it."""
    place = f"document.getElementById({json.dumps(field)})"
    browser.evaluate(f"{place}.value = {json.dumps(text)}; {place}.dispatchEvent(new Event('change'))")


def key_of(label: str) -> str:
    return str((CLASSES.index(label) + 1) % 10)


def test_240_labels_by_keys_while_the_server_is_killed_twice(browser: Browser, tmp_path: Path) -> None:
    """Each image has another label than the proposed one; none is lost, none is set twice."""
    store, port = tmp_path / "store", free_port()
    wanted = [CLASSES[(number * 7 + 3) % 10] for number in range(240)]
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(serving_data(store, port=port))
        add_pool(served, "cars", range(240))
        queue = add_queue(served, "cars", range(240))
        show(browser, served, "cars", 24)
        for number, label in enumerate(wanted):
            # In the middle of a grid, and again right after a grid was sent.
            if number in (60, 168):
                if number == 60:
                    browser.wait(AHEAD)
                served.process.kill()
                served.process.wait()
            browser.press(key_of(label))
            if number == 100:
                # A reload in the middle of a grid: what was set is still there.
                browser.call("Page.reload")
                browser.wait(f"{TILES} === 24 && {AT} === 5")
                assert browser.evaluate(CHIPS)[:5] == wanted[96:101]
            if number % 24 != 23:
                continue
            browser.press("Enter")
            if number in (95, 191):
                # The next grid is not there, and labels wait in the browser.
                assert browser.wait(OUTBOX) >= 1
                served = stack.enter_context(serving_data(store, port=port))
            if number < 239:
                browser.wait(f"{AT} === 0 && {TITLES}[0].includes('{number + 1:05d}')")
        browser.wait("!document.getElementById('empty').hidden")
        wait_until_saved(browser)
        assert read_labels(served, "cars") == {find_id(number): label for number, label in enumerate(wanted)}
        versions = list_versions(served, "cars")
        assert [one["counts"]["relabelled"] for one in versions] == [24] * 10 + [0, 0]
        tree = served.ask("GET", "/datasets/cars/loop").json()
        assert [(one["queue"], one["marked"]) for one in tree["queues"]] == [(queue, 240)]
        assert sum(one["samples"] for one in tree["labellers"]) == 240


def test_keys_do_what_the_page_says(browser: Browser, served: Served) -> None:
    add_pool(served, "keys", range(30))
    add_queue(served, "keys", range(30))
    show(browser, served, "keys", 24)
    assert browser.evaluate(CHIPS) == [propose(number) for number in range(24)]
    # Arrows move, as the tiles lie on the screen.
    browser.press("ArrowRight", "ArrowDown")
    assert browser.evaluate(AT) == 9
    browser.press("ArrowUp", "ArrowLeft", "ArrowLeft")
    assert browser.evaluate(AT) == 0
    # A digit, not sure, the proposal; undo takes them back one by one.
    browser.press("5", "x", " ")
    assert browser.evaluate(CHIPS)[:3] == [CLASSES[4], "not sure", propose(2)]
    assert browser.evaluate(AT) == 3
    browser.press("u", "u")
    assert browser.evaluate(CHIPS)[:3] == [CLASSES[4], propose(1), propose(2)]
    assert browser.evaluate(AT) == 1
    browser.press("x", "z")
    assert browser.wait("document.getElementById('zoomed').naturalWidth > 0")
    browser.press("7", "Escape")
    assert browser.evaluate("document.getElementById('zoom').hidden")
    browser.press("Enter")
    browser.wait(f"{TILES} === 6 && {AT} === 0")
    wait_until_saved(browser)
    labels = {find_id(number): propose(number) for number in range(24)} | {find_id(0): CLASSES[4]}
    labels |= {find_id(1): None, find_id(2): CLASSES[6]}
    assert read_labels(served, "keys") == labels | {find_id(number): None for number in range(24, 30)}
    # Undo leads back to the grid before, which is sent again.
    browser.press("u")
    browser.wait(f"{TILES} === 24")
    browser.press("ArrowRight", "ArrowRight", "ArrowRight", "1")
    browser.press("Enter")
    browser.wait(f"{TILES} === 6 && {AT} === 0")
    wait_until_saved(browser)
    assert CLASSES[0] in read_labels(served, "keys").values()
    # Of a button that has the focus, Enter presses it, and accepts no grid.
    browser.evaluate("document.querySelectorAll('.class')[8].focus()")
    browser.press("Enter")
    assert browser.evaluate(CHIPS)[0] == CLASSES[8]
    browser.evaluate("document.activeElement.blur()")
    # Somebody has labelled an image that is shown: it keeps that label, and comes again with it.
    assert set_labels(served, "keys", "", {find_id(25): "other"}, by="ben").status == 201
    browser.press("Enter")
    browser.wait(f"{TILES} === 1 && {CHIPS}[0] === 'other'")
    wait_until_saved(browser)
    assert "1 image got another label" in browser.evaluate("document.getElementById('notice').textContent")
    assert read_labels(served, "keys")[find_id(25)] == "other"


def test_names_and_labels_of_others_are_texts(browser: Browser, served: Served) -> None:
    evil = "<img src=x onerror=window.hit=1>"
    create(served, "evil", splits={"train": 1.0})
    add_images(served, "evil", build_tar({f"{evil[:20]}-{number}.jpg": draw(number) for number in range(3)}))
    rows = [
        {"sha256": find_id(number), "proposed": evil, "arm": evil, "probability": 0.5, "score": 1}
        for number in range(3)
    ]
    body = json.dumps({"picks": rows, "name": evil[:60], "strategy": evil}).encode()
    reply = served.ask("POST", "/datasets/evil/mine", body, {"Content-Type": "application/json"})
    assert reply.status == 201, reply.body
    show(browser, served, "evil", 3)
    browser.press("1")
    browser.press("Enter")
    browser.wait("!document.getElementById('empty').hidden")
    wait_until_saved(browser)
    assert set(read_labels(served, "evil").values()) == {evil}
    browser.evaluate("document.getElementById('open-loop').click()")
    browser.wait("document.querySelector('#loop table') !== null")
    assert browser.evaluate("window.hit === undefined && document.querySelectorAll('img[src=x]').length === 0")
    assert evil in browser.evaluate("document.getElementById('loop').textContent")


def test_many_classes_have_two_letters_and_no_proposal_asks(browser: Browser, served: Served) -> None:
    names = ["apple", "apricot", "banana", "cherry", "date", "elder", "fig", "grape", "kiwi", "lemon", "mango", "zest"]
    add_pool(served, "fruit", range(3), classes=names)
    show(browser, served, "fruit", 3)
    codes = browser.evaluate("[...document.querySelectorAll('.class')].map(one => one.dataset.code)")
    assert len(set(codes)) == len(names)
    assert not {code[0] for code in codes} & set("uxz")
    # A word alone is a slice too: the names that have it.
    for text, tiles in (("00002", 1), ("none", 0), ("", 3)):
        fill(browser, "slice", text)
        browser.wait(f"{TILES} === {tiles} && location.search.includes('slice') === {json.dumps(bool(text))}")
        # What stands in the place of images can be seen.
        seen = browser.evaluate(IN_THE_MIDDLE)
        assert "pool/00002.jpg" in browser.evaluate(TITLES) if tiles else seen.startswith("Nothing is left here")
    # A link that somebody has sent wins over what this tab has shown before.
    for query, tiles in (("slice=*00002*", 1), ("split=unlabelled", 3)):
        browser.open(f"{served.started['url']}/label/fruit?{query}")
        browser.wait(f"{TILES} === {tiles} && location.search === '?{query}' && {DRAWN}")
    browser.press(*codes[names.index("mango")], *codes[names.index("zest")])
    assert browser.evaluate(CHIPS) == ["mango", "zest", "?"]
    # Without a label or a proposal, Enter asks once.
    browser.press("Enter")
    assert "1 image without a label" in browser.evaluate("document.getElementById('notice').textContent")
    assert browser.evaluate(TILES) == 3
    browser.press("Enter")
    browser.wait(f"{TILES} === 1")
    wait_until_saved(browser)
    assert sorted(map(str, read_labels(served, "fruit").values())) == ["None", "mango", "zest"]


def test_a_server_with_tokens_asks_for_one(browser: Browser, tmp_path: Path) -> None:
    store = Store.make(tmp_path / "store").folder
    token: Any = headway("data-token", store, "--add", "anna", "--scopes", "admin", "--json").json()["token"]
    with serving_data(store, token=token) as served:
        add_pool(served, "cars", range(2))
        add_queue(served, "cars", range(2))
        browser.open(f"{served.started['url']}/label/cars")
        browser.wait(ASKS)
        assert browser.evaluate("document.getElementById('token-problem').hidden")
        # A wrong one, with a character that no header takes, is asked for again.
        for text in ("none\u2019", token):
            fill(browser, "token", text)
            browser.evaluate("document.getElementById('token-form').requestSubmit()")
            if text != token:
                browser.wait(f"{ASKS} && !document.getElementById('token-problem').hidden")
        browser.wait(f"{TILES} === 2 && {DRAWN}")
        browser.press("1", "Enter")
        wait_until_saved(browser)
        browser.wait("!document.getElementById('empty').hidden")
        assert list_versions(served, "cars")[0]["by"] == "anna"
