"""CPU time of this run's own processes, to tell it from that of other programs on the host."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from headway.core.cpu_count import read_local_ranks

PROC = Path("/proc")
_TICKS_S = os.sysconf("SC_CLK_TCK")
# User and system time of a process, and of its children that have ended, counted behind the name in /proc/PID/stat.
_TIME_FIELDS = slice(11, 15)


def find_run_root() -> int:
    """Returns the process whose descendants are this run: the launcher of the ranks on this host, or this process."""
    return os.getppid() if (read_local_ranks() or 1) > 1 else os.getpid()


def read_tree_seconds(root: int, *, proc: Path = PROC) -> float:
    """Returns the CPU seconds of a process and of all its descendants, also of those that have ended."""
    seconds, waiting = 0.0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            # The name may contain spaces and brackets, so fields count from the last bracket.
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            seconds += sum(map(int, fields[_TIME_FIELDS])) / _TICKS_S
            waiting += _list_children(pid, proc)
        # A process may end at any moment; its parent counts its time then.
        except (OSError, ValueError, psutil.Error):
            continue
    return seconds


def _list_children(pid: int, proc: Path) -> list[int]:
    folder = proc / str(pid) / "task"
    files = [folder / thread / "children" for thread in os.listdir(folder)]
    # Reading them takes 0.01 ms a thread. Some kernels lack these files, and then every process is looked at.
    if files and not files[0].exists():
        return [child.pid for child in psutil.Process(pid).children()]
    out: list[int] = []
    for path in files:
        try:
            out += map(int, path.read_text().split())
        # The thread has ended.
        except FileNotFoundError:
            continue
    return out
