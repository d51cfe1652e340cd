"""All-reduces of this machine, between hosts that are network namespaces: latency and bandwidth from every second size,
the others predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from bench._hosts import Hosts
from bench._plan.sweeps import Sweep

PORT = "29655"
LIMIT_S = 240.0


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


def measured(hosts: int, per_host: int, *, rate_bits_s: float = 200e6, seconds: float = 40.0) -> Local:
    """Runs `headway bench-links` on such hosts.

    Raises:
        RuntimeError: it failed. HostsError: there can be no hosts here.
    """
    with Hosts(hosts, rate_bits_s) as net:
        processes = [
            net.run(
                host,
                [sys.executable, "-m", "headway", "bench-links", "--json", "--seconds", f"{seconds:g}"],
                env=environment(net, host, local, hosts, per_host),
                stdout=subprocess.PIPE if host + local == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in range(hosts)
            for local in range(per_host)
        ]
        try:
            out = processes[0].communicate(timeout=seconds + LIMIT_S)[0]
        finally:
            for one in processes:
                with suppress(subprocess.TimeoutExpired):
                    one.wait(20.0)
                one.kill()
    if not out.strip():
        raise RuntimeError("headway bench-links said nothing")
    found = defaultdict[str, list[tuple[float, float]]](list)
    for row in json.loads(out)["rows"]:
        found[row["algorithm"]].append((float(row["bytes"]), float(row["seconds"])))
    ranks = hosts * per_host
    names = {name: f"{hosts} hosts x {per_host} here, {name}" for name in found}
    return Local(
        hosts,
        per_host,
        tuple(Sweep("Gloo", names[name], ranks, tuple(sorted(points))) for name, points in found.items()),
    )


def environment(net: Hosts, host: int, local: int, hosts: int, per_host: int) -> dict[str, str]:
    """As a launcher sets it."""
    return {
        "MASTER_ADDR": net.addresses[0],
        "MASTER_PORT": PORT,
        "RANK": str(host * per_host + local),
        "WORLD_SIZE": str(hosts * per_host),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
