"""Ends every process that a bench has started when the bench ends, however it ends.

A bench marks its environment. All descendants inherit the mark, also those in other process groups, sessions and
network namespaces, and those whose parents have died. A guard process waits until the bench is gone and kills all
marked processes. SIGKILL ends stopped processes too.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

MARK = "HEADWAY_BENCH_FAMILY"
"""Names the benches that a process belongs to, each as `;PID.TIME`; a bench that another one starts has two."""
PROCESSES = Path("/proc")
LOOK_S, LOOKS = 0.02, 3
"""A process that is in the middle of `exec` shows no environment; so the guard looks until it has found nothing so
often in a row."""


def run_bench(main: Callable[[], None]) -> None:
    """Runs a bench's `main` and makes sure that no process it starts survives it.

    SIGTERM and SIGHUP end it as Ctrl-C does: temporary files are removed. A second one ends it at once.
    """
    family = f";{os.getpid()}.{time.time_ns()}"
    own = os.pidfd_open(os.getpid())
    environ = {name: value for name, value in os.environ.items() if name != MARK}
    # Its own session: neither Ctrl-C nor a signal to the bench's group reaches the guard.
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, family, str(own)],
        env=environ,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(own,),
        start_new_session=True,
    )
    os.close(own)
    os.environ[MARK] = os.environ.get(MARK, "") + family
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    main()
    # The guard outlives this process, on purpose; Popen's destructor would warn of that.
    guard.returncode = 0


def _end(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    sys.exit(128 + number)


def _guard(family: str, bench: int) -> None:
    """Waits for the end of the process behind a descriptor, and kills what is left of its family."""
    poll = select.poll()
    poll.register(bench, select.POLLIN)
    poll.poll()
    quiet = 0
    while quiet < LOOKS:
        quiet += 1
        for pid in _members(family.encode()):
            quiet = 0
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)


def _members(family: bytes) -> Iterator[int]:
    """Processes whose environment names a family. Those that have ended and await their parent show none."""
    for folder in PROCESSES.iterdir():
        if not folder.name.isdigit():
            continue
        # It may end meanwhile, or belong to another user.
        with suppress(OSError):
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(MARK.encode() + b"=") and family in variable:
                    yield int(folder.name)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
