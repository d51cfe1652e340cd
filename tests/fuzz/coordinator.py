"""What connections may send to a Coordinator. It turns them away and goes on serving."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.damage import damage_bytes, damage_tree, encode

from headway.comm.coordinator import COORDINATOR_PURPOSE, Coordinator
from headway.core import channel
from headway.core.channel import MAGIC, AuthenticationError, Channel

HOST, SECRET = "127.0.0.1", b"sesame"
HELLO = {"kind": "hello", "id": "0.1.0", "host": 0, "local": 1, "identity": "there/1", "pid": 1}
WORDS: tuple[dict[str, Any], ...] = (
    {"kind": "here"},
    {"kind": "ready", "generation": 0},
    {"kind": "confirm", "generation": 0, "nonce": 3},
    {"kind": "accuse", "generation": 0, "rank": 1},
    {"kind": "bye", "done": True},
    {"kind": "beat"},
)
PATIENCE_S = 60


def _connected(port: int, random: Random, known: bool) -> tuple[socket.socket, Channel]:
    """A connection of a process of the run, or of a stranger who has seen how one begins."""
    if known:
        end, spoken = channel.connect(HOST, port, SECRET, COORDINATOR_PURPOSE, timeout_s=PATIENCE_S)
        end.settimeout(PATIENCE_S)
        return end, spoken
    end = socket.create_connection((HOST, port), timeout=PATIENCE_S)
    with contextlib.suppress(ConnectionError):
        end.sendall(damage_bytes(random, MAGIC + random.randbytes(random.choice((0, 31, 64, 200)))))
    return end, Channel(b"guess", COORDINATOR_PURPOSE, accepts=False)


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Callable[[Random], None]]:
    made = Coordinator([(0, 0), (0, 1)], secret=SECRET, timeout_s=60, store_port=1, on_event=lambda event: None)

    def one(random: Random) -> None:
        known = random.randrange(4) > 0
        said = [HELLO] * random.randrange(2) + [random.choice(WORDS) for _ in range(random.randrange(4))]
        lines = [encode(message if random.randrange(2) else damage_tree(random, message)) + b"\n" for message in said]
        if random.randrange(2):
            lines.append(damage_bytes(random, random.choice(lines or [b"x"])))
        end, spoken = _connected(made.port, random, known)
        with end, contextlib.suppress(ConnectionError, AuthenticationError):
            for line in lines:
                sealed = spoken.seal(line) if known else line
                end.sendall(damage_bytes(random, sealed) if random.randrange(8) == 0 else sealed)
            with contextlib.suppress(OSError):  # ENOTCONN: the other end has closed it by then
                end.shutdown(socket.SHUT_WR)
            while data := end.recv(1 << 16):
                spoken.feed(data)
        end, spoken = _connected(made.port, random, True)
        with end:  # it lives, and says why it lets nobody in
            end.sendall(spoken.seal(encode({**HELLO, "local": 7}) + b"\n"))
            answers: list[bytes] = []
            while not answers and (data := end.recv(1 << 16)):
                answers += spoken.feed(data)
            assert answers, "no answer"
            assert b"refused" in answers[0], answers

    yield one
    made.close()
