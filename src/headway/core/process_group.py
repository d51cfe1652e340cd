"""Child processes that lead a group of their own: whether they have ended, when they began, and how all of them end."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

POLL_S = 0.05


def has_ended(pid: int) -> bool:
    """Returns True if a child has ended. It stays a zombie until it is waited for, and so keeps its number."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def wait_for_end(pid: int, timeout_s: float) -> bool:
    """Waits until a child has ended, and returns True; False after a timeout. The child stays a zombie."""
    until = time.monotonic() + timeout_s
    while not has_ended(pid):
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_S)
    return True


def signal_group(pid: int, number: signal.Signals) -> None:
    """Sends a signal to all processes of a group; to none if they have ended.

    Before its leader is waited for: from then on its number may be that of another process.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def read_start_time(pid: int) -> float:
    """Returns the start time of a process, to tell it from a later one with the same id.

    Raises:
        psutil.NoSuchProcess: there is no such process.
    """
    # Ticks since boot: psutil's seconds change when the clock is set.
    with suppress(FileNotFoundError, ProcessLookupError):
        # Split behind the last bracket, since the process name may contain some; the start time is field 22.
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    return psutil.Process(pid).create_time()
