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


def check_batch_covers_ranks(batch: int, num_ranks: int, sharing: int = 1) -> None:
    """Raises UsageError if a step has fewer samples than ranks, or than groups of ranks that share a sample.

    Args:
        sharing: ranks that share each sample.
    """
    if num_ranks > batch * sharing:
        what = f"a batch of {batch} cannot be shared by {num_ranks} processes"
        fix = f"Set it to at least {-(-num_ranks // sharing)}, or start at most {batch * sharing} processes."
        raise UsageError(what, where="batch", fix=fix)


def parse_hosts(procs: int | None, hosts: str | None) -> tuple[Host, ...]:
    """Returns the hosts of `--procs` and `--hosts`. Without `--hosts` all workers run on this host.

    Raises:
        UsageError: a host has no number or is named twice, or the sum differs from `procs`.
    """
    if procs is not None and procs < 1:
        raise UsageError(f"--procs is {procs}", fix="Set it to the number of processes, at least 1.")
    if hosts is None:
        return (Host(LOCAL_NAMES[0], procs or 1, True),)
    parsed = tuple(_parse_host(text.strip()) for text in hosts.split(","))
    names = [LOCAL_NAMES[0] if host.is_local else host.name for host in parsed]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"--hosts names {name} twice", where=hosts, fix="Name each host once, with all of its processes."
            )
    # A total that differs is a typing error in one of the two options; neither is the better guess.
    total = sum(host.procs for host in parsed)
    if procs not in (None, total):
        fix = f"Leave --procs out, or set it to {total}."
        raise UsageError(f"--hosts asks for {total} processes, and --procs for {procs}", where=hosts, fix=fix)
    return parsed


def _parse_host(text: str) -> Host:
    """Parses HOST:NUMBER. Raises UsageError if the text has another form."""
    name, _, count = text.rpartition(":")
    # An IPv6 address has colons of its own, so it needs brackets: [fe80::1]:4.
    has_stray_colon = ":" in name and not (name.startswith("[") and name.endswith("]"))
    # A name that begins with "-" would be an option of the remote shell, and could run a command here.
    if not name or name.startswith("-") or any(char.isspace() for char in name) or has_stray_colon:
        raise UsageError(f"--hosts has {text!r}, which is not of the form HOST:NUMBER", fix=HOSTS_FIX)
    if not count.isdecimal() or not 0 < int(count) < 1 << 16:
        raise UsageError(f"--hosts has {text!r}: {count!r} is not a number of processes", fix=HOSTS_FIX)
    name = name.strip("[]")
    return Host(name, int(count), name in (*LOCAL_NAMES, socket.gethostname()))


def find_launcher_address(hosts: Sequence[Host], environ: Mapping[str, str] | None = None) -> str:
    """Returns the address by which all workers reach this host.

    Without other hosts it is the loopback; else HEADWAY_ADDRESS, or the address of the interface that routes to the
    first other host.

    Raises:
        UsageError: the first other host is unknown here, or there is no route to it.
    """
    environ = os.environ if environ is None else environ
    remote_host = next((host for host in hosts if not host.is_local), None)
    if remote_host is None:
        return LOOPBACK
    if address := environ.get("HEADWAY_ADDRESS"):
        return address
    # ssh takes USER@HOST, but a route leads to the host alone.
    name = remote_host.name.rpartition("@")[2]
    try:
        return find_own_address(name)
    except CommunicationError as error:
        cause = error.__cause__
        # Without a cause the name was resolved, but there is no route.
        if cause is None:
            what = f"no address is known by which host {remote_host.name} reaches this one ({error.what})"
            fix = "Set HEADWAY_ADDRESS to an address of this host that the others reach."
            raise UsageError(what, fix=fix) from error
        reason = cause.strerror if isinstance(cause, OSError) else str(cause)
        fix = (
            "Check its spelling, or add it to /etc/hosts or the DNS. If only ssh knows the name, set HEADWAY_ADDRESS "
            "to an address of this host that the others reach."
        )
        raise UsageError(f"host {name} is not known here ({reason})", where="--hosts", fix=fix) from error
