"""Groups of Gloo with a stranger who knows their ports and the numbers of their pairs."""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks
from tests.security._stranger import Address, listening

from headway.core import gloo
from headway.core.errors import CommunicationError
from headway.core.filtered_port import FilteredPort
from headway.core.gloo import GlooGroups
from headway.core.world import Membership, World

CPU, SECRET = torch.device("cpu"), b"of a test"

# How long a stranger waits who is not to be admitted: half of the time after which TCP repeats a first packet.
PATIENCE_S = 0.5

NUMBERS = range(8)
"""Pairs' numbers of a new port: two ranks have used none of them yet."""


def knock(places: list[Address], said: list[bytes], held: list[socket.socket]) -> bool:
    """Connects a stranger to all of these addresses at once; returns True if one admits him. He stays connected."""
    ends = {socket.socket(): word for _ in places for word in said}
    for number, end in enumerate(ends):
        end.setblocking(False)
        end.connect_ex(places[number // len(said)])
    held += ends
    _, open_ones, _ = select.select([], ends, [], PATIENCE_S)
    for end in open_ones:
        end.send(ends[end])
    return bool(open_ones)


def with_a_stranger(rank: Rank, more: bytes, leaves: bool) -> tuple[list[bool], list[str], float]:
    """The last rank is the stranger. He comes in the moment in which the others' first group connects, with the number
    of each pair, and tries again at the group that they build instead, and once more when it is built."""
    if rank.rank == rank.size - 1:
        return be_the_stranger(rank, more, leaves), [], 0.0
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("headway.core").addHandler(handler)
    raw, times = GlooGroups._create_backend, iter(range(9))

    def awaited(self: GlooGroups, *arguments: Any) -> Any:
        number = next(times)
        rank.store.set(f"open/{number}/{rank.rank}", str(os.getpid()))
        if number == 0:
            rank.store.get(f"knocked/{number}")
        return raw(self, *arguments)

    GlooGroups._create_backend = awaited  # type: ignore[method-assign]
    size = rank.size - 1
    made = World.create(rank.store, Membership(rank.rank, size), CPU, master="127.0.0.1", secret=SECRET, timeout_s=60)
    assert next(times) == 2  # the first group was built twice
    rank.store.set(f"built/{rank.rank}", "x")
    rank.store.get("tried again")
    group = made.create_group(name="another")
    value = torch.ones(3) * (rank.rank + 1)
    group.all_reduce(value).wait()
    made.control.barrier()
    made.close()
    return [], said, float(value[0])


def be_the_stranger(rank: Rank, more: bytes, leaves: bool) -> list[bool]:
    held: list[socket.socket] = []
    let_in = []

    def try_all(number: int) -> bool:
        pids = [int(rank.store.get(f"open/{number}/{other}")) for other in range(rank.size - 1)]
        ports = [where for pid in pids for where in listening(pid)]
        assert len(ports) >= len(pids)
        return knock(ports, [struct.pack("<q", pair) + more for pair in NUMBERS], held)

    let_in.append(try_all(0))
    if leaves:
        for end in held:
            end.close()
    rank.store.set("knocked/0", "x")
    for other in range(rank.size - 1):
        rank.store.get(f"built/{other}")
    let_in.append(try_all(1))
    rank.store.set("tried again", "x")
    for end in held:
        end.close()
    return let_in


@pytest.mark.parametrize(
    ("ranks", "more", "leaves"),
    [
        (2, b"", False),
        pytest.param(2, b"", True, marks=pytest.mark.check),
        pytest.param(3, b"", False, marks=pytest.mark.check),
    ],
)
def test_a_stranger_in_a_ranks_place_is_found_and_kept_out_of_the_next(ranks: int, more: bytes, leaves: bool) -> None:
    *found, (let_in, _, _) = run_ranks(ranks + 1, with_a_stranger, more, leaves)
    assert let_in == [True, False]
    assert {value for _, _, value in found} == {ranks * (ranks + 1) / 2}
    said = [text for _, texts, _ in found for text in texts]
    assert said
    assert any("made by no rank of this run; the ranks connect again" in text for text in said) or leaves


def reduce_in_exact_mode(rank: Rank) -> float:
    """As after a stranger was found: nothing but the ports of the ranks is admitted."""
    attempt = GlooGroups._try_build
    GlooGroups._try_build = lambda self, *arguments, **more: attempt(self, *arguments, **{**more, "is_exact": True})  # type: ignore[method-assign]
    value = torch.ones(3) * (rank.rank + 1)
    rank.world.control.all_reduce(value).wait()
    rank.world.control.barrier()
    return float(value[0])


def test_ranks_find_each_other_where_only_their_own_ports_are_admitted() -> None:
    assert run_ranks(3, reduce_in_exact_mode) == [6.0] * 3


def a_rank_does_not_come(rank: Rank) -> str:
    if rank.rank == 1:
        return ""
    began = time.monotonic()
    place: dict[str, Any] = {"master": "127.0.0.1", "secret": SECRET}
    with pytest.raises(CommunicationError) as raised:
        World.create(rank.store, Membership(0, 2, identities=["a", "a"]), CPU, connect_s=0.5, **place)
    assert time.monotonic() - began < gloo.ATTEMPT_S
    return str(raised.value)


def test_who_did_not_come_is_named() -> None:
    assert "rank 1 did not come in time" in run_ranks(2, a_rank_does_not_come)[0]


def let_in(where: Address, timeout_s: float) -> bool:
    with suppress(OSError), socket.create_connection(where, timeout_s):
        return True
    return False


def test_a_filtered_port_admits_only_named_sources() -> None:
    port = FilteredPort("lo")
    (where,) = port.addresses
    assert where[0] == "127.0.0.1"
    assert not let_in(where, PATIENCE_S)
    port.admit(["192.0.2.1", "127.0.0.1", "2001:db8::1"])
    assert let_in(where, 60)
    port.admit([("127.0.0.1", 1), ("192.0.2.1", 2)])
    assert not let_in(where, PATIENCE_S)
    port.refuse_all()
    with socket.socket() as guest:
        guest.bind(("127.0.0.1", 0))
        guest.settimeout(PATIENCE_S)
        with pytest.raises(TimeoutError):
            guest.connect(where)
        port.admit([("192.0.2.1", 2), guest.getsockname()])
        guest.settimeout(60)
        assert guest.connect_ex(where) in (0, 106, 114)
        guest.sendall(b"x")  # his first packet has come again


def test_more_addresses_than_a_filter_holds_admit_all() -> None:
    port = FilteredPort("lo")
    port.admit([f"10.{high}.{low}.1" for high in range(40) for low in range(40)])
    assert let_in(port.addresses[0], 60)


def two_orders(rank: Rank) -> list[int]:
    """The first ranks of two groups of all ranks in two orders."""
    found = []
    for order in ((0, 1), (1, 0)):
        # Rank 0 comes first, and must not take what rank 1 published for the group before.
        time.sleep(0.2 * rank.world.rank)
        group, value = rank.world.create_group(order, name="either"), torch.tensor([float(rank.world.rank)])
        group.broadcast(value).wait()
        found.append(int(value))
    return found


def test_all_ranks_in_another_order_are_another_group() -> None:
    assert run_ranks(2, two_orders) == [[0, 1]] * 2
