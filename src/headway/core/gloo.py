"""Gloo groups into which no stranger gets. Gloo itself takes whoever connects and knows a pair's number.

A rank's Gloo listens at one port for all groups. A packet filter keeps that port shut but for the moment in which a
group connects, when all of its ranks have said through the run's store that they are there; then it admits the
addresses of these ranks' hosts alone. When the group is connected the ranks tell each other through the store which
connections they have made, and send each other random numbers over all of them. If a connection is none of theirs, they
begin again at new ports, where the filter admits nothing but the very ports from which the ranks connect: that takes a
second more, since a packet that is not admitted yet comes again after a second.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, final

from headway.core.filtered_port import FilteredPort, list_own_addresses
from headway.core.process_sockets import Address, ProcessSocket, list_sockets, normalise_address
from headway.core.torch_c10d import load_c10d, summarise_error

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOG = logging.getLogger("headway.comm")

ATTEMPT_S = 30.0
"""How long one attempt may take once all ranks are there; a group connects in hundredths of a second."""
SLICE_S = 0.5
"""Waiting for the others is cut into pieces of it, so that it ends where the generation is given up."""
KNOCK_S = 0.02
"""Between two looks for connections that wait to be admitted."""
TOKEN_BYTES = 16

_BUILDING = threading.Lock()
"""Held while a group connects: the connections that appear between its ranks meanwhile are its own."""


def add_prefix(store: Store, prefix: str) -> Any:
    """A part of a store, ours or torch's."""
    mine = getattr(store, "under", None)
    return mine(prefix) if mine else load_c10d().PrefixStore(prefix, store)


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """What every rank of a torch.distributed group says, as JSON: nothing that comes from another rank is unpickled.

    Args:
        group: default: that of `init_process_group`. All of its ranks call this.
    """
    import torch
    import torch.distributed as dist

    only_cuda = "gloo" not in str(dist.get_backend_config(group)) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(one) for one in lengths)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [json.loads(row[: int(one)].cpu().numpy().tobytes()) for row, one in zip(rows, lengths, strict=True)]


@final
class GlooGroups:
    """The Gloo groups of one rank of a world.

    Args:
        interface: of the network.
        connect_s: how long the building of a group may take. timeout_s: of its operations.
        check_not_ended: called while others are waited for; what it raises ends the waiting.
    """

    def __init__(
        self, rank: int, interface: str, *, connect_s: float, timeout_s: float, check_not_ended: Callable[[], None]
    ) -> None:
        self._rank, self._interface = rank, interface
        self._connect_s, self._timeout_s, self._check_not_ended = connect_s, timeout_s, check_not_ended
        self._door: FilteredPort | None = None
        self._old: list[FilteredPort] = []
        self._known: set[str] = set()

    def build(self, store: Store, members: Sequence[int]) -> tuple[Any, list[ProcessSocket]]:
        """Connects a group; every member calls it.

        Args:
            store: the group's own part of the run's store. members: ranks of the world, in the group's order.

        Returns:
            The backend, and its connections.

        Raises:
            RuntimeError: a rank did not come, or strangers did not let the ranks connect.
        """
        until_s = monotonic() + self._connect_s
        attempt = 0
        while True:
            part = add_prefix(store, str(attempt))
            talk = partial(
                _gather_values, part, self._rank, members, until_s=until_s, check_not_ended=self._check_not_ended
            )
            if self._door is None:
                self._door = FilteredPort(self._interface)
            told = talk("listens", [self._door.addresses, list_own_addresses()])
            with _BUILDING:
                made, sockets, why = self._try_build(part, members, told, talk, is_exact=attempt > 0)
            verdicts = talk("verdict", why)
            if not any(verdicts):
                for end in sockets:
                    end.detach_filter()
                return made, sockets
            for end in sockets:
                end.shut_down()
            # Gloo may keep a stranger's connection for the next group that it builds at this port.
            self._old.append(self._door)
            self._door = None
            first = next(reason for reason in verdicts if reason)
            if monotonic() > until_s:
                raise RuntimeError(first)
            if why:
                LOG.warning("%s; the ranks connect anew, and admit nothing but each other", why)
            attempt += 1

    def close(self) -> None:
        """Lets go of the ports; groups keep theirs."""
        self._door = None
        self._old.clear()

    def _try_build(
        self,
        store: Any,
        members: Sequence[int],
        told: Sequence[Any],
        talk: Callable[[str, Any], list[Any]],
        *,
        is_exact: bool,
    ) -> tuple[Any, list[ProcessSocket], str]:
        """A backend, its connections, and why it cannot be used; empty where it can."""
        assert self._door is not None
        door = self._door
        others = {
            normalise_address(one)
            for rank, (listens, _) in zip(members, told, strict=True)
            if rank != self._rank
            for one in listens
        }
        before = {end.inode for end in list_sockets()}
        door.admit([] if is_exact else sorted({host for _, hosts in told for host in hosts}))
        talk("open", None)
        raw, why = None, ""
        knocks = _PortExchange(store.clone(), self._rank, members, door, before) if is_exact else None
        try:
            try:
                raw = self._create_backend(store, members)
            except RuntimeError as error:
                why = summarise_error(error)
            # A rank that is ready first keeps its port open for the others: the first packet of a slower one would be
            # dropped, and Gloo waits for it for minutes.
            talk("connected", None)
        finally:
            door.refuse_all()
            if knocks is not None:
                knocks.close()
        mine = [end for end in list_sockets() if end.inode not in before and end.is_connected_to(others)]
        came = [end for end in list_sockets() if end.inode not in self._known and end.was_accepted_at(door.addresses)]
        token = secrets.token_bytes(TOKEN_BYTES)
        said = talk("made", [[end.read_endpoints() for end in mine], token.hex()])
        if not why:
            why = _find_stranger(came, [ends for made, _ in said for ends in made], door.addresses)
        if why:
            for end in (*mine, *came):
                end.shut_down()
        else:
            why = _verify_peers(raw, token, [bytes.fromhex(text) for _, text in said], members.index(self._rank))
        if not why:
            self._known |= {end.inode for end in came}
        return raw, [*mine, *came], why

    def _create_backend(self, store: Store, members: Sequence[int]) -> Any:
        assert self._door is not None
        gloo = load_c10d().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=min(self._connect_s, ATTEMPT_S))
        options._threads = 1  # operations end in the order in which they began
        options._devices = [self._door.device]
        made = gloo(store, members.index(self._rank), len(members), options)
        made._set_default_timeout(timedelta(seconds=self._timeout_s))
        return made


@final
class _PortExchange:
    """Tells the others from which ports this rank's connections want to come, and admits theirs; in a thread."""

    def __init__(self, store: Any, rank: int, members: Sequence[int], door: FilteredPort, before: set[str]) -> None:
        self._store, self._rank, self._door, self._before = store, rank, door, before
        self._others = [f"knocks/{other}" for other in members if other != rank]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="knocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        told: set[Address] = set()
        admitted: set[Address] = set()
        with suppress(RuntimeError):  # the store is gone: the group will not come together
            self._store.set(f"knocks/{self._rank}", "[]")
            while not self._over.wait(KNOCK_S):
                mine = {end.read_source_address() for end in list_sockets() if end.inode not in self._before} - {None}
                if not mine <= told:
                    told |= {one for one in mine if one}
                    self._store.set(f"knocks/{self._rank}", json.dumps(sorted(told)))
                if not self._others or not self._store.check(self._others):
                    continue
                theirs = {
                    normalise_address(one) for text in self._store.multi_get(self._others) for one in json.loads(text)
                }
                if theirs != admitted:
                    admitted = theirs
                    self._door.admit(sorted(theirs))


def _gather_values(
    store: Any,
    rank: int,
    members: Sequence[int],
    what: str,
    value: Any,
    *,
    until_s: float,
    check_not_ended: Callable[[], None],
) -> list[Any]:
    """What all members say, in their order."""
    store.set(f"{what}/{rank}", json.dumps(value))
    keys = [f"{what}/{other}" for other in members]
    while True:
        check_not_ended()
        left_s = until_s + ATTEMPT_S * (what != "listens") - monotonic()
        try:
            wait_s = max(0.01, min(SLICE_S, left_s))
            if hasattr(store, "under"):  # ours waits and answers at once
                found = store.multi_get(keys, wait_s)
            else:
                store.wait(keys, timedelta(seconds=wait_s))
                found = store.multi_get(keys)
            return [json.loads(text) for text in found]
        except RuntimeError as error:
            if "timeout" not in str(error).lower():
                raise
            if left_s <= 0:
                missing = [str(other) for other, key in zip(members, keys, strict=True) if not store.check([key])]
                raise RuntimeError(f"rank {', '.join(missing) or 'unknown'} did not come in time") from None


def _find_stranger(came: Sequence[ProcessSocket], made: Sequence[Any], listens: Sequence[Address]) -> str:
    """Says what is wrong with the connections that came: each has to be one that a member says it made."""
    expected = {normalise_address(source) for source, target in made if normalise_address(target) in listens}
    found = [end.read_peer_address() for end in came]
    foreign = [one for one in found if one not in expected]
    port = listens[0][1] if listens else 0
    if foreign:
        who = next((f" from {host}" for host, _ in filter(None, foreign)), "")
        return f"a connection{who} to port {port} was made by no rank of this run"
    return "" if len(found) == len(expected) else f"a rank's connection to port {port} is not there"


def _verify_peers(raw: Any, token: bytes, tokens: Sequence[bytes], rank: int) -> str:
    """Sends this rank's number over every connection; says what is wrong where others than the ranks' come."""
    import torch

    mine = torch.frombuffer(bytearray(token * len(tokens)), dtype=torch.uint8)
    out = torch.zeros_like(mine)
    try:
        # A stranger in a rank's place may say nothing: then it ends long before the group's own time-out.
        raw.alltoall_base(out, mine, [], [], load_c10d().AllToAllOptions()).wait(timedelta(seconds=ATTEMPT_S))
    except RuntimeError as error:
        return f"a connection of rank {rank} ended at once ({summarise_error(error)})"
    return "" if out.numpy().tobytes() == b"".join(tokens) else f"a rank of this run is not who speaks to rank {rank}"
