"""A group's sockets: those that other threads open while it connects are not among them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.comm._ranks import Rank, run_ranks

from headway.core.errors import CommunicationError, GenerationEndedError
from headway.core.key_value_store import StoreClient, StoreServer, build_store
from headway.core.process_sockets import ProcessSocket, list_new_sockets, list_sockets
from headway.core.world import Membership, World

PAIRS = 400
"""So many connections at most: a process may open about 1,000 files."""


@contextmanager
def busy_thread() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """A thread that opens connections over the loopback, and ports of its own, until the block ends."""
    pairs: list[tuple[socket.socket, socket.socket]] = []
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.0005) and len(pairs) < PAIRS:
            with socket.create_server(("127.0.0.1", 0)) as server:
                near = socket.create_connection(server.getsockname())
                pairs.append((near, server.accept()[0]))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield pairs
    finally:
        stop.set()
        thread.join()


def speak(near: socket.socket, far: socket.socket) -> bool:
    """Returns True if a connection carries data both ways."""
    for end, other in ((near, far), (far, near)):
        end.sendall(b"x")
        if other.recv(1) != b"x":
            return False
    return True


def aborted(rank: Rank) -> tuple[int, int]:
    """Returns the number of foreign connections opened while groups connected, and of those left after abort."""
    with busy_thread() as pairs:
        if rank.rank == 0:  # here lie the store's connections too
            server = StoreServer(b"secret", "127.0.0.1")
            rank.store.set("port", str(server.port))
        store: Any = build_store(StoreClient(b"secret", "127.0.0.1", int(rank.store.get("port"))))
        place: dict[str, Any] = {"master": "127.0.0.1", "secret": b"secret"}
        world = World.create(store, Membership(rank.rank, rank.size), torch.device("cpu"), timeout_s=20, **place)
        groups = [world.control, *(world.create_group(name=f"group {number}") for number in range(6))]
        before = len(pairs)
    for group in groups:
        group.all_reduce(torch.ones(3)).wait()
    world.control.barrier()
    world.abort("a test")
    store.set(f"after/{rank.rank}", "x")
    assert all(store.get(f"after/{other}") == b"x" for other in range(rank.size))
    for group in groups:
        with pytest.raises(GenerationEndedError):
            group.all_reduce(torch.ones(3)).wait()
    alive = sum(speak(*pair) for pair in pairs[:before])
    for pair in pairs:
        for end in pair:
            end.close()
    rank.store.set(f"done/{rank.rank}", "x")
    assert all(rank.store.get(f"done/{other}") for other in range(rank.size))  # rank 0 holds the other store until here
    world.close()
    return before, alive


@pytest.mark.check
def test_sockets_of_other_threads_survive_the_end_of_a_group() -> None:
    for opened, alive in run_ranks(3, aborted):
        assert opened > 0
        assert alive == opened


def waits_for_the_other(rank: Rank) -> str:
    world = rank.world
    if rank.rank == 0:
        rank.store.get("connected")
        world.abort("rank 0 goes")
        rank.store.get("heard")
        return ""
    rank.store.set("connected", "x")
    with pytest.raises(CommunicationError) as raised:
        world.control.recv(torch.ones(3), world.control.ranks.index(0)).wait()
    rank.store.set("heard", "x")
    return type(raised.value).__name__


def test_who_waits_for_an_aborted_rank_hears_of_it_at_once() -> None:
    """By the connection, not by a time-out, which would be CollectiveTimeoutError."""
    assert run_ranks(2, waits_for_the_other) == ["", "CommunicationError"]


def test_a_number_that_means_another_file_by_now_is_left_alone() -> None:
    before = {one.inode for one in list_sockets()}
    near, far = socket.socketpair()
    with far:
        (found,) = (one for one in list_new_sockets(before) if one.number == near.fileno())
        near.close()
        again, other = socket.socketpair()
        with again, other:
            for end in (again, other):
                if end.fileno() == found.number:
                    found.shut_down()
            assert speak(again, other)
    found.shut_down()  # closed
    assert found.read_listening_address() is None
    assert ProcessSocket(found.number, found.inode).read_endpoints() is None
    assert found.read_source_address() is None


def test_a_connection_is_told_by_its_ports() -> None:
    before = {one.inode for one in list_sockets()}
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = server.getsockname()
        with socket.create_connection(here) as near, server.accept()[0] as far:
            found = {one.number: one for one in list_new_sockets(before)}
            assert found[server.fileno()].read_listening_address() == here
            assert found[near.fileno()].read_listening_address() is None
            assert found[near.fileno()].is_connected_to([here])
            assert not found[near.fileno()].was_accepted_at([here])
            assert found[far.fileno()].was_accepted_at([here])
            assert not found[far.fileno()].is_connected_to([here])
            assert (
                found[far.fileno()].read_peer_address()
                == near.getsockname()
                == found[near.fileno()].read_source_address()
            )
            listener = found[server.fileno()]  # Gloo ends the process where that one fails
            assert not listener.was_accepted_at([here])
            assert not listener.is_connected_to([here])
