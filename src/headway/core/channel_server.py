"""The accepting end of Channels. Strangers cost it little and cannot keep it from serving the run.

A new connection has `PROVE_S` to authenticate, and at most `UNPROVED` such connections are kept. One more closes the
oldest of the address that holds most of them, so that a flood from one host closes its own connections. A process of
the run that is closed all the same connects again (`channel.connect`).
"""

from __future__ import annotations

import selectors
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, final

from headway.core.channel import LIMIT_BYTES, Channel

# Time-out of the handshake.
PROVE_S = 30.0
# Most connections in the handshake; one more closes one of them.
UNPROVED = 64
# Most connections accepted per round, so that a flood does not delay the peers.
AT_ONCE = 64
# Pause after a failed accept, so that a process without free file descriptors does not spin.
PAUSE_S = 0.01

RECEIVE_BYTES = 1 << 16


@final
class ChannelPeer:
    """One accepted connection.

    Attributes:
        address: source address.
        of: whatever the owner of the server attaches to the peer; None at first.
    """

    def __init__(self, connection: socket.socket, address: str, channel: Channel) -> None:
        self.connection, self.address, self.channel = connection, address, channel
        self.since_s = monotonic()
        self.finishing = self.closed = False
        self.of: Any = None


@final
class ChannelServer:
    """Accepts Channels at one port. It has no thread of its own: one thread calls `poll` and all other methods.

    Args:
        address: address to listen on; "" for all interfaces, "::" for IPv6 ones too.
        secret, purpose: see Channel.
        on_message: called with each message of a peer. A ValueError from it, or other bytes than a message of the run,
            ends the connection; `on_disconnect` gets the reason.
        on_disconnect: called when a peer's connection has ended, with the reason; empty if the peer closed it.
        on_connect: called when a peer has authenticated.
        prove_s: time-out of the handshake.

    Attributes:
        port: port it listens on.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        purpose: str,
        *,
        on_message: Callable[[ChannelPeer, bytes], None],
        on_disconnect: Callable[[ChannelPeer, str], None] = lambda peer, why: None,
        on_connect: Callable[[ChannelPeer], None] = lambda peer: None,
        limit_bytes: int = LIMIT_BYTES,
        prove_s: float = PROVE_S,
    ) -> None:
        self._prove_s = prove_s
        self._secret, self._purpose, self._limit = secret, purpose, limit_bytes
        self._on_message, self._on_disconnect, self._on_connect = on_message, on_disconnect, on_connect
        self._unproved: dict[ChannelPeer, None] = {}
        self._peers: set[ChannelPeer] = set()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector = selectors.DefaultSelector()
        for end in (self._listener, self._woken):
            self._selector.register(end, selectors.EVENT_READ)

    @property
    def peers(self) -> int:
        """Number of authenticated connections."""
        return len(self._peers)

    def wake(self) -> None:
        """Makes `poll` return. Any thread may call it."""
        with suppress(OSError):
            self._wake.send(b"\0")

    def poll(self, wait_s: float | None = None) -> None:
        """Accepts, receives and sends until nothing is ready; waits at most `wait_s` for the first event."""
        if self._unproved:
            left = max(0.0, next(iter(self._unproved)).since_s + self._prove_s - monotonic())
            wait_s = left if wait_s is None else min(wait_s, left)
        knocked = False
        for key, events in self._selector.select(wait_s):
            if key.fileobj is self._listener:
                knocked = True
            elif key.fileobj is self._woken:
                with suppress(BlockingIOError):
                    self._woken.recv(1 << 12)
            # Another peer's message of this round may have closed this one.
            elif not key.data.closed:
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    self.read(key.data)
        # New connections last: one of them may push out a connection whose proof came in this round.
        if knocked:
            self._accept()
        # The dict keeps the order of arrival, so the first connection within its time ends the search.
        for peer in tuple(self._unproved):
            if monotonic() < peer.since_s + self._prove_s:
                break
            self.close_peer(peer)

    def send(self, peer: ChannelPeer, message: bytes) -> None:
        """Queues a message. A connection that has ended is reported by reading, not here."""
        if not peer.closed:
            peer.channel.out += peer.channel.seal(message)
            self._flush(peer)

    def finish_sending(self, peer: ChannelPeer) -> None:
        """Shuts down the sending side after the queued messages; the other end then closes.

        Closing from here would lose the last message if data had arrived meanwhile: TCP then sends a reset.
        """
        peer.finishing = True
        if not peer.closed:
            self._flush(peer)

    def read(self, peer: ChannelPeer) -> None:
        """Receives from a peer and hands its messages to `on_message`."""
        if peer.closed:
            return
        why = ""
        try:
            data = peer.connection.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            messages = peer.channel.feed(data)
            if peer.channel.ready and peer in self._unproved:
                del self._unproved[peer]
                self._peers.add(peer)
                self._on_connect(peer)
            if peer.channel.out:
                self._flush(peer)
            for message in messages:
                self._on_message(peer, message)
        except ValueError as error:
            why = str(error)
        if why or not data:
            self._disconnect(peer, why)

    def detach(self, peer: ChannelPeer) -> tuple[socket.socket, Channel]:
        """Hands a peer's connection over to another reader; its socket blocks from now on."""
        self._unregister(peer)
        peer.connection.setblocking(True)
        return peer.connection, peer.channel

    def close_peer(self, peer: ChannelPeer) -> None:
        """Closes a connection at once."""
        if not peer.closed:
            self._unregister(peer)
            peer.connection.close()

    def close(self) -> None:
        """Closes all connections. No thread may be in `poll`."""
        for peer in (*self._unproved, *self._peers):
            self.close_peer(peer)
        for end in (self._listener, self._wake, self._woken):
            end.close()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, (address, *_) = self._listener.accept()
            except BlockingIOError:
                return
            # The client gave up waiting, or this process has no free file descriptor.
            except OSError:
                sleep(PAUSE_S)
                return
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(self._secret, self._purpose, accepts=True, limit_bytes=self._limit)
            peer = ChannelPeer(connection, address, channel)
            self._unproved[peer] = None
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._flush(peer)
            if len(self._unproved) > UNPROVED:
                self._push_out()

    def _push_out(self) -> None:
        """Closes the oldest unauthenticated connection of the address that has most of them."""
        crowd = Counter(peer.address for peer in self._unproved).most_common(1)[0][0]
        oldest = next(peer for peer in self._unproved if peer.address == crowd)
        # Its proof may have come since the last round.
        self.read(oldest)
        if oldest in self._unproved:
            self.close_peer(oldest)

    def _flush(self, peer: ChannelPeer) -> None:
        out = peer.channel.out
        try:
            if out:
                del out[: peer.connection.send(out)]
            if peer.finishing and not out:
                peer.connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        # Reading reports the end of the connection.
        except OSError:
            out.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if out else 0)
        self._selector.modify(peer.connection, events, peer)

    def _disconnect(self, peer: ChannelPeer, why: str) -> None:
        proved = peer in self._peers
        # Tell a peer with a wrong secret that it was refused: its user then reads why.
        if not proved and peer.channel.out:
            self._flush(peer)
        if proved:
            self._on_disconnect(peer, why)
        self.close_peer(peer)

    def _unregister(self, peer: ChannelPeer) -> None:
        peer.closed = True
        self._unproved.pop(peer, None)
        self._peers.discard(peer)
        self._selector.unregister(peer.connection)
