"""Real ranks for tests: `run_ranks(4, function, ...)` runs `function(rank, ...)` in four processes at once.

The processes are forked by a server that has imported torch (multiprocessing's forkserver), so that a rank starts in
hundredths of a second; they share a TCPStore that lives in the test's own process.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 10.0
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
        from headway.core.world import World

        return World.of(
            self.store,
            self.rank,
            self.size,
            torch.device("cpu"),
            master="127.0.0.1",
            timeout_s=self.timeout_s,
            interface="lo",
            identities=[f"host-{host}" for host in self.hosts],
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "pytest", "headway.core.recipe"])
    place = hosts or (0,) * size
    assert len(place) == size
    where = (inspect.getfile(function), function.__qualname__)
    processes: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="headway-ranks-") as name:
        folder = Path(name)
        try:
            for number in range(size):
                variables = {**os.environ, **(environ(number) if environ else {})}
                seat = (number, size, server.port, place, group_timeout_s)
                process = context.Process(target=_child, args=(folder, variables, seat, where, args))
                process.start()
                processes.append(process)
            _wait(processes, set(dying), time.monotonic() + timeout_s)
            codes = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        failed = [rank for rank, code in enumerate(codes) if code != 0 and rank not in dying]
        if failed:
            raise AssertionError(_report(folder, codes, failed))
        return [_result(folder / f"{rank}.result") for rank in range(size)]


def _wait(processes: list[Any], dying: set[int], deadline: float) -> None:
    """Until all have ended, or the deadline, or a while after the first that failed."""
    while alive := [process for process in processes if process.is_alive()]:
        left = deadline - time.monotonic()
        if left <= 0:
            for process in alive:
                os.kill(process.pid, signal.SIGCONT)
                os.kill(process.pid, signal.SIGABRT)  # faulthandler writes where it hangs
                process.join(5)
            return
        if all(processes.index(process) in dying for process in alive):
            return
        wait([process.sentinel for process in alive], timeout=left)
        if any(process.exitcode and rank not in dying for rank, process in enumerate(processes)):
            deadline = min(deadline, time.monotonic() + GRACE_S)


def _report(folder: Path, codes: list[int | None], failed: list[int]) -> str:
    parts = [f"ranks {failed} of {len(codes)} failed"]
    for rank, code in enumerate(codes):
        said = folder / f"{rank}.said"
        text = said.read_text(errors="replace") if said.exists() else ""
        parts.append(f"--- rank {rank}: exit status {code}\n{text[-6000:]}")
    return "\n".join(parts)


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _child(
    folder: Path,
    environ: dict[str, str],
    seat: tuple[int, int, int, tuple[int, ...], float],
    where: tuple[str, str],
    args: tuple[Any, ...],
) -> None:
    number, size, port, hosts, timeout_s = seat
    with open(folder / f"{number}.said", "wb", buffering=0) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    os.environ.clear()
    os.environ.update(environ)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
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
