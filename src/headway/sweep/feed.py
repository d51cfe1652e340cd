"""A feed: batches that a feeder decodes once, for processes that train on them at the same time.

A reader connects to the feeder's socket and says what it reads and from where. For each batch it gets a packet that
names the memory in which the batch lies, with the memory's descriptor if it is new, and answers once it is done.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, final

from headway.data.batch import Batch
from headway.data.batch_plan import BatchPlan
from headway.sweep.batch_memory import BatchMemory

LOG = logging.getLogger("headway.sweep")

PACKET_BYTES = 65_536
"""Most bytes of a packet; the longest one names the state of a run's samples."""
SILENCE_S = 600.0
"""Seconds without a packet after which a reader goes on alone, as after a feeder's death."""


@final
@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A reader's place in a feed.

    Attributes:
        address: name of the feeder's socket, without a file.
        feed: number of the feed.
        slot: number of the reader.
    """

    address: str
    feed: int
    slot: int

    def to_json(self) -> dict[str, Any]:
        """Returns the ticket as a JSON object."""
        return asdict(self)

    def read(self, state: Mapping[str, Any], plan: BatchPlan, position: int) -> Iterator[Batch] | None:
        """Joins the feed; a `Source`. Returns None if the feeder is gone."""
        try:
            connection = open_socket()
            connection.settimeout(SILENCE_S)
            connection.connect(f"\0{self.address}")
            _expect_same_user(connection)
            send(connection, {**self.to_json(), **describe_request(state, plan, position)})
        except OSError as error:
            LOG.warning(f"The shared batches cannot be read ({error}): this process reads on by itself.")
            return None
        return _read_batches(connection)


def describe_request(state: Mapping[str, Any], plan: BatchPlan, position: int) -> dict[str, Any]:
    """Describes batches from a position on: equal descriptions are equal batches."""
    sizes = [plan.starts.tolist(), plan.sizes.tolist()]
    # As they arrive at the other end.
    described: dict[str, Any] = json.loads(json.dumps({"state": dict(state), "sizes": sizes, "position": position}))
    return described


def _read_batches(connection: socket.socket) -> Iterator[Batch]:
    """Yields batches until the feeder ends the feed, or is gone. Images are valid until the next one is asked for."""
    memories: dict[int, BatchMemory] = {}
    why = "its feeder has ended"
    try:
        while True:
            packet, descriptors = receive(connection)
            if packet is None or "end" in packet:
                why = why if packet is None else packet["end"]
                break
            for descriptor in descriptors:
                memory = memories[packet["memory"]] = BatchMemory(packet["size"], descriptor)
                memory.close()
            for number in packet["dropped"]:
                memories.pop(number, None)
            yield memories[packet["memory"]].read(*packet["header"])
            send(connection, {"done": packet["position"]})
    except OSError as error:
        why = str(error)
    finally:
        connection.close()
    LOG.warning(f"The shared batches end here ({why}): this process reads on by itself, with the same batches.")


# Packets.


def open_socket() -> socket.socket:
    """Opens a socket whose packets arrive whole, and which has no file that a killed process could leave behind."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def listen(address: str) -> socket.socket:
    """Opens a socket to which readers of this user can connect. Raises OSError."""
    listener = open_socket()
    listener.bind(f"\0{address}")
    listener.listen(64)
    return listener


def send(connection: socket.socket, packet: Mapping[str, Any], *descriptors: int) -> None:
    """Sends a packet, with descriptors of memory. Raises OSError if the other end is gone."""
    socket.send_fds(connection, [json.dumps(packet).encode()], descriptors, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Receives a packet and its descriptors; None at the end. Raises OSError."""
    data, descriptors, _, _ = socket.recv_fds(connection, PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    if not data:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        return None, []
    return json.loads(data), descriptors


def is_of_same_user(connection: socket.socket) -> bool:
    """Returns True if the other end is a process of this user: the socket has no file whose mode would say so."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.geteuid())


def _expect_same_user(connection: socket.socket) -> None:
    if not is_of_same_user(connection):
        connection.close()
        raise PermissionError("its socket is another user's")
