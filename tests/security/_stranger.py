"""A stranger: reaches the ports of a run's processes, and knows how Headway and torch speak, but no secret.

_stranger.py JSON   with `pids`, `seconds` and `spared`: attacks everything on which those processes and their children
                    listen, but for the spared processes, until the first one has ended or the time is over; says in
                    JSON how often he was let in

He connects from the network in which this script runs. The ports are looked up in /proc, so that he needs no luck.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

TEXT = "the stranger was here"
ESCAPE = f"\x1b[31m{TEXT}\x1b[0m"
FLOOD = 500
"""Connections that each way of attacking a port holds open at once."""
PATIENCE_S = 1.0
PAUSE_S = 0.2
LISTEN = "0A"

Address = tuple[str, int]


def family_of(pid: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
    found = [pid] if pid in parents else []
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found


def listening(pid: int) -> Iterator[Address]:
    """Where a process takes TCP connections, in its own network; 0.0.0.0 means the machine that connects to it."""
    inodes = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it was closed meanwhile
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")):
                    inodes.add(match[1])
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and fields[9] in inodes:
                    host, port = fields[1].split(":")
                    yield _host(host), int(port, 16)


def _host(text: str) -> str:
    words = struct.unpack(f"<{len(text) // 8}I", struct.pack(f">{len(text) // 8}I", *_words(text)))
    packed = struct.pack(f">{len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def _words(text: str) -> list[int]:
    return [int(text[place : place + 8], 16) for place in range(0, len(text), 8)]


class Stranger:
    """Attacks one port, each way in a thread of its own, until `end` is set.

    Attributes:
        done: counts what he did.
    """

    def __init__(self, where: Address) -> None:
        self.where, self.end = where, threading.Event()
        self.done: Counter[str] = Counter()
        ways = (self.floods, self.talks_garbage, self.plays_a_rank, self.plays_a_worker, self.writes_into_the_store)
        self._threads = [threading.Thread(target=self._again_and_again, args=(way,)) for way in ways]
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        self.end.set()
        for thread in self._threads:
            thread.join()

    def _again_and_again(self, way: Callable[[], list[socket.socket]]) -> None:
        held: list[socket.socket] = []
        while not self.end.wait(PAUSE_S):
            with suppress(OSError):
                held += way()
            while len(held) > FLOOD:
                held.pop(0).close()
        for end in held:
            end.close()

    def connect(self) -> socket.socket:
        end = socket.socket(socket.AF_INET6 if ":" in self.where[0] else socket.AF_INET)
        end.settimeout(PATIENCE_S)
        try:
            end.connect(self.where)
        except OSError:
            end.close()
            self.done["not let in"] += 1
            raise
        self.done["let in"] += 1
        return end

    def floods(self) -> list[socket.socket]:
        """Silent connections, not waited for; they stay."""
        found = []
        for _ in range(50):
            end = socket.socket(socket.AF_INET6 if ":" in self.where[0] else socket.AF_INET)
            end.setblocking(False)
            end.connect_ex(self.where)
            found.append(end)
        self.done["silent"] += len(found)
        return found

    def talks_garbage(self) -> list[socket.socket]:
        words = (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 4096, b"headway1", b"headway1" + bytes(31))
        for said in (*words, b"headway1" + bytes(200), ESCAPE.encode()):
            self.say(said)
        return []

    def plays_a_rank(self) -> list[socket.socket]:
        """Gloo takes whoever says the number of a pair; then he says nothing, nonsense, or leaves."""
        held = []
        for number in range(16):
            end = self.connect()
            end.setblocking(False)
            with suppress(OSError):
                end.send(struct.pack("<q", number) + (bytes(range(200)) if number % 4 == 1 else b""))
            if number % 4 == 3:
                end.close()
            else:
                held.append(end)
        return held

    def plays_a_worker(self) -> list[socket.socket]:
        """The words of the coordinator and of hvd's negotiator, with a guess where a secret was wanted."""
        hello = {"kind": "hello", "token": "guess", "id": ESCAPE, "host": 0, "local": 0, "identity": ESCAPE, "pid": 1}
        words = [
            hello,
            {"kind": "bye", "done": True},
            {"kind": "accuse", "generation": 0, "rank": 0},
            {"kind": "stop"},
            {"kind": "fail", "why": ESCAPE},
            {"kind": "request", "request": []},
        ]
        self.say(b"".join(json.dumps(word).encode() + b"\n" for word in words))
        self.say(b"0" * 32 + f"{1:8d}".encode() + json.dumps({"kind": "fail", "why": TEXT}).encode() + b"\n")
        self.say(b"{" * (1 << 20))
        return []

    def writes_into_the_store(self) -> list[socket.socket]:
        """The words of torch's TCPStore: the keys by which ranks meet, and see each other, say what he likes."""
        words = b""
        for generation in range(2):
            for rank in range(4):
                for key in ("host", "listens", "control/0/all/0", "ops", "stages"):
                    words += _store_set(f"/headway/{generation}/{key}/{rank}", json.dumps([0, ESCAPE]).encode())
        for _ in range(20):
            self.say(_validate() + words)
        return []

    def say(self, said: bytes) -> None:
        """Says something, and does not wait for an answer."""
        with self.connect() as end, suppress(OSError):
            end.sendall(said)


def _validate() -> bytes:
    return b"\x00" + struct.pack("<I", 0x3C85F7CE)


def _store_set(key: str, value: bytes) -> bytes:
    return b"\x01" + _sized(key.encode()) + _sized(value)


def _sized(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def main(pids: list[int], seconds: float, spared: list[int]) -> None:
    strangers: dict[Address, Stranger] = {}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s and is_running(pids[0]):
        family = {one for pid in pids for one in family_of(pid)} - {os.getpid(), *spared}
        for where in {where for one in family for where in listening(one)} - strangers.keys():
            strangers[where] = Stranger(where)
        time.sleep(PAUSE_S)
    for stranger in strangers.values():
        stranger.leave()
    print(json.dumps({f"{host} {port}": one.done for (host, port), one in strangers.items()}))


def is_running(pid: int) -> bool:
    """Not so where it waits to be waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
