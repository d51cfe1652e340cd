"""What connections may send to a Coordinator. It turns them away and goes on serving."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.damage import damage_bytes, damage_tree, encode

from headway.comm.coordinator import Coordinator
from headway.comm.messages import Lines

TOKEN = "sesame"
HELLO = {"kind": "hello", "token": TOKEN, "id": "0.1.0", "host": 0, "local": 1, "identity": "there/1", "pid": 1}
WORDS: tuple[dict[str, Any], ...] = (
    {"kind": "here"},
    {"kind": "ready", "generation": 0},
    {"kind": "confirm", "generation": 0, "nonce": 3},
    {"kind": "accuse", "generation": 0, "rank": 1},
    {"kind": "bye", "done": True},
    {"kind": "beat"},
)
PATIENCE_S = 60


@contextlib.contextmanager
def target(folder: Path) -> Iterator[Callable[[Random], None]]:
    made = Coordinator([(0, 0), (0, 1)], token=TOKEN, timeout_s=60, store_port=1, tell=lambda event: None)

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", made.port), timeout=PATIENCE_S)

    def one(random: Random) -> None:
        known = random.randrange(2)
        said = [HELLO] * known + [random.choice(WORDS) for _ in range(random.randrange(4))]
        lines = [
            encode(message if random.randrange(2) and known else damage_tree(random, message)) + b"\n"
            for message in said
        ]
        if random.randrange(2):
            lines.append(damage_bytes(random, random.choice(lines or [b"x"])))
        with connect() as end, contextlib.suppress(ConnectionError):
            for line in lines:
                end.sendall(line)
            end.shutdown(socket.SHUT_WR)
            lines_back = Lines()
            while data := end.recv(1 << 16):
                lines_back.feed(data)
        with connect() as end:  # it lives, and says why it lets nobody in
            end.sendall(json.dumps({"kind": "hello", "token": "guess"}).encode() + b"\n")
            answer = end.recv(1 << 16)
            assert b"refused" in answer, answer

    yield one
    made.close()
