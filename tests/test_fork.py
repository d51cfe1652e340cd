"""A fork of the preloaded server is like a new interpreter, for all that a program can see of how it was started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import _fork

SHOWS = """
import json, os, pathlib, signal, sys, warnings

def actions():
    return {n.name: str(signal.getsignal(n)).split(" at ")[0] for n in signal.Signals if n not in (9, 19)}

print(json.dumps({
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path[:2], "name": __name__,
    "file": globals().get("__file__"), "main": __import__("__main__").__dict__ is globals(),
    "environ": dict(os.environ), "parent": os.getppid(), "head": os.getpgid(0) == os.getpid(),
    "actions": actions(), "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "umask": os.umask(0),
    "shown": pathlib.Path("/proc/self/cmdline").read_text().rstrip(chr(0)).split(chr(0)), "read": sys.stdin.read(),
    "tty": sys.stdout.line_buffering, "filters": warnings.filters[-1][0], "cores": sorted(os.sched_getaffinity(0)),
    "environment": sorted(filter(None, pathlib.Path("/proc/self/environ").read_text().split(chr(0)))),
}))
print("to the other side", file=sys.stderr)
"""


@pytest.fixture(params=["fork", "fresh"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with _fork.fresh() if request.param == "fresh" else nullcontext():
        yield request.param


def test_what_a_program_sees_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "shows.py").write_text(SHOWS)
    environ = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "PYTHONPATH": str(tmp_path / "more")}
    for start in (("-c", SHOWS), ("-m", "shows"), ("shows.py",), ("-W", "error", "-P", "-c", SHOWS)):
        command = [sys.executable, *start, "one", "two words"]
        said = []
        for way in (nullcontext, _fork.fresh):
            with way():
                process = subprocess.Popen(
                    command, cwd=tmp_path, env=environ, process_group=0, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
                said.append((*process.communicate("what stdin holds"), process.returncode))
        assert json.loads(said[0][0]) == json.loads(said[1][0])
        assert said[0][1:] == said[1][1:] == ("to the other side\n", 0)
        assert json.loads(said[0][0])["parent"] == os.getpid()


@pytest.mark.parametrize(
    ("code", "status", "out", "err"),
    [
        ("pass", 0, "", ""),
        ("import sys; sys.exit(3)", 3, "", ""),
        ("import sys; sys.exit('a sentence')", 1, "", "a sentence\n"),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", 0, "late\n", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "", ""),
        ("import os; os.abort()", -signal.SIGABRT, "", ""),
        ("1 / 0", 1, "", "ZeroDivisionError: division by zero\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "", "KeyboardInterrupt\n"),
    ],
)
def test_how_a_program_ends(code: str, status: int, out: str, err: str, way: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(err)
    assert (err != "") == (done.stderr != "")


NESTED = """
import os, subprocess, sys
print(os.getpid(), flush=True)
subprocess.run([sys.executable, "-c", "import os, sys; print(os.getppid(), 'torch' in dir(sys))"], check=True)
"""


def test_a_program_that_starts_programs_is_their_parent(way: str) -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, check=True)
    mine, parent, _ = done.stdout.split()
    assert mine == parent


def test_a_fork_has_torch_and_a_new_interpreter_has_not(way: str) -> None:
    code = "import sys; print('torch' in getattr(sys, 'mod' + 'ules'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{way == 'fork'}\n"


def test_nothing_is_left_of_what_was_killed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", NESTED + "\nimport time; time.sleep(600)"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert psutil.wait_procs(family, timeout=60)[1] == []


@pytest.mark.parametrize("options", [{"process_group": 0}, {"start_new_session": True}])
def test_its_group_is_there_as_soon_as_it_is_started(options: dict[str, Any], way: str) -> None:
    for _ in range(20 if way == "fork" else 1):
        with subprocess.Popen([sys.executable, "-c", "pass"], **options) as process:
            assert os.getpgid(process.pid) == process.pid
