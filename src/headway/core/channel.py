"""Channel: messages between processes of one run over TCP. Both ends prove that they know the run's secret.

The secret itself never crosses the network. Each end answers the other's random number with an HMAC of both, and every
message then carries an HMAC under a key of this connection and direction, with the message's number in it: bytes that a
stranger sends, changes, repeats or swaps end the connection instead of being read. Nothing is encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from typing import final

from headway.core.errors import CommunicationError

MAGIC = b"headway1"
NONCE_BYTES, PROOF_BYTES, TAG_BYTES = 32, 32, 16
REFUSED = bytes(PROOF_BYTES)
"""In the place of the accepting end's proof: the other end does not know the secret."""

HEADER = struct.Struct("!I")
LIMIT_BYTES = 1 << 22
"""The longest message, unless its reader expects longer ones."""

CONNECT_S = 60.0
"""How long the accepting end may take to prove itself."""
PAUSE_S = 0.05
"""Before another attempt, where the accepting end closed the connection before it had heard the proof."""


class AuthenticationError(ValueError):
    """Bytes that do not come from a process of this run, or were changed on the way."""


@final
class Channel:
    """One end of a connection: bytes in, messages out, and the other way round. It owns no socket.

    Args:
        secret: of the run.
        purpose: what the connection serves; both ends name the same.
        accepts: this end has accepted the connection; else it has made it.
        limit_bytes: a longer message is refused.

    Attributes:
        ready: both ends have proved themselves, so that messages may be sent.
        out: bytes to send; whoever sends them empties it.
    """

    def __init__(self, secret: bytes, purpose: str, *, accepts: bool, limit_bytes: int = LIMIT_BYTES) -> None:
        self._secret, self._purpose, self._accepts, self._limit = secret, purpose.encode(), accepts, limit_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._nonces = b""
        self._rest = bytearray()
        self._sent = self._received = 0
        self._seals = self._opens = b""
        self.ready = False
        self.out = bytearray(MAGIC + self._nonce if accepts else b"")

    def seal(self, message: bytes) -> bytes:
        """The bytes that carry one message."""
        assert self.ready
        tag = self._compute_tag(self._seals, self._sent, message)
        self._sent += 1
        return HEADER.pack(len(message)) + tag + message

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that `data` completes, whatever pieces the stream was torn into.

        Raises:
            AuthenticationError: they are not of this run, or too long.
        """
        self._rest += data
        if not self.ready and not self._shake_hands():
            return []
        found = []
        while (message := self._read_message()) is not None:
            found.append(message)
        return found

    def _shake_hands(self) -> bool:
        """The accepting end begins with its number, and proves itself only to who has proved himself."""
        if self._accepts:
            if (hello := self._take(len(MAGIC) + NONCE_BYTES + PROOF_BYTES)) is None:
                return False
            self._set_nonces(self._nonce, self._read_nonce(hello))
            if not hmac.compare_digest(hello[-PROOF_BYTES:], self._compute_mac(b"connects")):
                self.out += REFUSED
                raise AuthenticationError("it does not know the secret of this run")
            self.out += self._compute_mac(b"accepts")
        elif not self._nonces:
            if (hello := self._take(len(MAGIC) + NONCE_BYTES)) is None:
                return False
            self._set_nonces(self._read_nonce(hello), self._nonce)
            self.out += MAGIC + self._nonce + self._compute_mac(b"connects")
            return False
        else:
            if (proof := self._take(PROOF_BYTES)) is None:
                return False
            if proof == REFUSED:
                raise AuthenticationError("it says that this process does not know the secret of its run")
            if not hmac.compare_digest(proof, self._compute_mac(b"accepts")):
                raise AuthenticationError("it does not know the secret of this run")
        ends = self._compute_mac(b"from the accepting end"), self._compute_mac(b"from the connecting end")
        self._seals, self._opens = ends if self._accepts else ends[::-1]
        self.ready = True
        return True

    def _read_nonce(self, hello: bytes) -> bytes:
        if not hello.startswith(MAGIC):
            raise AuthenticationError("it does not speak as a process of a run does")
        return hello[len(MAGIC) : len(MAGIC) + NONCE_BYTES]

    def _set_nonces(self, accepting: bytes, connecting: bytes) -> None:
        self._nonces = accepting + connecting

    def _compute_mac(self, label: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join((self._purpose, label, self._nonces)), "sha256")

    def _take(self, length: int) -> bytes | None:
        # Who speaks no word of ours is known by his first bytes, however few they are.
        expected = MAGIC[: len(self._rest)] if length > PROOF_BYTES else b""
        if not self._rest.startswith(expected):
            raise AuthenticationError("it does not speak as a process of a run does")
        if len(self._rest) < length:
            return None
        found = bytes(self._rest[:length])
        del self._rest[:length]
        return found

    def _read_message(self) -> bytes | None:
        if len(self._rest) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._rest)
        if length > self._limit:
            raise AuthenticationError(f"a message of more than {self._limit:,} bytes")
        begin = HEADER.size + TAG_BYTES
        if len(self._rest) < begin + length:
            return None
        tag, message = bytes(self._rest[HEADER.size : begin]), bytes(self._rest[begin : begin + length])
        del self._rest[: begin + length]
        if not hmac.compare_digest(tag, self._compute_tag(self._opens, self._received, message)):
            raise AuthenticationError("a message that was changed, repeated or sent by a stranger")
        self._received += 1
        return message

    @staticmethod
    def _compute_tag(key: bytes, number: int, message: bytes) -> bytes:
        return hmac.digest(key, number.to_bytes(8, "big") + message, "sha256")[:TAG_BYTES]


def connect(
    address: str,
    port: int,
    secret: bytes,
    purpose: str,
    *,
    timeout_s: float = CONNECT_S,
    limit_bytes: int = LIMIT_BYTES,
    refused_s: float = 0.0,
) -> tuple[socket.socket, Channel]:
    """A connection whose two ends have proved themselves; it blocks without a time-out.

    A crowd of strangers can push a process out before it has been heard; it comes again until the time is over.

    Args:
        refused_s: how long nobody may listen there yet.

    Raises:
        OSError: nobody listens there, or does not answer in time.
        CommunicationError: the other end does not know the secret, or says so of this one.
    """
    began = time.monotonic()
    until_s = began + timeout_s
    while True:
        try:
            end = socket.create_connection((address, port), timeout=max(0.01, until_s - time.monotonic()))
        except ConnectionRefusedError:
            if time.monotonic() > began + refused_s:
                raise
            time.sleep(PAUSE_S)
            continue
        channel = Channel(secret, purpose, accepts=False, limit_bytes=limit_bytes)
        try:
            if _authenticate(end, channel, until_s):
                end.settimeout(None)
                return end, channel
        except ConnectionError:
            pass
        except AuthenticationError as error:
            end.close()
            fix = "Give all processes of the run the same HEADWAY_SECRET."
            raise CommunicationError(
                f"another program listens there: {error}", where=_format_address(address, port), fix=fix
            ) from None
        except BaseException:
            end.close()
            raise
        end.close()
        if time.monotonic() + PAUSE_S > until_s:
            raise TimeoutError("the connection was closed again and again before it could be used")
        time.sleep(PAUSE_S)


def _authenticate(end: socket.socket, channel: Channel, until_s: float) -> bool:
    """Whether the other end has heard the proof and given its own; it sends nothing more before it is spoken to."""
    while not channel.ready:
        # For the proof as a whole: an end that sends a byte now and then would begin a time of its own with each.
        if (left_s := until_s - time.monotonic()) <= 0:
            raise TimeoutError("the other end took too long to prove itself")
        end.settimeout(left_s)
        if not (data := end.recv(1 << 10)):
            return False
        channel.feed(data)
        end.sendall(channel.out)
        channel.out.clear()
    return True


def _format_address(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def tune_socket(connection: socket.socket, timeout_s: float) -> None:
    """Small messages at once, and an error on both sides of a link that is cut for `timeout_s`."""
    seconds = max(1, round(timeout_s / 2))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))
