"""Audit log: one line of JSON for each request that changed something, or that was refused a change."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, final

MAX_TEXT = 1000
"""Most characters of one value: a client chooses some of them."""
FILE_BYTES, KEPT_FILES = 64 << 20, 4
"""Size at which a file is set aside as `audit.jsonl.1`, and how many of them are kept."""
REFUSALS_MINUTE = 600
"""Most lines a minute about requests that were refused: somebody without a token must not fill the disk."""
_MINUTE_S = 60.0


@final
class AuditLog:
    """Appends lines to a file. Each line is written at once, so that lines of several threads do not mix."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._open()
        # Who was refused what in this minute, and how many requests got no line of their own.
        self._minute_s, self._seen, self._left_out = 0.0, set[tuple[Any, ...]](), 0

    def add(self, **facts: Any) -> None:
        """Appends a line with the time and these facts. Texts are escaped as JSON does, and cut."""
        row = {"time_s": round(time.time(), 3)} | facts
        kept = {name: value[:MAX_TEXT] if isinstance(value, str) else value for name, value in row.items()}
        # A line break in a value is \n here, so that no client can write a line of its own.
        line = f"{json.dumps(kept)}\n".encode()
        if self._size and self._size + len(line) > FILE_BYTES:
            self._rotate()
        self._size += os.write(self._descriptor, line)

    def add_refusal(self, **facts: Any) -> None:
        """Appends a line about a request that was refused: one a minute for each address, token and status."""
        now = time.monotonic()
        if now - self._minute_s >= _MINUTE_S:
            left_out, self._left_out = self._left_out, 0
            self._minute_s = now
            self._seen.clear()
            if left_out:
                self.add(left_out=left_out)
        who = (facts.get("address"), facts.get("by"), facts.get("status"))
        if who in self._seen or len(self._seen) >= REFUSALS_MINUTE:
            self._left_out += 1
            return
        self._seen.add(who)
        self.add(**facts)

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def _open(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._path, flags, 0o600)
        self._size = os.fstat(self._descriptor).st_size

    def _rotate(self) -> None:
        os.close(self._descriptor)
        for number in range(KEPT_FILES, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                os.replace(newer, older)
        self._open()
