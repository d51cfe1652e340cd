"""Authenticated messages between processes of one run over TCP.

Both ends prove that they know the run's secret, which never crosses the network: each answers the other's nonce with an
HMAC of both nonces. Every message then carries an HMAC with its number, under a key of this connection and direction.
Bytes that a stranger sends, changes, repeats or reorders end the connection. Nothing is encrypted.
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
# Sent in place of the accepting end's proof if the connecting end does not know the secret.
REFUSED = bytes(PROOF_BYTES)

HEADER = struct.Struct("!I")
# Default limit of a message: a header from outside cannot make the reader allocate more.
LIMIT_BYTES = 1 << 22

# Time-out of the handshake for the connecting end.
CONNECT_S = 60.0
# Pause before the next attempt after the accepting end closed the connection during the handshake.
PAUSE_S = 0.05


class AuthenticationError(ValueError):
    """The bytes do not come from a process of this run, or were changed in transit."""


@final
class Channel:
    """The protocol of one end of a connection: bytes in, messages out, and back. It owns no socket.

    Args:
        secret: the run's secret.
        purpose: name of the service; both ends give the same one.
        accepts: True if this end accepted the connection, False if it opened it.
        limit_bytes: longer messages are refused.

    Attributes:
        ready: True once both ends have proved themselves; messages may then be sent.
        out: bytes to send; the sender empties it.
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
        """Returns the bytes that carry one message."""
        assert self.ready
        tag = self._compute_tag(self._seals, self._sent, message)
        self._sent += 1
        return HEADER.pack(len(message)) + tag + message

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the messages that `data` completes; the stream may be split anywhere.

        Raises:
            AuthenticationError: the bytes are not of this run, or a message is too long.
        """
        # TCP is a byte stream: keep the incomplete rest for the next call.
        self._rest += data
        if not self.ready and not self._shake_hands():
            return []
        messages = []
        while (message := self._read_message()) is not None:
            messages.append(message)
        return messages

    def _shake_hands(self) -> bool:
        """Advances the handshake and returns True once it is complete.

        The accepting end sends its nonce first and proves itself only after the other end has: a stranger gets no HMAC
        to work on.
        """
        # Accepting end: the other end's nonce and proof arrive together, in answer to our nonce.
        if self._accepts:
            if (hello := self._take(len(MAGIC) + NONCE_BYTES + PROOF_BYTES)) is None:
                return False
            self._set_nonces(self._nonce, self._read_nonce(hello))
            if not hmac.compare_digest(hello[-PROOF_BYTES:], self._compute_mac(b"connects")):
                self.out += REFUSED
                raise AuthenticationError("it does not know the secret of this run")
            self.out += self._compute_mac(b"accepts")
        # Connecting end, first step: answer the accepting end's nonce.
        elif not self._nonces:
            if (hello := self._take(len(MAGIC) + NONCE_BYTES)) is None:
                return False
            self._set_nonces(self._read_nonce(hello), self._nonce)
            self.out += MAGIC + self._nonce + self._compute_mac(b"connects")
            return False
        # Connecting end, second step: check the accepting end's proof.
        else:
            if (proof := self._take(PROOF_BYTES)) is None:
                return False
            if proof == REFUSED:
                raise AuthenticationError("it says that this process does not know the secret of its run")
            if not hmac.compare_digest(proof, self._compute_mac(b"accepts")):
                raise AuthenticationError("it does not know the secret of this run")
        # One key per direction, so that a message cannot be sent back to its author.
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
        # Refuse another protocol by its first bytes, before a whole hello has come: an HTTP client sends fewer.
        expected = MAGIC[: len(self._rest)] if length > PROOF_BYTES else b""
        if not self._rest.startswith(expected):
            raise AuthenticationError("it does not speak as a process of a run does")
        if len(self._rest) < length:
            return None
        taken = bytes(self._rest[:length])
        del self._rest[:length]
        return taken

    def _read_message(self) -> bytes | None:
        if len(self._rest) < HEADER.size:
            return None
        # The length is not authenticated yet, so it is limited before anything is allocated for it.
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
        # The number refuses repeated, dropped and reordered messages; 16 bytes of an HMAC cannot be guessed.
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
    """Opens an authenticated connection. Its socket blocks without a time-out.

    A server under a flood of strangers may drop a connection during the handshake; the attempt is repeated until
    `timeout_s` has passed.

    Args:
        refused_s: for how long a refused connection is retried, for a server that starts later.

    Raises:
        OSError: no server listens there, or it does not answer in time.
        CommunicationError: one of the two ends does not know the secret.
    """
    began = time.monotonic()
    until_s = began + timeout_s
    while True:
        try:
            end = socket.create_connection((address, port), timeout=max(0.01, until_s - time.monotonic()))
        # The server may not listen yet: processes of a run start in any order.
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
        # Closed during the handshake, as a full server does: try again.
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
    """Completes the handshake. Returns False if the other end closed the connection meanwhile."""
    while not channel.ready:
        # One deadline for the whole handshake: a peer that sends a byte now and then must not extend it.
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
    """Turns Nagle's algorithm off and makes a link that is cut for `timeout_s` an error on both sides."""
    seconds = max(1, round(timeout_s / 2))
    # Keepalive finds the cut while the connection is idle, TCP_USER_TIMEOUT while data wait for acknowledgement.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(timeout_s * 1000)))
