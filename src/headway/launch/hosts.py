"""Parses `--hosts`, and finds the address by which workers on other hosts reach the launcher."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.errors import CommunicationError, UsageError
from headway.core.hosts import find_own_address
from headway.core.launcher_environment import LOOPBACK

# Names by which a user means this host.
LOCAL_NAMES = ("localhost", LOOPBACK, "::1")

HOSTS_FIX = "Write --hosts a:4,b:4 for four processes on each of two hosts."


@final
@dataclass(frozen=True)
class Host:
    """A host with its number of workers.

    Attributes:
        name: the host as the user wrote it.
        procs: number of workers.
        is_local: True if it is this host.
    """

    name: str
    procs: int
    is_local: bool


def check_batch_covers_ranks(batch: int, ranks: int) -> None:
    """Raises UsageError if a step has fewer samples than ranks."""
    if ranks > batch:
        what = f"a batch of {batch} cannot be shared by {ranks} processes"
        raise UsageError(what, where="batch", fix=f"Set it to at least {ranks}, or start at most {batch} processes.")


def parse_hosts(procs: int | None, hosts: str | None) -> tuple[Host, ...]:
    """Parses `--procs` and `--hosts`. Without `--hosts` all workers run on this host.

    Raises:
        UsageError: a host has no number or is named twice, or the sum differs from `procs`.
    """
    if procs is not None and procs < 1:
        raise UsageError(f"--procs is {procs}", fix="Set it to the number of processes, at least 1.")
    if hosts is None:
        return (Host(LOCAL_NAMES[0], procs or 1, True),)
    found = tuple(_parse_host(part.strip()) for part in hosts.split(","))
    names = [LOCAL_NAMES[0] if host.is_local else host.name for host in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--hosts names {name} twice", where=hosts, fix="Name each host once, with all of its processes."
            )
    # A total that differs is a typing error in one of the two options; neither is the better guess.
    total = sum(host.procs for host in found)
    if procs not in (None, total):
        fix = f"Leave --procs out, or set it to {total}."
        raise UsageError(f"--hosts asks for {total} processes, and --procs for {procs}", where=hosts, fix=fix)
    return found


def _parse_host(text: str) -> Host:
    """Parses HOST:NUMBER. Raises UsageError."""
    name, _, count = text.rpartition(":")
    # An IPv6 address has colons of its own, so it needs brackets: [fe80::1]:4.
    # A name that begins with "-" would be an option of the remote shell, and could run a command here.
    bracketed = name.startswith("[") and name.endswith("]")
    if not name or name.startswith("-") or any(sign.isspace() for sign in name) or (":" in name and not bracketed):
        raise UsageError(f"--hosts has {text!r}, which is not of the form HOST:NUMBER", fix=HOSTS_FIX)
    if not count.isdecimal() or not 0 < int(count) < 1 << 16:
        raise UsageError(f"--hosts has {text!r}: {count!r} is not a number of processes", fix=HOSTS_FIX)
    name = name.strip("[]")
    return Host(name, int(count), name in (*LOCAL_NAMES, socket.gethostname()))


def find_launcher_address(hosts: Sequence[Host], environ: Mapping[str, str] | None = None) -> str:
    """Finds the address by which all workers reach this host.

    Without other hosts it is the loopback; else HEADWAY_ADDRESS, or the address of the interface that routes to the
    first other host.

    Raises:
        UsageError: that host is unknown here, or there is no route to it.
    """
    environ = os.environ if environ is None else environ
    other = next((host for host in hosts if not host.is_local), None)
    if other is None:
        return LOOPBACK
    if given := environ.get("HEADWAY_ADDRESS"):
        return given
    # ssh takes USER@HOST, but a route leads to the host alone.
    name = other.name.rpartition("@")[2]
    try:
        return find_own_address(name)
    except CommunicationError as error:
        cause = error.__cause__
        # Without a cause the name was resolved, but there is no route.
        if cause is None:
            what = f"no address is known by which host {other.name} reaches this one ({error.what})"
            fix = "Set HEADWAY_ADDRESS to an address of this host that the others reach."
            raise UsageError(what, fix=fix) from error
        why = cause.strerror if isinstance(cause, OSError) else str(cause)
        fix = (
            "Check its spelling, or add it to /etc/hosts or the DNS. If only ssh knows the name, set HEADWAY_ADDRESS "
            "to an address of this host that the others reach."
        )
        raise UsageError(f"host {name} is not known here ({why})", where="--hosts", fix=fix) from error
