"""The key-value store in which the ranks of a run meet: a server, and clients with torch.distributed's store interface.

It replaces torch's TCPStore, which serves anybody: every message goes through a Channel, so that only processes of the
run are served.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, final

from headway.core import channel
from headway.core.channel import AuthenticationError, Channel
from headway.core.channel_server import ChannelPeer, ChannelServer
from headway.core.torch_c10d import load_c10d

if TYPE_CHECKING:
    import socket

PURPOSE = "store"

# Limit of a message, which holds all values that one request asks for.
LIMIT_BYTES = 1 << 26

# Default time-out of `get` and `wait`.
WAIT_S = 300.0

# Time that an answer may take beyond the requested time-out: a stopped server (SIGSTOP) never answers, while its kernel
# keeps the connection alive.
ANSWER_S = 60.0

LENGTH = struct.Struct("!I")

Kind = Literal[b"set", b"wait", b"get", b"check", b"add", b"swap", b"append", b"delete", b"count"]


def pack(*parts: bytes) -> bytes:
    """Joins byte strings into one, each with its length before it."""
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def unpack(message: bytes) -> list[bytes]:
    """Splits the result of `pack` into its byte strings.

    Raises:
        ValueError: the message is malformed.
    """
    parts, place = [], 0
    while place < len(message):
        if len(message) - place < LENGTH.size:
            raise ValueError("a message that ends within a length")
        (length,) = LENGTH.unpack_from(message, place)
        place += LENGTH.size
        if length > len(message) - place:
            raise ValueError("a message that ends within a part")
        parts.append(message[place : place + length])
        place += length
    return parts


@final
class _PendingRequest:
    """A request that waits for keys."""

    def __init__(self, keys: Sequence[bytes], values: bool, until_s: float) -> None:
        self.keys, self.values, self.until_s = keys, values, until_s


@final
class StoreServer:
    """Serves the store in a thread of its own.

    Args:
        address, port: address to listen on; port 0 takes a free one.

    Attributes:
        port: port it listens on.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, secret: bytes, address: str, port: int = 0) -> None:
        self._values: dict[bytes, bytes] = {}
        # At most one request per client: a client waits for its answer before it sends the next one.
        self._waiting: dict[ChannelPeer, _PendingRequest] = {}
        # `_until_s` is finite once the server only waits for its clients to leave.
        self._closing, self._until_s = False, inf
        self._server = ChannelServer(
            address,
            port,
            secret,
            PURPOSE,
            on_message=self._on_message,
            on_disconnect=self._on_disconnect,
            limit_bytes=LIMIT_BYTES,
        )
        self.port = self._server.port
        self._thread = threading.Thread(target=self._run, name="store", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tells the thread to close all connections and end; does not wait for it."""
        self._closing = True
        self._server.wake()

    def close(self) -> None:
        """Closes all connections and ends the thread."""
        self.stop()
        self._thread.join()

    def close_after_others(self, wait_s: float) -> None:
        """Serves until all clients have left, at most for `wait_s`, then closes."""
        self._until_s = monotonic() + wait_s
        self._server.wake()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing and (self._until_s == inf or (self._server.peers and monotonic() < self._until_s)):
            now = monotonic()
            for peer in [peer for peer, one in self._waiting.items() if one.until_s <= now]:
                del self._waiting[peer]
                self._server.send(peer, pack(b"late"))
            # Sleep until the next time-out of a waiting request, or until a message comes.
            until_s = min(self._until_s, *(one.until_s for one in self._waiting.values()), inf)
            self._server.poll(None if until_s == inf else max(0.0, until_s - monotonic()))
        self._server.close()

    def _on_disconnect(self, peer: ChannelPeer, why: str) -> None:
        self._waiting.pop(peer, None)

    def _on_message(self, peer: ChannelPeer, message: bytes) -> None:
        kind, *parts = unpack(message) or [b""]
        # `set` has no answer, to save a round trip; requests of one client are handled in order.
        if kind == b"set":
            self._set(*_expect_parts(parts, 2))
        elif kind in (b"wait", b"get"):
            if not parts:
                raise ValueError("a request without a time")
            until_s = monotonic() + _parse_number(parts[0]) / 1e3
            self._waiting[peer] = _PendingRequest(parts[1:], kind == b"get", until_s)
            self._answer(peer)
        else:
            self._server.send(peer, pack(b"done", self._execute(kind, parts)))

    def _execute(self, kind: bytes, parts: list[bytes]) -> bytes:
        values = self._values
        if kind == b"check":
            return _encode_number(all(key in values for key in parts))
        if kind == b"add":
            key, amount = _expect_parts(parts, 2)
            self._set(key, _encode_number(_parse_number(values.get(key, b"0")) + _parse_number(amount)))
            return values[key]
        if kind == b"swap":
            key, expected, desired = _expect_parts(parts, 3)
            # As in torch's stores, a missing key counts as an empty value.
            if values.get(key, b"") == expected:
                self._set(key, desired)
            return values.get(key, expected)
        if kind == b"append":
            key, more = _expect_parts(parts, 2)
            self._set(key, values.get(key, b"") + more)
            return b""
        if kind == b"delete":
            (key,) = _expect_parts(parts, 1)
            return _encode_number(values.pop(key, None) is not None)
        if kind == b"count":
            return _encode_number(len(values))
        raise ValueError(f"a request of unknown kind {kind!r}")

    def _set(self, key: bytes, value: bytes) -> None:
        # A new value may complete requests that wait for it.
        self._values[key] = value
        for peer in [peer for peer, one in self._waiting.items() if key in one.keys]:
            self._answer(peer)

    def _answer(self, peer: ChannelPeer) -> None:
        """Answers a waiting peer if all of its keys are set."""
        one = self._waiting[peer]
        if all(key in self._values for key in one.keys):
            del self._waiting[peer]
            self._server.send(peer, pack(b"done", *([self._values[key] for key in one.keys] if one.values else [])))


def _expect_parts(parts: list[bytes], count: int) -> list[bytes]:
    if len(parts) != count:
        raise ValueError(f"a request with {len(parts)} parts in the place of {count}")
    return parts


def _parse_number(text: bytes) -> int:
    # 20 characters hold any 64-bit number with its sign; int() of more takes quadratic time.
    if len(text) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(text)


def _encode_number(value: int) -> bytes:
    return str(int(value)).encode()


@final
class StoreClient:
    """A connection to a StoreServer. Any thread may use it; a thread that waits for a key blocks the others.

    Args:
        refused_s: for how long a refused connection is retried, for a server that starts later.

    Attributes:
        address, port: address of the server.

    Raises:
        OSError, CommunicationError: see `channel.connect`. All methods raise RuntimeError, as torch's stores do.
    """

    def __init__(self, secret: bytes, address: str, port: int, *, refused_s: float = 0.0) -> None:
        self.address, self.port, self.secret = address, port, secret
        self._lock = threading.Lock()
        self._inbox: list[bytes] = []
        self._end: socket.socket
        self._channel: Channel
        self._end, self._channel = channel.connect(
            address, port, secret, PURPOSE, timeout_s=WAIT_S, limit_bytes=LIMIT_BYTES, refused_s=refused_s
        )
        channel.tune_socket(self._end, WAIT_S)

    def __del__(self) -> None:
        # `connect` may have failed, before there was a connection.
        if hasattr(self, "_end"):
            self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._end.close()

    def ask(self, kind: Kind, *parts: bytes, answers: bool = True) -> list[bytes]:
        """Sends a request and returns the parts of its answer, or nothing if `answers` is False."""
        # The first part of these requests is their time-out in milliseconds.
        wait_s = int(parts[0]) / 1e3 if kind in (b"wait", b"get") else 0.0
        with self._lock:
            try:
                self._end.settimeout(wait_s + ANSWER_S)
                self._end.sendall(self._channel.seal(pack(kind, *parts)))
                if not answers:
                    return []
                while not self._inbox:
                    if not (data := self._end.recv(1 << 16)):
                        raise ConnectionResetError("its connection has ended")
                    self._inbox += self._channel.feed(data)
                status, *values = unpack(self._inbox.pop())
            except (OSError, AuthenticationError) as error:
                # Close: an answer that came late would be taken for that of the next request.
                self._end.close()
                raise RuntimeError(f"the store of the ranks is gone ({error})") from error
        if status == b"late":
            # "timeout" is how torch's code, and `gloo`, tell this from a lost store.
            names = b", ".join(parts[1:]).decode(errors="replace")
            raise RuntimeError(f"wait timeout after {wait_s:g} s, keys: {names}")
        return values


def build_store(client: StoreClient) -> Any:
    """Returns the store as a torch.distributed store, usable for its groups; its method `open_prefix` adds a prefix."""
    return _define_store_class()(client, "")


# ruff counts each method of the nested class as a branch; none of them has one.
@cache
def _define_store_class() -> Any:  # noqa: C901
    """Defines the store class on first use, since its base is torch's."""

    @final
    class ClientStore(load_c10d().Store):  # type: ignore[misc]
        """The part of the store whose keys begin with `prefix`."""

        def __init__(self, client: StoreClient, prefix: str) -> None:
            super().__init__()
            self.client, self._prefix = client, prefix

        @property
        def port(self) -> int:
            return self.client.port

        def open_prefix(self, prefix: str) -> ClientStore:
            return ClientStore(self.client, f"{self._prefix}{prefix}/")

        def clone(self) -> ClientStore:
            """Returns the same part over a connection of its own."""
            client = self.client
            return ClientStore(StoreClient(client.secret, client.address, client.port), self._prefix)

        def set(self, key: str, value: str | bytes) -> None:
            self.client.ask(b"set", self._key(key), _encode_bytes(value), answers=False)

        def get(self, key: str) -> bytes:
            return self.multi_get([key])[0]

        def multi_get(self, keys: Sequence[str], wait_s: float = WAIT_S) -> list[bytes]:
            return self.client.ask(b"get", _encode_number(round(wait_s * 1e3)), *map(self._key, keys))

        def wait(self, keys: Sequence[str], timeout: timedelta = timedelta(seconds=WAIT_S)) -> None:
            self.client.ask(b"wait", _encode_number(round(timeout.total_seconds() * 1e3)), *map(self._key, keys))

        def check(self, keys: Sequence[str]) -> bool:
            return self.client.ask(b"check", *map(self._key, keys)) == [b"1"]

        def add(self, key: str, amount: int) -> int:
            return int(self.client.ask(b"add", self._key(key), _encode_number(amount))[0])

        def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
            return self.client.ask(b"swap", self._key(key), _encode_bytes(expected), _encode_bytes(desired))[0]

        def append(self, key: str, value: str | bytes) -> None:
            self.client.ask(b"append", self._key(key), _encode_bytes(value))

        def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
            for key, value in zip(keys, values, strict=True):
                self.set(key, value)

        def delete_key(self, key: str) -> bool:
            return self.client.ask(b"delete", self._key(key)) == [b"1"]

        def num_keys(self) -> int:
            return int(self.client.ask(b"count")[0])

        def has_extended_api(self) -> bool:
            return True

        def set_timeout(self, timeout: timedelta) -> None:
            """Does nothing: each request carries its own time-out."""

        # torch's C++ code calls these methods by their camel-case names.
        deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

        def _key(self, key: str) -> bytes:
            return (self._prefix + key).encode()

    return ClientStore


def _encode_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
