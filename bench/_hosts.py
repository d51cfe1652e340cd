"""Several hosts on one machine: one network namespace each, joined by a bridge, every port limited to a rate (tbf).

A host can have several interfaces: eth0, eth1, ..., each with a subnet and a bridge of its own.

Needs root and iproute2. All hosts have the same hostname. Traffic of a host to itself stays on its loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, final

from bench._arms import ROOT

HEADER_BYTES = 14 + 20 + 20 + 12
"""Of a frame: Ethernet, IPv4, TCP, and TCP's timestamps."""

BURST_BYTES = 128 << 10
"""What passes at once after a pause: tbf wants a frame at least, and offloading makes frames of 64 KB."""
NAMES = re.compile(r"hw([0-9a-f]+)-\d+[bnv]\d*")
NAMESPACES, LINKS, PROCESSES = Path("/run/netns"), Path("/sys/class/net"), Path("/proc")
GONE_S = 5.0
_serial = count()


class HostsError(Exception):
    """There can be no such hosts here; the reason."""


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool} on the PATH (Debian: iproute2)"
    try:
        with Hosts(1):
            return None
    except HostsError as error:
        return str(error)


@final
class Hosts:
    """Hosts 10.77.0.1, 10.77.0.2, ... (10.77.1.1, ... on eth1). A context: its end kills what runs on them and removes
    them.

    What a killed process left is removed by the next one that makes hosts.

    Args:
        rate_bits_s: of every host's link, each way; None: as fast as the kernel is. A list: of each interface's link.
        congestion: the congestion control of TCP between them.
        burst_bytes: what passes a link at once after a pause. A real one lets nothing pass, and sums of small arrays
            show it; little is dear, since frames are no larger.

    Raises:
        HostsError: not root, or the kernel lacks namespaces, bridges, tbf or that congestion control.
    """

    def __init__(
        self,
        count: int,
        rate_bits_s: float | Sequence[float | None] | None = 200e6,
        congestion: str = "cubic",
        burst_bytes: int = BURST_BYTES,
    ) -> None:
        self.addresses = tuple(f"10.77.0.{host + 1}" for host in range(count))
        self.rates_bits_s = tuple(rate_bits_s) if isinstance(rate_bits_s, Sequence) else (rate_bits_s,)
        self.congestion, self.burst_bytes = congestion, burst_bytes
        self._prefix = f"hw{os.getpid():x}-{next(_serial)}"
        self._processes: list[subprocess.Popen[Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        _remove_leftovers()
        with ExitStack() as stack:
            for rail in range(len(self.rates_bits_s)):
                _ip("link", "add", self._bridge(rail), "type", "bridge")
                stack.callback(_ip, "link", "del", self._bridge(rail), check=False)
                _ip("link", "set", self._bridge(rail), "up")
            for host in range(len(self.addresses)):
                self._add(host, stack)
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def command(self, host: int, argv: Sequence[str | Path]) -> list[str]:
        """What runs argv on a host."""
        return ["ip", "netns", "exec", self.namespace(host), *map(str, argv)]

    def run(
        self, host: int, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, **more: Any
    ) -> subprocess.Popen[Any]:
        """Starts argv on a host, with these variables beside our own; `more` is Popen's."""
        process = subprocess.Popen(self.command(host, argv), env={**os.environ, **(env or {})}, **{"cwd": ROOT, **more})
        self._processes.append(process)
        return process

    def namespace(self, host: int) -> str:
        """The name that `ip netns` knows a host by."""
        return f"{self._prefix}n{host}"

    def bytes_out(self, host: int, rail: int | None = None) -> int:
        """Bytes that a host has sent so far, frames and all: its port of the bridge has received them.

        Args:
            rail: number of the interface; None: all.
        """
        return sum(self._counter(host, one, "rx_bytes") for one in self._rails(rail))

    def payload_out(self, host: int, rail: int | None = None) -> int:
        """The same without the headers of Ethernet, IPv4 and TCP: what a model of bytes speaks of."""
        packets = sum(self._counter(host, one, "rx_packets") for one in self._rails(rail))
        return self.bytes_out(host, rail) - HEADER_BYTES * packets

    def cut(self, host: int, rail: int | None = None) -> None:
        """Pulls a host's cables: nothing passes, and no connection is told."""
        for one in self._rails(rail):
            _ip("link", "set", self._port(host, one), "down")

    def restore(self, host: int, rail: int | None = None) -> None:
        """Plugs them in again."""
        for one in self._rails(rail):
            _ip("link", "set", self._port(host, one), "up")

    def _rails(self, rail: int | None) -> Sequence[int]:
        return range(len(self.rates_bits_s)) if rail is None else (rail,)

    def _add(self, host: int, stack: ExitStack) -> None:
        name = self.namespace(host)
        _ip("netns", "add", name)
        stack.callback(_remove_namespace, name)
        _ip("-n", name, "link", "set", "lo", "up")
        for rail, rate_bits_s in enumerate(self.rates_bits_s):
            self._connect(host, rail, rate_bits_s, stack)

    def _connect(self, host: int, rail: int, rate_bits_s: float | None, stack: ExitStack) -> None:
        name, port, link = self.namespace(host), self._port(host, rail), f"eth{rail}"
        address = f"10.77.{rail}.{host + 1}"
        _ip("link", "add", port, "type", "veth", "peer", "name", link, "netns", name)
        stack.callback(_ip, "link", "del", port, check=False)  # at once; a namespace takes its links away later
        _ip("link", "set", port, "master", self._bridge(rail), "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
        _ip("-n", name, "link", "set", link, "up")
        if rate_bits_s is not None:
            for where, device in ((["-n", name], link), ([], port)):
                limit = limited(rate_bits_s, self.burst_bytes)
                _run("tc", *where, "qdisc", "add", "dev", device, "root", *limit)
                if self.burst_bytes < BURST_BYTES:
                    _ip(*where, "link", "set", device, "gso_max_size", str(self.burst_bytes * 3 // 4))
        # Of the route: a namespace's own default may be any of tcp_allowed_congestion_control, which often lacks cubic.
        net = (f"10.77.{rail}.0/24", "dev", link, "proto", "kernel", "scope", "link", "src", address)
        _ip("-n", name, "route", "replace", *net, "congctl", self.congestion)

    def _bridge(self, rail: int) -> str:
        return f"{self._prefix}b{rail}"

    def _port(self, host: int, rail: int) -> str:
        # One running number: the names of links have 15 letters at most.
        return f"{self._prefix}v{host + rail * len(self.addresses)}"

    def _counter(self, host: int, rail: int, name: str) -> int:
        return int((LINKS / self._port(host, rail) / "statistics" / name).read_text())

    def _end(self) -> None:
        for host in range(len(self.addresses)):
            _kill(self.namespace(host))
        for process in self._processes:
            process.wait()


def limited(bits_s: float, burst_bytes: int = BURST_BYTES) -> tuple[str, ...]:
    """What tc calls a link of such a rate."""
    return ("tbf", "rate", f"{bits_s:.0f}bit", "burst", f"{burst_bytes}b", "latency", "100ms")


def _remove_leftovers() -> None:
    """Removes the hosts of processes that are no more."""
    found = [path.name for folder in (NAMESPACES, LINKS) if folder.exists() for path in folder.iterdir()]
    for name in found:
        match = NAMES.fullmatch(name)
        if match is None or (PROCESSES / str(int(match[1], 16))).exists():
            continue
        if (NAMESPACES / name).exists():
            _kill(name)
            _remove_namespace(name)
        else:
            _ip("link", "del", name, check=False)


def _remove_namespace(name: str) -> None:
    _ip("netns", "del", name, check=False)


def _kill(namespace: str) -> None:
    """Kills what runs in a namespace, and waits until it is gone."""
    deadline = time.monotonic() + GONE_S
    while (pids := _ip("netns", "pids", namespace, check=False).split()) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout
