"""On which hosts a run's workers are started, and by which address they reach this one."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.errors import CommunicationError, UsageError
from headway.core.hosts import find_own_address as towards
from headway.core.launcher_environment import LOOPBACK

HERE = ("localhost", LOOPBACK, "::1")

EXAMPLE = "Write them as --hosts a:4,b:4: four processes on each of two hosts."


@final
@dataclass(frozen=True)
class Host:
    """A host as the user named it, and how many workers it gets. `here`: it is this one."""

    name: str
    procs: int
    here: bool


def shared(batch: int, ranks: int) -> None:
    """Raises UsageError where a step has fewer samples than there are processes."""
    if ranks > batch:
        what = f"a batch of {batch} cannot be shared by {ranks} processes"
        raise UsageError(what, where="batch", fix=f"Set it to at least that, or take at most {batch} processes.")


def hosts_of(procs: int | None, hosts: str | None) -> tuple[Host, ...]:
    """What --procs and --hosts ask for; without --hosts all workers run here.

    Raises:
        UsageError: a host without a number, twice, or of another total than `procs`.
    """
    if procs is not None and procs < 1:
        raise UsageError(f"--procs is {procs}", fix="It is the number of processes, at least 1.")
    if hosts is None:
        return (Host(HERE[0], procs or 1, True),)
    found = tuple(_host(part.strip()) for part in hosts.split(","))
    names = [HERE[0] if host.here else host.name for host in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"--hosts names {name} twice", where=hosts, fix="Name each host once, with all it gets.")
    total = sum(host.procs for host in found)
    if procs not in (None, total):
        fix = "Leave --procs out, or make it the sum."
        raise UsageError(f"--hosts asks for {total} processes, and --procs for {procs}", where=hosts, fix=fix)
    return found


def _host(text: str) -> Host:
    name, _, count = text.rpartition(":")
    bracketed = name.startswith("[") and name.endswith("]")
    if not name or name.startswith("-") or any(sign.isspace() for sign in name) or (":" in name and not bracketed):
        raise UsageError(f"--hosts has {text!r}, which is no host with a number", fix=EXAMPLE)
    if not count.isdecimal() or not 0 < int(count) < 1 << 16:
        raise UsageError(f"--hosts has {text!r}: {count!r} is no number of processes", fix=EXAMPLE)
    name = name.strip("[]")
    return Host(name, int(count), name in (*HERE, socket.gethostname()))


def own_address(hosts: Sequence[Host], environ: Mapping[str, str] | None = None) -> str:
    """By which address the workers reach this host: the loopback where there is no other; else HEADWAY_ADDRESS, or that
    of the interface of the route to the first of the other hosts.

    Raises:
        UsageError: that host is not known here, or there is no route to it.
    """
    environ = os.environ if environ is None else environ
    other = next((host for host in hosts if not host.here), None)
    if other is None:
        return LOOPBACK
    if given := environ.get("HEADWAY_ADDRESS"):
        return given
    name = other.name.rpartition("@")[2]
    try:
        return towards(name)
    except CommunicationError as error:
        cause = error.__cause__
        if cause is None:  # the name is known, and there is no route
            what = f"it cannot be told by which address host {other.name} reaches this one ({error.what})"
            fix = "Set HEADWAY_ADDRESS to an address of this host that the others reach."
            raise UsageError(what, fix=fix) from error
        why = cause.strerror if isinstance(cause, OSError) else str(cause)
        fix = (
            "Check its spelling, or add it to /etc/hosts or the DNS. A name that only ssh knows will do where "
            "HEADWAY_ADDRESS is an address of this host that the others reach."
        )
        raise UsageError(f"host {name} is not known here ({why})", where="--hosts", fix=fix) from error
