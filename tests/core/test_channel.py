"""Channels, and the server at their accepting end: who is heard, and who is not."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core import channel
from headway.core.channel import AuthenticationError, Channel
from headway.core.channel_server import AT_ONCE, UNPROVED, ChannelPeer, ChannelServer
from headway.core.errors import CommunicationError

SECRET = b"known to the processes of the run"
HELLO_BYTES = 40


def shake_hands(one: Channel, two: Channel) -> list[bytes]:
    """Lets two ends shake hands; returns the bytes of each turn."""
    said = []
    for end, other in ((one, two), (two, one), (one, two)):
        said.append(bytes(end.out))
        end.out.clear()
        other.feed(said[-1])
    return said


def pair(secret: bytes = SECRET, purpose: str = "a test") -> tuple[Channel, Channel]:
    return Channel(SECRET, "a test", accepts=True, limit_bytes=1000), Channel(secret, purpose, accepts=False)


class Heard:
    """A server in a thread, which answers each message with the same, and what happened at it."""

    def __init__(self, **options: Any) -> None:
        self.messages: list[bytes] = []
        self.gone: list[str] = []
        self.server = ChannelServer(
            "127.0.0.1", 0, SECRET, "a test", on_message=self._heed, on_disconnect=self._note, **options
        )
        self.port, self._over = self.server.port, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _heed(self, peer: ChannelPeer, message: bytes) -> None:
        self.messages.append(message)
        self.server.send(peer, message)

    def _note(self, peer: ChannelPeer, why: str) -> None:
        self.gone.append(why)

    def _run(self) -> None:
        while not self._over:
            self.server.poll()

    def close(self) -> None:
        self._over = True
        self.server.wake()
        self._thread.join()
        self.server.close()

    def is_well(self) -> bool:
        """Returns True if a process of the run can connect, send a message and get the answer."""
        end, spoken = channel.connect("127.0.0.1", self.port, SECRET, "a test")
        with end:
            end.sendall(spoken.seal(b"are you well?"))
            found: list[bytes] = []
            while not found:
                found = spoken.feed(end.recv(1000))
        return found == [b"are you well?"]


@contextmanager
def serving(**options: Any) -> Iterator[Heard]:
    made = Heard(**options)
    try:
        yield made
    finally:
        made.close()


@given(st.lists(st.binary(max_size=50), max_size=5), st.integers(1, 40))
def test_messages_arrive_whole_however_the_stream_is_torn(messages: list[bytes], size: int) -> None:
    accepts, connects = pair()
    shake_hands(accepts, connects)
    for end, other in ((accepts, connects), (connects, accepts)):
        stream = b"".join(map(end.seal, messages))
        parts = [other.feed(stream[place : place + size]) for place in range(0, len(stream), size)]
        assert [message for part in parts for message in part] == messages


def test_the_secret_and_the_messages_keys_never_cross() -> None:
    accepts, connects = pair()
    said = b"".join(shake_hands(accepts, connects))
    assert SECRET not in said
    assert connects.seal(b"x") != connects.seal(b"x")


def test_a_connecting_end_without_the_secret_learns_a_random_number_alone() -> None:
    accepts, connects = pair(secret=b"guessed")
    connects.feed(bytes(accepts.out))
    assert len(accepts.out) == HELLO_BYTES
    accepts.out.clear()
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        accepts.feed(bytes(connects.out))
    assert not accepts.ready
    assert accepts.out == channel.REFUSED


@pytest.mark.parametrize(("secret", "purpose"), [(b"another", "a test"), (SECRET, "another")])
def test_an_accepting_end_that_cannot_prove_itself_is_not_spoken_to(secret: bytes, purpose: str) -> None:
    connects, impostor = Channel(SECRET, "a test", accepts=False), Channel(secret, purpose, accepts=True)
    connects.feed(bytes(impostor.out))
    with pytest.raises(AuthenticationError):
        connects.feed(bytes(32 * b"x"))
    assert not connects.ready


def test_what_was_recorded_is_refused_when_it_is_said_again() -> None:
    accepts, connects = pair()
    _, proof, _ = shake_hands(accepts, connects)
    message = connects.seal(b"stop")
    assert accepts.feed(message) == [b"stop"]
    with pytest.raises(AuthenticationError, match="repeated"):
        accepts.feed(message)
    with pytest.raises(AuthenticationError, match="does not know the secret"):
        pair()[0].feed(proof + message)


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_one_changed_bit_ends_the_connection(place: int, change: int) -> None:
    accepts, connects = pair()
    shake_hands(accepts, connects)
    sealed = bytearray(connects.seal(b"eight bytes, or a few more"))
    sealed[place % len(sealed)] ^= change
    with suppress(AuthenticationError):
        assert accepts.feed(bytes(sealed)) == []  # the length has grown: nothing is read before the rest is there


def test_a_message_turned_around_and_one_too_long_are_refused() -> None:
    accepts, connects = pair()
    shake_hands(accepts, connects)
    with pytest.raises(AuthenticationError, match="changed, repeated or sent by a stranger"):
        connects.feed(connects.seal(b"mirrored"))
    with pytest.raises(AuthenticationError, match="more than 1,000 bytes"):
        accepts.feed(b"\xff\xff\xff\xff")


def test_a_crowd_of_strangers_costs_the_server_few_files_and_keeps_nobody_out() -> None:
    with serving() as made:
        crowd = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(500)]
        try:
            for number, end in enumerate(crowd):
                with suppress(OSError):  # it was closed
                    end.sendall((b"", b"GET / HTTP/1.1\r\n\r\n", b"headway1", b"headway1" + bytes(200))[number % 4])
            assert made.is_well()
            assert len(made.server._unproved) <= UNPROVED
            assert made.messages == [b"are you well?"]
        finally:
            for end in crowd:
                end.close()


class Slow:
    """A process of the run whose crowd of neighbours comes between each two of its words."""

    def __init__(self, server: ChannelServer, crowd: list[socket.socket], *, crowd_from: str) -> None:
        self._server, self._crowd, self._crowd_from = server, crowd, crowd_from
        self._spoken = Channel(SECRET, "a test", accepts=False)
        self._end = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        crowd.append(self._end)
        server.poll()

    def hear(self) -> None:
        self._spoken.feed(self._end.recv(1000))

    def prove(self) -> None:
        self._end.sendall(self._spoken.out)

    def knock(self) -> None:
        """As many strangers as one round takes, and one more."""
        for _ in range(AT_ONCE + 1):
            self._crowd.append(socket.socket())
            self._crowd[-1].bind((self._crowd_from, 0))
            self._crowd[-1].connect(("127.0.0.1", self._server.port))


@pytest.fixture
def crowd() -> Iterator[list[socket.socket]]:
    """Connections to close."""
    held: list[socket.socket] = []
    yield held
    for end in held:
        end.close()


@pytest.fixture
def polled() -> Iterator[ChannelServer]:
    """A server that the test itself polls."""
    made = ChannelServer("127.0.0.1", 0, SECRET, "a test", on_message=lambda peer, message: None)
    yield made
    made.close()


def test_a_crowd_that_keeps_coming_from_one_address_pushes_out_its_own(
    polled: ChannelServer, crowd: list[socket.socket]
) -> None:
    slow = Slow(polled, crowd, crowd_from="127.0.0.2")
    for act in (lambda: None, slow.hear, slow.prove):
        slow.knock()
        act()
        for _ in range(2):  # the crowd is larger than one round takes
            polled.poll()
    assert polled.peers == 1
    assert len(polled._unproved) == UNPROVED


@pytest.mark.parametrize(
    "act",
    [
        pytest.param(ChannelServer.poll, id="before"),
        pytest.param(ChannelServer._accept, id="while the crowd is let in"),
    ],
)
def test_who_has_sent_his_proof_is_read_though_a_crowd_from_his_own_host_comes(
    polled: ChannelServer, crowd: list[socket.socket], act: Callable[[ChannelServer], None]
) -> None:
    slow = Slow(polled, crowd, crowd_from="127.0.0.1")
    slow.hear()
    slow.knock()
    slow.prove()
    act(polled)
    assert polled.peers == 1


def test_who_does_not_prove_himself_in_time_is_closed() -> None:
    with serving(prove_s=0.2) as made, socket.create_connection(("127.0.0.1", made.port)) as silent:
        silent.settimeout(60)
        while silent.recv(1000):
            pass
        assert made.is_well()


def test_an_end_that_drips_does_not_put_off_the_time_out() -> None:
    over = threading.Event()

    def drip() -> None:
        end, _ = listener.accept()
        with end, suppress(OSError):  # it was closed
            for byte in channel.MAGIC + bytes(channel.NONCE_BYTES + channel.PROOF_BYTES):
                end.send(bytes([byte]))
                over.wait(0.02)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        drips = threading.Thread(target=drip)
        drips.start()
        with pytest.raises(TimeoutError):
            channel.connect("127.0.0.1", listener.getsockname()[1], SECRET, "a test", timeout_s=0.2)
        over.set()
        drips.join()


def test_a_wrong_secret_is_said_so_on_the_side_that_has_it() -> None:
    with serving() as made:
        with pytest.raises(CommunicationError, match=r"does not know the secret of its run.*HEADWAY_SECRET"):
            channel.connect("127.0.0.1", made.port, b"guess", "a test")
        assert made.is_well()
        deadline = time.monotonic() + 60
        while not made.gone:  # the end of the connection by which it was asked
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert made.gone == [""]


def test_bytes_put_into_a_peers_connection_end_it_and_are_told() -> None:
    with serving() as made:
        end, spoken = channel.connect("127.0.0.1", made.port, SECRET, "a test")
        with end:
            end.sendall(spoken.seal(b"one")[:-1] + b"x")
            end.settimeout(60)
            assert end.recv(100) == b""
        assert made.messages == []
        assert made.gone == ["a message that was changed, repeated or sent by a stranger"]
