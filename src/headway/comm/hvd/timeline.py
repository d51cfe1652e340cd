"""A timeline of the operations as a Chrome trace (chrome://tracing, ui.perfetto.dev), written by rank 0.

Each operation's name is a row: from the first rank's request to the last one's, with a tick for each, and then the
operation itself.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, final


@final
class Timeline:
    """Records events while a file is open. Any thread may call it; the file is complete JSON after every event."""

    def __init__(self) -> None:
        # The negotiator, the executors and the user's threads record.
        self._lock = threading.Lock()
        self._file: Any = None
        self._rows: dict[str, int] = {}
        self._request_times_us: dict[str, float] = {}
        self._marks_cycles = False
        self._start_s = 0.0

    def start(self, path: str | Path, mark_cycles: bool = False) -> None:
        """Starts to record into a new file, and closes the one that is open."""
        self.stop()
        with self._lock:
            # Closed by stop().
            self._file = open(path, "wb")  # noqa: SIM115
            self._file.write(b"[]")
            self._rows, self._request_times_us = {}, {}
            self._marks_cycles = mark_cycles
            self._start_s = time.perf_counter()
            start_us = int(time.time() * 1e6)
            self._write(name="process_name", ph="M", pid=0, args={"start_time_since_epoch_in_micros": start_us})

    def stop(self) -> None:
        """Closes the file, if one is open."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def record_request(self, name: str, rank: int) -> None:
        """Records that a rank has requested an operation."""
        with self._lock:
            if self._file is not None:
                self._request_times_us.setdefault(name, self._now_us())
                self._write(name=f"{rank}", ph="i", s="p", pid=self._get_row(name), tid=0, ts=self._now_us())

    def record_agreement(self, name: str, kind: str) -> None:
        """Records that all ranks have requested an operation."""
        with self._lock:
            if self._file is not None and name in self._request_times_us:
                self._write_span(f"NEGOTIATE_{kind.upper()}", name, self._request_times_us.pop(name))

    def record_done(self, name: str, kind: str, start_s: float) -> None:
        """Records that an operation was executed, from `start_s` (`perf_counter`) until now."""
        with self._lock:
            if self._file is not None:
                self._write_span(kind.upper(), name, (start_s - self._start_s) * 1e6)

    def record_cycle(self) -> None:
        """Records that a round is handed out."""
        with self._lock:
            if self._file is not None and self._marks_cycles:
                self._write(name="CYCLE_START", ph="i", s="g", pid=0, tid=0, ts=self._now_us())

    def _now_us(self) -> float:
        return (time.perf_counter() - self._start_s) * 1e6

    def _write_span(self, label: str, name: str, start_us: float) -> None:
        self._write(name=label, ph="X", pid=self._get_row(name), tid=0, ts=start_us, dur=self._now_us() - start_us)

    def _get_row(self, name: str) -> int:
        # Viewers draw a row for each pid.
        row = self._rows.get(name)
        if row is None:
            row = self._rows[name] = len(self._rows) + 1
            self._write(name="process_name", ph="M", pid=row, args={"name": name})
        return row

    def _write(self, **event: Any) -> None:
        # Over the closing bracket, which follows again: a killed run leaves complete JSON.
        self._file.seek(-1, 1)
        separator = b"\n" if self._file.tell() == 1 else b",\n"
        self._file.write(separator + json.dumps(event).encode() + b"]")
        self._file.flush()
