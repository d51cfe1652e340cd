"""The page of numbers, over real sockets."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from tests._support import free_port

from headway.core.errors import UsageError
from headway.observe.prometheus import DEFAULT_ADDRESS, PrometheusEndpoint, format_exposition

LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (\S+)')


def parsed(page: str) -> dict[str, float]:
    """By the grammar of the text format: each name has its type before it, and is there once."""
    found: dict[str, float] = {}
    kind = ""
    assert page.endswith("\n")
    for line in page.splitlines():
        if line.startswith("# TYPE "):
            _, _, kind, what = line.split(" ")
            assert what == "gauge"
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        assert match[1] == kind
        assert match[1] not in found
        found[match[1]] = float(match[3])
    return found


@pytest.fixture
def port() -> int:
    return free_port()


def get(port: int, path: str = "/metrics") -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def eventually(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_it_answers_with_what_is_known_now(port: int) -> None:
    gauges = {"step": 3.0, "train_loss": 0.25}
    with PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: gauges, {"run": "a"}):
        status, kind, page = get(port)
        assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert parsed(page) == {"headway_step": 3, "headway_train_loss": 0.25}
        assert '{run="a"}' in page
        gauges["step"] = 4.0
        assert parsed(get(port, "/metrics?x=1")[2])["headway_step"] == 4
        assert get(port, "/")[0] == 404
        assert get(port, "/../../etc/passwd")[0] == 404
    with pytest.raises(OSError, match="refused"):
        get(port)


def test_names_and_labels_that_the_format_cannot_hold() -> None:
    gauges = {"train/top-5 \u732b": 1.0, "train_top_5__": 2.0, "nan": math.nan, "up": math.inf, "down": -math.inf}
    page = format_exposition(gauges, {"run": 'a"b\\c\nd'})
    found = parsed(page)
    assert math.isnan(found.pop("headway_nan"))
    assert found == {"headway_train_top_5__": 1.0, "headway_up": math.inf, "headway_down": -math.inf}
    assert r'run="a\"b\\c\nd"' in page


def test_no_numbers_are_an_empty_page(port: int) -> None:
    with PrometheusEndpoint(DEFAULT_ADDRESS, port, dict, {}):
        assert get(port)[::2] == (200, "")


def test_those_who_connect_and_say_nothing_or_nonsense_hold_it_up_for_a_moment(port: int) -> None:
    address = ("127.0.0.1", port)
    with PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: {"step": 1.0}, {}):
        with socket.create_connection(address), socket.create_connection(address) as odd:
            odd.sendall(b"\xff\xfe nonsense\r\n\r\n")
            assert parsed(get(port)[2]) == {"headway_step": 1}
        with socket.create_connection(address) as gone:
            gone.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert parsed(get(port)[2]) == {"headway_step": 1}


def test_many_ask_at_once(port: int) -> None:
    pages: list[str] = []
    with PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: {"step": 1.0}, {}):
        threads = [threading.Thread(target=lambda: pages.append(get(port)[2])) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [parsed(page) for page in pages] == [{"headway_step": 1}] * 4


def test_a_port_that_is_taken_is_refused(port: int) -> None:
    with (
        PrometheusEndpoint(DEFAULT_ADDRESS, port, dict, {}),
        pytest.raises(UsageError, match=f"port {port} of 127.*Set another port"),
    ):
        PrometheusEndpoint(DEFAULT_ADDRESS, port, dict, {}).__enter__()


def test_another_process_takes_over_the_port_of_one_that_is_lost(port: int) -> None:
    leads = False
    with PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: {"step": 2.0}, {}, is_lead=lambda: leads):
        with PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: {"step": 1.0}, {}):
            assert parsed(get(port)[2]) == {"headway_step": 1}
        leads = True

        def answers() -> bool:
            try:
                return parsed(get(port)[2]) == {"headway_step": 2}
            except OSError:
                return False

        eventually(answers)


def test_one_that_cannot_take_over_leaves_the_run_alone(port: int, caplog: pytest.LogCaptureFixture) -> None:
    leads = False
    with (
        PrometheusEndpoint(DEFAULT_ADDRESS, port, dict, {}, is_lead=lambda: leads) as second,
        PrometheusEndpoint(DEFAULT_ADDRESS, port, lambda: {"step": 1.0}, {}),
    ):
        leads = True
        eventually(lambda: "cannot be used" in caplog.text)
        assert parsed(get(port)[2]) == {"headway_step": 1}
    assert second is not None
