"""A bench that ends, however it ends, leaves no process behind: stopped ones and those of other sessions too."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from bench._arms import ROOT

LIMIT_S = 60.0

# An arm with a worker in a session of its own, which forks once more and stops itself.
WORKER = "import os, signal; os.fork(); os.kill(os.getpid(), signal.SIGSTOP); signal.pause()"
ARM = f"""
import subprocess, sys
from itertools import repeat
from bench._peers.serve import serve
subprocess.Popen([sys.executable, "-S", "-c", {WORKER!r}], start_new_session=True)
serve(repeat(1), version="1", kernel="none")
"""
BENCH = f"""
import signal, sys
from pathlib import Path
from bench._arms import Comparison
from bench._family import run_bench
def main():
    with Comparison(Path(sys.argv[1])) as arms:
        for name in ("one", "two"):
            arms.add(name, [sys.executable, "-S", "-c", {ARM!r}])
        arms.run(1, 0.01)
        print("begun", flush=True)
        signal.pause()
# A shell in the background has its children ignore Ctrl-C, and whoever runs the tests may be one.
signal.signal(signal.SIGINT, signal.default_int_handler)
run_bench(main)
"""
ENDS = [
    signal.SIGKILL,
    pytest.param(signal.SIGTERM, marks=pytest.mark.check),
    pytest.param(signal.SIGINT, marks=pytest.mark.check),
]


def _start(program: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _wait_for_the_end(descriptors: dict[int, psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in time."""
    poll = select.poll()
    for one in descriptors:
        poll.register(one, select.POLLIN)
    left = dict(descriptors)
    while left and (ended := poll.poll(1e3 * LIMIT_S)):
        for one, _ in ended:
            poll.unregister(one)
            del left[one]
    return list(left.values())


def _wait_for(bench: subprocess.Popen[str], workers: int) -> list[psutil.Process]:
    """Its descendants, once so many forked workers have stopped themselves."""
    while True:
        assert bench.poll() is None
        family = psutil.Process(bench.pid).children(recursive=True)
        stopped = 0
        for one in family:
            with suppress(psutil.Error):
                stopped += WORKER in one.cmdline() and one.status() == psutil.STATUS_STOPPED
        if stopped == workers:
            return family
        time.sleep(0.01)


@pytest.mark.parametrize("end", ENDS)
def test_no_process_survives_its_bench(tmp_path: Path, end: signal.Signals) -> None:
    with ExitStack() as stack:
        bench = stack.enter_context(_start(BENCH, tmp_path))
        stack.callback(bench.kill)
        assert bench.stdout is not None
        assert bench.stdout.readline() == "begun\n"
        # Two arms, each with a worker and its fork; and the guard.
        family = _wait_for(bench, workers=4)
        descriptors = {os.pidfd_open(one.pid): one for one in family}
        for one in descriptors:
            stack.callback(os.close, one)
        bench.send_signal(end)
        left = _wait_for_the_end(descriptors)
        for one in left:
            one.kill()
        assert not left
        assert bench.wait(LIMIT_S) in (-end, 128 + end)
        # Orphans have become our children (conftest.py).
        for one in family:
            with suppress(ChildProcessError):
                os.waitpid(one.pid, 0)


def test_every_bench_ends_its_family() -> None:
    for path in sorted((ROOT / "bench").glob("[!_]*.py")):
        assert path.read_text().endswith('if __name__ == "__main__":\n    run_bench(main)\n'), path


def test_a_bench_that_another_one_starts_belongs_to_both() -> None:
    inner = "import os; from bench import _family; _family.run_bench(lambda: print(os.environ[_family.MARK]))"
    outer = f"""
import os, subprocess, sys
from bench import _family
def main():
    print(os.environ[_family.MARK], flush=True)
    subprocess.run([sys.executable, "-c", {inner!r}], check=True)
_family.run_bench(main)
"""
    with _start(outer) as bench:
        one, both = bench.communicate(timeout=LIMIT_S)[0].splitlines()
    assert one.count(";") == 1
    assert both.startswith(f"{one};")
