"""Workers: the processes of a run on this host. One thread reads what they write and notices when they end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, final

from headway.core.cpu_count import count_usable_cores

POLL_S = 0.05
"""How often the processes are looked at; losses are noticed sooner, by their connections."""
LONGEST_LINE = 1 << 16

OUT, ERR = 1, 2

Show = Callable[[str, int, str], None]
"""Called with a worker's id, OUT or ERR, and whole lines."""
Ended = Callable[[str, int, str], None]
"""Called with a worker's id, its exit status (negative: the signal that ended it), and why where that is known."""


class Crew(Protocol):
    """The workers of one host."""

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit: bool) -> None:
        """Starts a process of Python with these arguments.

        Args:
            environ: beside this process's own.
            inherit: it writes where this process writes.
        """

    def signal(self, worker: str, number: int) -> None:
        """Sends a signal, where the worker still runs; SIGKILL also to what it has started."""

    def beat(self) -> None:
        """A sign of life from the launcher; called all the time."""

    def close(self) -> None:
        """Kills what still runs."""


@final
class Workers:
    """The crew of this host. Each worker is the head of a process group, so that the terminal's Ctrl-C reaches the
    launcher alone, and what a dead worker has left running goes with it."""

    def __init__(self, show: Show, ended: Ended) -> None:
        self._show, self._ended = show, ended
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._pipes: dict[int, _Pipe] = {}
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit: bool) -> None:
        whole = {**os.environ, **environ}
        whole.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost worker is told in a sentence, not in torch's stacks
        whole.setdefault(
            "OMP_NUM_THREADS", str(max(1, count_usable_cores() // int(environ.get("LOCAL_WORLD_SIZE", "1"))))
        )
        ends = None if inherit else subprocess.PIPE
        with self._lock:
            try:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env=whole,
                    stdin=subprocess.DEVNULL,
                    stdout=ends,
                    stderr=ends,
                    process_group=0,
                )
            except OSError as error:  # no more processes, or no memory for one
                self._ended(worker, 1, f"it could not be started ({error})")
                return
            self._running[worker] = process
            for stream, end in ((OUT, process.stdout), (ERR, process.stderr)):
                if end is not None:
                    os.set_blocking(end.fileno(), False)
                    self._pipes[end.fileno()] = _Pipe(worker, stream)
                    self._selector.register(end, selectors.EVENT_READ)

    def signal(self, worker: str, number: int) -> None:
        with self._lock:
            process = self._running.get(worker)
            if process is not None:  # it is waited for under the lock: its number is still its own
                (os.killpg if number == signal.SIGKILL else os.kill)(process.pid, number)

    def beat(self) -> None:
        pass

    def close(self) -> None:
        for worker in tuple(self._running):
            self.signal(worker, signal.SIGKILL)
        self._closing = True
        self._thread.join()
        self._selector.close()

    def _run(self) -> None:
        while self._running or not self._closing:
            for key, _ in self._selector.select(POLL_S):
                self._read(key.fd)
            for worker, process in tuple(self._running.items()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    self._finish(worker, process)

    def _read(self, number: int) -> bool:
        """Hands on what lies in a pipe; False where nothing does, or nothing will any more."""
        pipe = self._pipes[number]
        try:
            data = os.read(number, LONGEST_LINE)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(number)
            return False
        lines = pipe.whole_lines(data)
        if lines:
            self._show(pipe.worker, pipe.stream, lines)
        return True

    def _finish(self, worker: str, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
            del self._running[worker]
        for end in (process.stdout, process.stderr):
            if end is None:
                continue
            number = end.fileno()
            if number in self._selector.get_map():
                while self._read(number):
                    pass
            if number in self._selector.get_map():
                self._selector.unregister(number)
            pipe = self._pipes.pop(number)
            if rest := pipe.rest():
                self._show(worker, pipe.stream, rest)
            end.close()
        self._ended(worker, status, "")


@final
class _Pipe:
    """One stream of a worker, cut into lines."""

    def __init__(self, worker: str, stream: int) -> None:
        self.worker, self.stream = worker, stream
        self._begun = b""

    def whole_lines(self, data: bytes) -> str:
        lines, end, self._begun = (self._begun + data).rpartition(b"\n")
        if len(self._begun) > LONGEST_LINE:
            return self.rest()
        return (lines + end).decode(errors="replace")

    def rest(self) -> str:
        text, self._begun = self._begun.decode(errors="replace"), b""
        return text and text + "\n"
