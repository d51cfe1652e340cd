"""What a rank may send to the negotiator of hvd. The others are told why the job fails, and no thread dies."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.damage import damage_bytes, damage_tree, encode

from headway.comm.hvd.connection import HVD_PURPOSE, MAX_HVD_MESSAGE_BYTES, Connection
from headway.comm.hvd.negotiator import Negotiator
from headway.comm.hvd.requests import Request, Response
from headway.comm.hvd.settings import Settings
from headway.comm.hvd.timeline import Timeline
from headway.core.channel import Channel

RANKS = 2
PATIENCE_S = 60


def _asked() -> list[dict[str, Any]]:
    requests = [
        Request(0, "a", "allreduce", ("float32",), ((3, 2),)),
        Request(0, "b", "allgather", ("int64", "uint8"), ((3, 2), (4,))),
        Request(0, "c", "alltoall", ("float16",), ((4,),), splits=(2, 2)),
        Request(0, "d", "add_set", splits=(0, 1)),
        Request(0, "e", "remove_set", root=1),
        Request(0, "j", "join"),
        Request(1, "f", "barrier"),
    ]
    return [{"kind": "request", "request": request.to_fields()} for request in requests] + [
        {"kind": "done", "process_set": 0},
        {"kind": "stop"},
        {"kind": "fail", "why": "so"},
    ]


def _channels() -> tuple[Channel, Channel]:
    """Both ends of a connection whose processes have proved themselves to each other."""
    made = [
        Channel(b"sesame", HVD_PURPOSE, accepts=accepts, limit_bytes=MAX_HVD_MESSAGE_BYTES) for accepts in (True, False)
    ]
    while not all(channel.ready for channel in made):
        for channel, other in (made, made[::-1]):
            said = bytes(channel.out)
            channel.out.clear()
            other.feed(said)
    return made[0], made[1]


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Callable[[Random], None]]:
    asked = [json.loads(encode(message)) for message in _asked()]

    def one(random: Random) -> None:
        pairs = [socket.socketpair() for _ in range(RANKS)]
        channels = [_channels() for _ in range(RANKS)]
        theirs = {rank: Connection(end, channels[rank][0]) for rank, (_, end) in enumerate(pairs)}
        negotiator = Negotiator(theirs, Settings(cycle_s=0.0), Timeline(), lambda nbytes: f"for {nbytes:d}")
        sent = [random.choice(asked) for _ in range(1 + random.randrange(3))]
        for place, (end, _) in enumerate(pairs):
            end.settimeout(PATIENCE_S)
            with contextlib.suppress(OSError):  # the other end may have closed it by then
                for message in sent:
                    line = encode(damage_tree(random, message) if place or random.randrange(2) else message) + b"\n"
                    sealed = channels[place][1].seal(damage_bytes(random, line) if random.randrange(8) == 0 else line)
                    end.sendall(damage_bytes(random, sealed) if random.randrange(16) == 0 else sealed)
                end.sendall(channels[place][1].seal(b'{"kind":"ended"}\n'))
                end.shutdown(socket.SHUT_WR)
        back = [Connection(end, channels[place][1]) for place, (end, _) in enumerate(pairs)]
        for connection in back:
            while (messages := connection.receive()) is not None:
                for message in messages:
                    if message["kind"] == "go":
                        Response.from_fields(message["response"])
            connection.close()
        negotiator.close()

    yield one
