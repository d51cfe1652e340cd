"""All-reduces on this machine, between hosts that are network namespaces. Latency and bandwidth are fitted to every
second size; the other sizes are predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from bench._hosts import Hosts
from bench._network.layout import Layout
from bench._plan.sweeps import Sweep

PORT = "29655"
LIMIT_S = 480.0
BURST_BYTES = 4 << 10
"""Two frames. With 128 KB the bytes of small sums cost nothing, and no line goes through all sizes: half of them were
0.27 off or more, in place of 0.04."""


@final
@dataclass(frozen=True)
class Local:
    """Attributes: hosts, per_host: processes. sweeps: one for each algorithm."""

    hosts: int
    per_host: int
    sweeps: tuple[Sweep, ...]

    @property
    def errors(self) -> list[float]:
        return [error for one in self.sweeps for error in one.errors]


def measured(hosts: int, per_host: int, *, rate_bits_s: float = 200e6, rounds: int = 12) -> Local:
    """Runs bench/_plan/sums.py on such hosts.

    Raises:
        RuntimeError: it failed. HostsError: there can be no hosts here.
    """
    argv = [sys.executable, "-m", "bench._plan.sums", str(rounds)]
    with Hosts(hosts, rate_bits_s, burst_bytes=BURST_BYTES) as net:
        processes = started(net, Layout(hosts, per_host), argv)
        try:
            out = processes[0].communicate(timeout=LIMIT_S)[0]
        finally:
            for one in processes:
                with suppress(subprocess.TimeoutExpired):
                    one.wait(20.0)
                one.kill()
    if not out.strip():
        raise RuntimeError("the ranks have not come to their end")
    found = defaultdict[str, list[tuple[float, float]]](list)
    for algorithm, nbytes, taken in json.loads(out):
        found[algorithm].append((nbytes, taken))
    ranks = hosts * per_host
    names = {name: f"{hosts} hosts x {per_host} here, {name}" for name in found}
    return Local(
        hosts,
        per_host,
        tuple(Sweep("Gloo", names[name], ranks, tuple(sorted(points))) for name, points in found.items()),
    )


def started(net: Hosts, layout: Layout, argv: Sequence[str]) -> list[subprocess.Popen[str]]:
    """A process for each rank, with what a launcher tells it; rank 0 is heard."""
    return [
        net.run(
            layout.host(rank),
            argv,
            env=environment(net, layout, rank),
            stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(layout.size)
    ]


def environment(net: Hosts, layout: Layout, rank: int) -> dict[str, str]:
    """As a launcher sets it."""
    return {
        "MASTER_ADDR": net.addresses[0],
        "MASTER_PORT": PORT,
        "RANK": str(rank),
        "WORLD_SIZE": str(layout.size),
        "LOCAL_RANK": str(layout.local_rank(rank)),
        "LOCAL_WORLD_SIZE": str(layout.per_host),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
