"""Starts the workers of this host; one thread reads their output and notices when they end."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol, final

from headway.core.cpu_count import count_usable_cores
from headway.core.process_group import has_ended, signal_group

# The coordinator notices a loss sooner, by its connection.
PROCESS_POLL_S = 0.05

# A longer line is cut.
MAX_LINE_BYTES = 1 << 16

# Reason of the end of workers whose output or end the launcher could not follow any more.
OWN_ERROR = "the launcher has ended its workers after an error of its own"

# File descriptors.
STDOUT, STDERR = 1, 2

OnLines = Callable[[str, int, str], None]
"""Callback for output: worker id, STDOUT or STDERR, whole lines."""
OnEnd = Callable[[str, int, str], None]
"""Callback for the end of a worker: its id, its exit status (negative: the signal), and the reason if it is known."""


class WorkerCrew(Protocol):
    """The workers of one host."""

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit_output: bool) -> None:
        """Starts a Python process. If it cannot be started, its end is reported.

        Args:
            worker: id of the worker.
            command: arguments of the interpreter.
            environ: variables added to this process's own.
            inherit_output: if True, the worker writes to this process's stdout and stderr.
        """

    def signal(self, worker: str, signal_number: int) -> None:
        """Sends a signal to a running worker; SIGKILL also goes to the processes that it started."""

    def beat(self) -> None:
        """Tells the other host that the launcher is alive. Called in every beat."""

    def close(self) -> None:
        """Kills all workers that still run."""


@final
class LocalWorkers:
    """The workers of this host, each the leader of a process group.

    Ctrl-C in the terminal then reaches the launcher alone, and processes that a dead worker leaves behind are killed
    with its group.
    """

    def __init__(self, on_lines: OnLines, on_end: OnEnd) -> None:
        self._on_lines, self._on_end = on_lines, on_end
        self._lock = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._line_buffers: dict[int, _LineBuffer] = {}
        self._selector = selectors.DefaultSelector()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="workers", daemon=True)
        self._thread.start()

    def start(self, worker: str, command: Sequence[str], environ: Mapping[str, str], *, inherit_output: bool) -> None:
        """Starts a worker in a process group of its own; see `WorkerCrew.start`."""
        full_environ = {**os.environ, **environ}
        # The launcher reports a lost worker in a sentence; torch would print C++ stacks on every rank.
        full_environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        # Without this, each of N workers would start threads for all cores, N times too many.
        threads = max(1, count_usable_cores() // int(environ.get("LOCAL_WORLD_SIZE", "1")))
        full_environ.setdefault("OMP_NUM_THREADS", str(threads))
        # A worker that inherits the terminal can draw a progress bar on it.
        output = None if inherit_output else subprocess.PIPE
        with self._lock:
            try:
                process = subprocess.Popen(
                    [sys.executable, *command],
                    env=full_environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            # The limit of processes, or the memory, is exhausted.
            except OSError as error:
                self._on_end(worker, 1, f"it could not be started ({error})")
                return
            self._running[worker] = process
            for stream, pipe in zip((STDOUT, STDERR), _list_pipes(process), strict=False):
                os.set_blocking(pipe.fileno(), False)
                self._line_buffers[pipe.fileno()] = _LineBuffer(worker, stream)
                self._selector.register(pipe, selectors.EVENT_READ)

    def signal(self, worker: str, signal_number: int) -> None:
        """Sends a signal to a worker, and SIGKILL to its whole group; see `WorkerCrew.signal`."""
        with self._lock:
            process = self._running.get(worker)
            # `_finish` waits for the process under the same lock, so its pid cannot belong to another process yet.
            if process is not None and signal_number == signal.SIGKILL:
                signal_group(process.pid, signal.SIGKILL)
            elif process is not None:
                os.kill(process.pid, signal_number)

    def beat(self) -> None:
        """Does nothing, as the workers are on the launcher's own host; see `WorkerCrew.beat`."""

    def close(self) -> None:
        """Kills all workers, and waits until their ends are reported; see `WorkerCrew.close`."""
        for worker in tuple(self._running):
            self.signal(worker, signal.SIGKILL)
        # The thread ends once no worker runs, so that every end is reported.
        self._closing = True
        self._thread.join()
        self._selector.close()

    def _run(self) -> None:
        """Reads the output of all workers, and notices those that have ended."""
        while self._running or not self._closing:
            # Without this thread nobody would learn that a worker has ended, so no error may end it.
            try:
                self._poll()
            except Exception as error:
                self._abandon(error)

    def _poll(self) -> None:
        for key, _ in self._selector.select(PROCESS_POLL_S):
            self._read(key.fd)
        for worker, process in tuple(self._running.items()):
            if has_ended(process.pid):
                self._finish(worker, process)

    def _abandon(self, error: Exception) -> None:
        """Kills all workers after an error of this thread, and reports their ends with its reason."""
        with self._lock:
            for key in tuple(self._selector.get_map().values()):
                self._selector.unregister(key.fd)
            self._line_buffers.clear()
            running, self._running = self._running, {}
            for process in running.values():
                # The block waits for the process, and closes its pipes.
                with process:
                    signal_group(process.pid, signal.SIGKILL)
        for worker in running:
            self._on_end(worker, 1, f"{OWN_ERROR} ({error!r})")

    def _read(self, fd: int) -> bool:
        """Passes on the lines in a pipe. Returns False if there is no data, or the pipe is closed."""
        line_buffer = self._line_buffers[fd]
        try:
            data = os.read(fd, MAX_LINE_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(fd)
            return False
        lines = line_buffer.split_lines(data)
        if lines:
            self._on_lines(line_buffer.worker, line_buffer.stream, lines)
        return True

    def _finish(self, worker: str, process: subprocess.Popen[bytes]) -> None:
        """Kills the rest of a worker's group, passes on its last output, and reports its end."""
        with self._lock:
            # The group first: once the leader is waited for, its number may be reused.
            signal_group(process.pid, signal.SIGKILL)
            status = process.wait()
            del self._running[worker]
        try:
            # The block closes the pipes.
            with process:
                for pipe in _list_pipes(process):
                    self._drain(worker, pipe.fileno())
        finally:
            self._on_end(worker, status, "")

    def _drain(self, worker: str, fd: int) -> None:
        """Passes on what is left in the pipe of a worker that has ended."""
        # A process outside the group may still hold the pipe: read only until it is empty.
        if fd in self._selector.get_map():
            while self._read(fd):
                pass
        if fd in self._selector.get_map():
            self._selector.unregister(fd)
        line_buffer = self._line_buffers.pop(fd)
        if rest := line_buffer.flush():
            self._on_lines(worker, line_buffer.stream, rest)


def _list_pipes(process: subprocess.Popen[bytes]) -> list[IO[bytes]]:
    return [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]


@final
class _LineBuffer:
    """Splits one stream of a worker into lines."""

    def __init__(self, worker: str, stream: int) -> None:
        self.worker, self.stream = worker, stream
        self._rest = b""

    def split_lines(self, data: bytes) -> str:
        """Returns the whole lines that `data` completes, and keeps the rest."""
        lines, newline, self._rest = (self._rest + data).rpartition(b"\n")
        # A worker that writes without line ends must not fill the memory.
        if len(self._rest) > MAX_LINE_BYTES:
            return self.flush()
        return (lines + newline).decode(errors="replace")

    def flush(self) -> str:
        """Returns the rest as a line, and empties the buffer."""
        text, self._rest = self._rest.decode(errors="replace"), b""
        return text and text + "\n"
