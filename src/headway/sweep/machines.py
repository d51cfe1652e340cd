"""The other machines of a sweep: those of `--hosts`, and those that join by themselves."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from queue import SimpleQueue
from typing import final

import psutil

from headway.core.errors import CommunicationError, HeadwayError
from headway.core.hosts import ANYWHERE, find_interface_address, find_own_address, is_loopback_name
from headway.core.launcher_environment import LOOPBACK
from headway.launch.hosts import find_launcher_address, parse_hosts
from headway.sweep.reception import Reception
from headway.sweep.remote_hosts import RemoteHosts
from headway.sweep.slots import Event, Slot
from headway.sweep.sweep_folder import SweepFolder, SweepRecipe, describe_sweep_resume

LOG = logging.getLogger("headway.sweep")


@final
class Machines:
    """Nothing, if the sweep is one machine's alone: then there is no open port.

    Args:
        events: gets what workers say, and `no_hosts` or `reception_failed` with slot -1.
        numbers: numbers for slots.
    """

    def __init__(
        self, sweep: SweepFolder, settings: SweepRecipe, events: SimpleQueue[Event], numbers: Iterator[int]
    ) -> None:
        self._sweep, self._reasons = sweep, ""
        self._reception: Reception | None = None
        self._hosts: RemoteHosts | None = None
        if not settings.is_shared:
            return
        everyone = () if settings.hosts is None else parse_hosts(None, settings.hosts)
        others = [host for host in everyone if not host.is_local]
        with ExitStack() as stack:
            address = find_launcher_address(others) if others else _find_any_address()
            self._reception = Reception(sweep.folder, address, settings.lease_s, events, numbers)
            stack.callback(self._reception.close)
            # The machines of --hosts are told by themselves.
            if settings.joinable or settings.hosts is None:
                command = f"headway sweep --join {shlex.quote(str(sweep.folder.absolute()))}"
                LOG.info(f"Workers can join from machines that see this folder: {command}")
            if others:
                self._hosts = RemoteHosts(sweep.folder.absolute(), others, settings.lease_s, events)
            stack.pop_all()

    def expect_own(self) -> None:
        """Raises UsageError if another coordinator runs this sweep by now."""
        if self._reception is not None:
            self._reception.expect_own()

    @property
    def slots(self) -> int:
        """Slots of the machines of `--hosts` that have not left; those that join by themselves are not known."""
        return 0 if self._hosts is None else self._hosts.slots

    def note(self, event: Event) -> None:
        """Notes an event that is of no slot."""
        assert event.message is not None
        if "reception_failed" in event.message:
            what = f"the coordinator cannot serve other machines ({event.message['reception_failed']})"
            fix = f"Mend the cause, and continue: {describe_sweep_resume(self._sweep.folder)}"
            raise HeadwayError(what, where=str(self._sweep.folder), fix=fix)
        self._reasons = event.message["no_hosts"]

    def note_join(self, host: str) -> None:
        """Notes that a worker of a machine is ready."""
        LOG.info(f"A worker on {host} has joined.")
        if self._hosts is not None:
            self._hosts.note_join(host)

    def expect_some(self, slots: Sequence[Slot]) -> None:
        """Raises HeadwayError if nobody is left to train, and no machine of `--hosts` will come back."""
        if self._reasons and not slots:
            what = f"no machine is left to train on.\n{self._reasons}"
            resume = describe_sweep_resume(self._sweep.folder)
            fix = f"Mend the cause, or change hosts in {self._sweep.settings_path}. Then continue: {resume}"
            raise HeadwayError(f"{what}\n", fix=fix)

    def stop(self, *, is_over: bool) -> None:
        """Asks all workers to save their trials and leave."""
        if self._reception is not None:
            self._reception.stop_all(is_over=is_over)

    def close(self) -> None:
        """Closes the port, and ends the programs that were started on other machines."""
        if self._reception is not None:
            self._reception.close()
        if self._hosts is not None:
            self._hosts.close()


def count_own_slots(hosts: str) -> int:
    """Returns the number of processes that `--hosts` wants on this machine.

    Raises:
        UsageError: it is no list of hosts, or a host is not known here.
    """
    parsed = parse_hosts(None, hosts)
    find_launcher_address(parsed)
    return sum(host.procs for host in parsed if host.is_local)


def _find_any_address() -> str:
    """Returns the address by which most machines reach this one; without a network, the loopback."""
    if address := os.environ.get("HEADWAY_ADDRESS"):
        return address
    for target in ANYWHERE:
        with suppress(CommunicationError):
            return find_own_address(target)
    # A cluster may have no way out.
    states = psutil.net_if_stats()
    for name in psutil.net_if_addrs():
        with suppress(CommunicationError):
            address = find_interface_address(name)
            if name in states and states[name].isup and not is_loopback_name(address):
                return address
    return LOOPBACK
