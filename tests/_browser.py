"""A headless Chromium for tests that look at pages."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench._devtools import BROWSER, QUIET

__all__ = ["BROWSER", "QUIET", "open_in_browser"]


def open_in_browser(page: Path, *flags: str) -> tuple[str, list[str]]:
    """The document as it stands after its scripts ran, and the lines of the console."""
    assert BROWSER is not None
    profile = page.parent / f"profile-{page.stem}"
    shown = ["--enable-logging=stderr", "--v=0", "--virtual-time-budget=5000", "--dump-dom", page.as_uri()]
    command = [BROWSER, "--headless", "--no-sandbox", *QUIET.split(), f"--user-data-dir={profile}", *flags, *shown]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
