"""Gloo groups that no stranger can join. Gloo itself accepts any connection that sends the small number of a pair.

1. A rank's Gloo listens at one port for all groups. A packet filter drops everything, except while a group connects:
   then it admits the addresses of the ranks' hosts.
2. Once connected, the ranks publish their connections in the run's store and send random tokens over all of them.
3. If some connection belongs to no rank, they retry at new ports, where the filter admits only the exact source ports
   of the ranks. That takes a second longer: TCP repeats a dropped packet after a second.
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

LOG = logging.getLogger("headway.core")

# Time-out of one attempt once all ranks are present; a group connects in hundredths of a second.
ATTEMPT_S = 30.0
# Waiting for other ranks is cut into slices, so that it ends soon after the generation does.
SLICE_S = 0.5
# Interval of the search for connections that wait to be admitted.
KNOCK_S = 0.02
TOKEN_BYTES = 16

# Held while a group connects, so that new connections between its ranks are the group's own.
_BUILDING = threading.Lock()


def add_prefix(store: Store, prefix: str) -> Any:
    """Returns the part of a store, Headway's or torch's, whose keys begin with a prefix."""
    mine = getattr(store, "open_prefix", None)
    return mine(prefix) if mine else load_c10d().PrefixStore(prefix, store)


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Gathers a JSON value from every rank of a torch.distributed group; unlike all_gather_object, without pickle.

    Args:
        value: any JSON value. All ranks of the group call this.
        group: default: the group of `init_process_group`.
    """
    import torch
    import torch.distributed as dist

    only_cuda = "gloo" not in str(dist.get_backend_config(group)) and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if only_cuda else torch.device("cpu")
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    size = dist.get_world_size(group)
    # all_gather needs equal sizes: gather the lengths first, then the padded texts.
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(mine)], device=device), group=group)
    longest = max(int(one) for one in lengths)
    rows = [torch.zeros(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(rows, torch.nn.functional.pad(mine, (0, longest - len(mine))), group=group)
    return [json.loads(row[: int(one)].cpu().numpy().tobytes()) for row, one in zip(rows, lengths, strict=True)]


def gather_values(
    store: Any,
    rank: int,
    members: Sequence[int],
    what: str,
    value: Any,
    *,
    until_s: float,
    check_not_ended: Callable[[], None],
    grace_s: float = ATTEMPT_S,
) -> list[Any]:
    """Publishes a value under the key `what` of a store and returns those of all members, in their order.

    Args:
        value: any JSON value.
        until_s: time (`monotonic`) at which it gives up.
        check_not_ended: called while waiting; an exception from it ends the wait.
        grace_s: time beyond `until_s`, for steps in which all members are known to be present.

    Raises:
        RuntimeError: a member did not come, or the store is lost.
    """
    store.set(f"{what}/{rank}", json.dumps(value))
    keys = [f"{what}/{other}" for other in members]
    while True:
        check_not_ended()
        left_s = until_s + grace_s - monotonic()
        try:
            wait_s = max(0.01, min(SLICE_S, left_s))
            # Headway's store waits and answers in one request, torch's needs two.
            if hasattr(store, "open_prefix"):
                values = store.multi_get(keys, wait_s)
            else:
                store.wait(keys, timedelta(seconds=wait_s))
                values = store.multi_get(keys)
            return [json.loads(text) for text in values]
        except RuntimeError as error:
            # Any other error means that the store is lost.
            if "timeout" not in str(error).lower():
                raise
            if left_s <= 0:
                missing = [str(other) for other, key in zip(members, keys, strict=True) if not store.check([key])]
                raise RuntimeError(f"rank {', '.join(missing) or 'unknown'} did not come in time") from None


@final
class GlooGroups:
    """Builds the Gloo groups of one rank of a world.

    Args:
        interface: network interface.
        connect_s: time-out for building a group.
        timeout_s: time-out of its operations.
        check_not_ended: called while waiting for other ranks; an exception from it ends the wait.
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
            store: the group's own part of the run's store.
            members: ranks of the world, in the group's order.

        Returns:
            The backend and its connections.

        Raises:
            RuntimeError: a rank did not join, or strangers kept the ranks from connecting.
        """
        until_s = monotonic() + self._connect_s
        attempt = 0
        while True:
            # Each attempt has its own keys: values of a failed one must not be read again.
            part = add_prefix(store, str(attempt))
            talk = partial(
                gather_values, part, self._rank, members, until_s=until_s, check_not_ended=self._check_not_ended
            )
            # 1. Every rank publishes its port and addresses.
            if self._door is None:
                self._door = FilteredPort(self._interface)
            answers = talk("listens", [self._door.addresses, list_own_addresses()], grace_s=0)
            with _BUILDING:
                made, sockets, why = self._try_build(part, members, answers, talk, is_exact=attempt > 0)
            # All ranks take the same decision: one mismatch anywhere means that all of them retry.
            verdicts = talk("verdict", why)
            if not any(verdicts):
                for end in sockets:
                    end.detach_filter()
                return made, sockets
            for end in sockets:
                end.shut_down()
            # A new port for the next attempt: Gloo may keep a stranger's connection for the next group at this one.
            self._old.append(self._door)
            self._door = None
            first = next(reason for reason in verdicts if reason)
            if monotonic() > until_s:
                raise RuntimeError(first)
            if why:
                LOG.warning("%s; the ranks connect again and admit nothing but each other", why)
            attempt += 1

    def close(self) -> None:
        """Releases the ports. Groups that are connected stay so."""
        self._door = None
        self._old.clear()

    def _try_build(
        self,
        store: Any,
        members: Sequence[int],
        answers: Sequence[Any],
        talk: Callable[[str, Any], list[Any]],
        *,
        is_exact: bool,
    ) -> tuple[Any, list[ProcessSocket], str]:
        """Makes one attempt; returns the backend, its connections, and the reason if it cannot be used."""
        assert self._door is not None
        door = self._door
        # The ports of the other ranks: a new connection to one of them is this rank's own.
        others = {
            normalise_address(one)
            for rank, (listens, _) in zip(members, answers, strict=True)
            if rank != self._rank
            for one in listens
        }
        before = {end.inode for end in list_sockets()}
        door.admit([] if is_exact else sorted({host for _, hosts in answers for host in hosts}))
        # No rank connects before all have opened their filters.
        talk("open", None)
        raw, why = None, ""
        knocks = _PortExchange(store.clone(), self._rank, members, door, before) if is_exact else None
        try:
            try:
                raw = self._create_backend(store, members)
            except RuntimeError as error:
                why = summarise_error(error)
            # A rank that is ready first keeps its port open until all are: if it dropped the first packet of a slower
            # rank, Gloo would wait for minutes.
            talk("connected", None)
        finally:
            door.refuse_all()
            if knocks is not None:
                knocks.close()
        # `mine` are the connections that this rank opened, `came` those that it accepted.
        mine = [end for end in list_sockets() if end.inode not in before and end.is_connected_to(others)]
        came = [end for end in list_sockets() if end.inode not in self._known and end.was_accepted_at(door.addresses)]
        # Every accepted connection has to be one that a member has opened.
        token = secrets.token_bytes(TOKEN_BYTES)
        endpoints = talk("made", [[end.read_endpoints() for end in mine], token.hex()])
        if not why:
            why = _find_stranger(came, [ends for made, _ in endpoints for ends in made], door.addresses)
        if why:
            for end in (*mine, *came):
                end.shut_down()
        else:
            why = _verify_peers(raw, token, [bytes.fromhex(text) for _, text in endpoints], members.index(self._rank))
        if not why:
            self._known |= {end.inode for end in came}
        return raw, [*mine, *came], why

    def _create_backend(self, store: Store, members: Sequence[int]) -> Any:
        assert self._door is not None
        gloo = load_c10d().ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=min(self._connect_s, ATTEMPT_S))
        # One thread: collectives complete in the order in which they were issued. Sends and receives bypass it.
        options._threads = 1
        options._devices = [self._door.device]
        made = gloo(store, members.index(self._rank), len(members), options)
        made._set_default_timeout(timedelta(seconds=self._timeout_s))
        return made


@final
class _PortExchange:
    """A thread that publishes the source ports of this rank's connections and admits those of the other ranks."""

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
        announced: set[Address] = set()
        admitted: set[Address] = set()
        # A RuntimeError means that the store is gone; the group then fails by itself.
        with suppress(RuntimeError):
            self._store.set(f"knocks/{self._rank}", "[]")
            while not self._over.wait(KNOCK_S):
                mine = {end.read_source_address() for end in list_sockets() if end.inode not in self._before} - {None}
                if not mine <= announced:
                    announced |= {one for one in mine if one}
                    self._store.set(f"knocks/{self._rank}", json.dumps(sorted(announced)))
                if not self._others or not self._store.check(self._others):
                    continue
                theirs = {
                    normalise_address(one) for text in self._store.multi_get(self._others) for one in json.loads(text)
                }
                if theirs != admitted:
                    admitted = theirs
                    self._door.admit(sorted(theirs))


def _find_stranger(came: Sequence[ProcessSocket], made: Sequence[Any], listens: Sequence[Address]) -> str:
    """Compares accepted connections with those that members opened; returns the mismatch, or an empty text."""
    expected = {normalise_address(source) for source, target in made if normalise_address(target) in listens}
    peers = [end.read_peer_address() for end in came]
    foreign = [one for one in peers if one not in expected]
    port = listens[0][1] if listens else 0
    if foreign:
        who = next((f" from {host}" for host, _ in filter(None, foreign)), "")
        return f"a connection{who} to port {port} was made by no rank of this run"
    return "" if len(peers) == len(expected) else f"a rank's connection to port {port} is not there"


def _verify_peers(raw: Any, token: bytes, tokens: Sequence[bytes], rank: int) -> str:
    """Exchanges tokens over every connection; returns a reason if a peer is not a rank, else an empty text."""
    import torch

    mine = torch.frombuffer(bytearray(token * len(tokens)), dtype=torch.uint8)
    out = torch.zeros_like(mine)
    try:
        # A silent stranger must not hold the group until its own time-out, which may be minutes.
        raw.alltoall_base(out, mine, [], [], load_c10d().AllToAllOptions()).wait(timedelta(seconds=ATTEMPT_S))
    except RuntimeError as error:
        return f"a connection of rank {rank} ended at once ({summarise_error(error)})"
    return "" if out.numpy().tobytes() == b"".join(tokens) else f"the peer of rank {rank} is not a rank of this run"
