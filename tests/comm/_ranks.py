"""Real ranks for tests: `run_ranks(4, function, ...)` runs `function(rank, ...)` in four processes at once.

The processes are forks of the tests' preloaded server (`tests/_fork.py`), so that a rank starts in hundredths of a
second; they share a TCPStore that lives in the test's own process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from tests.comm import _ranks

_ranks.be(Path(sys.argv[2]), int(sys.argv[3]))
"""
GRACE_S = 30.0
"""After the first failure the other ranks get this long to say what they saw."""


@dataclass
class Rank:
    """What a rank is given; `world` is joined when it is first used, and closed when the function has returned."""

    rank: int
    size: int
    store: TCPStore
    hosts: tuple[int, ...]
    timeout_s: float

    @cached_property
    def world(self) -> Any:
        """The World of all ranks, over loopback; `hosts` of run_ranks says which of them share a host."""
        from headway.core.world import Membership, World

        return World.create(
            self.store,
            Membership(self.rank, self.size, identities=[f"host-{host}" for host in self.hosts]),
            torch.device("cpu"),
            master="127.0.0.1",
            secret=b"of a test",
            timeout_s=self.timeout_s,
            interface="lo",
        )


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    hosts: tuple[int, ...] | None = None,
    environ: Callable[[int], Mapping[str, str]] | None = None,
    timeout_s: float = 120.0,
    group_timeout_s: float = 20.0,
    dying: Collection[int] = (),
) -> list[Any]:
    """Runs `function(rank: Rank, *args)` in `size` processes and returns what each returned, in rank order.

    Args:
        size: number of processes.
        function: of the top level of a test's file; called with warnings as errors and one thread.
        args: picklable, as is what it returns (tensors too).
        hosts: number of the host of each rank; by default all are on one.
        environ: variables of each rank's environment, beyond the test's own.
        timeout_s: after it every rank is killed and the test fails with their tracebacks.
        group_timeout_s: of a collective, in `rank.world`.
        dying: ranks that may end in any way; None stands for their results unless they returned.
    """
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, multi_tenant=False)
    place = hosts or (0,) * size
    assert len(place) == size
    where = (inspect.getfile(function), function.__qualname__)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        folder = Path(name)
        try:
            for number in range(size):
                variables = {**os.environ, **(environ(number) if environ else {})}
                seat = (number, size, server.port, place, group_timeout_s)
                (folder / f"{number}.asked").write_bytes(pickle.dumps((seat, where, args)))
                command = [sys.executable, "-c", PROGRAM, str(ROOT), str(folder), str(number)]
                with open(folder / f"{number}.said", "wb") as said:
                    processes.append(subprocess.Popen(command, env=variables, stdout=said, stderr=said))
            _wait(processes, set(dying), time.monotonic() + timeout_s)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        failed = [rank for rank, code in enumerate(codes) if code != 0 and rank not in dying]
        if failed:
            raise AssertionError(_report(folder, codes, failed))
        return [_result(folder / f"{rank}.result") for rank in range(size)]


def _wait(processes: list[subprocess.Popen[bytes]], dying: set[int], deadline: float) -> None:
    """Until all have ended, or the deadline, or a while after the first that failed."""
    while alive := [process for process in processes if process.poll() is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            for process in alive:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGABRT)  # faulthandler writes where it hangs
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            return
        if all(processes.index(process) in dying for process in alive):
            return
        _wait_for_an_end([process.pid for process in alive], left)
        if any(process.poll() and rank not in dying for rank, process in enumerate(processes)):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _wait_for_an_end(pids: list[int], timeout_s: float) -> None:
    descriptors = [os.pidfd_open(pid) for pid in pids]
    try:
        wait(descriptors, timeout_s)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _report(folder: Path, codes: list[int | None], failed: list[int]) -> str:
    parts = [f"ranks {failed} of {len(codes)} failed"]
    for rank, code in enumerate(codes):
        said = folder / f"{rank}.said"
        text = said.read_text(errors="replace") if said.exists() else ""
        parts.append(f"--- rank {rank}: exit status {code}\n{text[-6000:]}")
    return "\n".join(parts)


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def be(folder: Path, number: int) -> None:
    """Runs what was asked of this rank; its process ends with it."""
    (_, size, port, hosts, timeout_s), where, args = pickle.loads((folder / f"{number}.asked").read_bytes())
    faulthandler.enable(sys.stderr)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".torch.jit.script_method. is deprecated")
    status = 1
    try:
        rank = Rank(number, size, TCPStore("127.0.0.1", port, is_master=False), hosts, timeout_s)
        result = _loaded(*where)(rank, *args)
        if "world" in vars(rank):
            rank.world.close()
        path = folder / f"{number}.result"
        path.with_suffix(".part").write_bytes(pickle.dumps(result))
        path.with_suffix(".part").rename(path)
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a rank whose peer died has sockets and threads that an orderly end would wait for


def _loaded(path: str, name: str) -> Callable[..., Any]:
    spec = importlib.util.spec_from_file_location("ranks_test_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, name)
