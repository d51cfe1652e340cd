"""A headless Chromium that benches and tests type into: the DevTools protocol over pipes, without any package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
QUIET = (
    "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)
WAIT_S = 90.0
"""For what takes hundredths of a second; on a busy machine, longer."""
_NAMED = {
    "Enter": ("\r", 13),
    " ": (" ", 32),
    "Escape": ("", 27),
    "ArrowLeft": ("", 37),
    "ArrowUp": ("", 38),
    "ArrowRight": ("", 39),
    "ArrowDown": ("", 40),
}


class Browser:
    """One tab. `faults` are exceptions of the page, and what its console or its security policy complains about."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._number, self._rest = send, receive, 0, b""
        self._session: str | None = None
        self.faults = list[str]()

    def attach(self, width: int, height: int) -> None:
        # The tab that it starts with: while it has no window yet, it refuses to make another one.
        until = time.monotonic() + WAIT_S
        while not (tabs := [one for one in self._list_targets() if one["type"] == "page"]):
            assert time.monotonic() < until, "the browser has no tab"
            time.sleep(0.02)
        target = tabs[0]["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _list_targets(self) -> list[dict[str, Any]]:
        targets: list[dict[str, Any]] = self.call("Target.getTargets")["targetInfos"]
        return targets

    def call(self, method: str, **parameters: Any) -> Any:
        """One command; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + WAIT_S
        while True:
            found = self._read(until)
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._receive, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        tree: dict[str, Any] = json.loads(text)
        return tree

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            details = event["params"]["exceptionDetails"]
            self.faults.append(str(details.get("exception", {}).get("description", details["text"])))
        if event.get("method") == "Log.entryAdded":
            entry = event["params"]["entry"]
            # A server that is away, or refuses something, is what some tests are about.
            if entry["level"] == "error" and entry["source"] != "network":
                self.faults.append(entry["text"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, pause_s: float = 0.02) -> Any:
        """Waits until an expression is true; returns it."""
        until = time.monotonic() + WAIT_S
        # While a page loads, there may be nothing to look at.
        while not (value := self.evaluate(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")):
            assert time.monotonic() < until, (expression, self.faults, self.evaluate("document.body.innerText")[:500])
            time.sleep(pause_s)
        return value

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other."""
        for key in keys:
            text, code = _NAMED.get(key, (key, ord(key.upper()[0])))
            down = {"key": key, "windowsVirtualKeyCode": code} | ({"text": text} if text else {})
            self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **down)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def set_dark(self, is_dark: bool) -> None:
        value = "dark" if is_dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def draw(self, path: Path) -> None:
        """Writes what the tab shows as a PNG or WebP file."""
        kind = {".png": {"format": "png"}, ".webp": {"format": "webp", "quality": 85}}[path.suffix]
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **kind)["data"]))


@contextlib.contextmanager
def browsing(folder: Path, *, width: int = 1280, height: int = 800) -> Iterator[Browser]:
    """A browser with a new profile in a folder; it ends with the block, and leaves nothing."""
    assert BROWSER is not None
    profile = folder / "browser"
    pipes = [os.pipe(), os.pipe()]
    # Above the numbers that the browser uses, so that none is overwritten before it is copied.
    command_read, answer_write = (fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (pipes[0][0], pipes[1][1]))
    shell = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    flags = ["--headless", "--no-sandbox", *QUIET.split(), "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", BROWSER, *flags, "about:blank"],
        pass_fds=(command_read, answer_write),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (command_read, answer_write, pipes[0][0], pipes[1][1]):
        os.close(end)
    try:
        browser = Browser(pipes[0][1], pipes[1][0])
        browser.attach(width, height)
        yield browser
    finally:
        with contextlib.suppress(AssertionError, OSError):
            browser._session = None
            browser.call("Browser.close")
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(pipes[0][1])
        os.close(pipes[1][0])
        shutil.rmtree(profile, ignore_errors=True)
