"""The coordinator: what connections may say, who is let in, and in what order generations are formed."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.comm._fleet import SECRET, Fleet, asked, fleet, heard, next_of, until

from headway.comm.coordinator import COORDINATOR_PURPOSE
from headway.comm.coordinator_client import CoordinatorClient
from headway.core import channel
from headway.core.errors import CommunicationError, FencedError, GenerationEndedError

HELLO = {"kind": "hello", "id": "0.1.0", "host": 0, "local": 1, "identity": "there/1", "pid": 1}


def line(**message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def connect(made: Fleet) -> socket.socket:
    """The bare connection of a stranger."""
    return socket.create_connection(("127.0.0.1", made.coordinator.port), timeout=60)


class End:
    """A process that knows the secret, and says whatever it likes."""

    def __init__(self, made: Fleet) -> None:
        self.socket, self.channel = channel.connect(
            "127.0.0.1", made.coordinator.port, SECRET.encode(), COORDINATOR_PURPOSE
        )
        self.socket.settimeout(60)

    def __enter__(self) -> End:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, message: bytes) -> None:
        self.socket.sendall(self.channel.seal(message))

    def recv(self) -> bytes:
        """What has come; empty where the other side has closed."""
        try:
            data = self.socket.recv(4096)
        except ConnectionResetError:
            return b""
        return b"".join(self.channel.feed(data)) or (data and b"\n")

    def answer(self) -> str:
        """Everything until the other side closes."""
        found = b""
        while data := self.recv():
            found += data
        return found.decode()


def rest(end: socket.socket) -> bytes:
    """Everything that a stranger is told until the other side closes."""
    found = b""
    try:
        while data := end.recv(4096):
            found += data
    except ConnectionResetError:
        pass
    return found


GARBAGE = {
    "bytes": b"\xff\xfe\x00\n",
    "no_object": b"[1]\n",
    "no_kind": b"{}\n",
    "kind_is_no_text": b'{"kind": 5}\n',
    "nested": b"[" * 60_000 + b"\n",
    "long_number": b"1" * 9_000 + b"\n",
    "too_long": b"x" * (1 << 17),
    "half_utf8": b'{"kind": "\xc3"}\n',
    "empty_lines": b"\n\n\n",
    "other_protocol": b"GET / HTTP/1.1\r\n\r\n",
}
BAD_HELLOS: dict[str, dict[str, Any]] = {
    "host": {"host": "0"},
    "bool": {"local": True},
    "identity": {"identity": ["x"]},
    "other_place": {"local": 7},
    "joining": {"joining": True},
    "kind": {"kind": "beat"},
}
BAD_WORDS: dict[str, bytes] = {
    **GARBAGE,
    "unknown": line(kind="sing"),
    "second_hello": line(**HELLO),
    "ready": line(kind="ready"),
    "confirm": line(kind="confirm", generation=None, nonce=1),
    "nonce": line(kind="confirm", generation=0, nonce="x"),
    "accuse": line(kind="accuse", generation=0, rank=None),
}


def still_works(made: Fleet) -> None:
    """Two workers come and form the first generation."""
    members = [made.member("0.1.0"), made.member("0.0.0")]
    assert [found.rank for found in next_of(*members)] == [1, 0]


def begun(made: Fleet, end: End) -> CoordinatorClient:
    """A run of worker 0.0.0, a member, and 0.1.0, which is a bare channel."""
    end.send(line(**HELLO))
    member = made.member("0.0.0")
    assert made.forms(0) == ["0.0.0", "0.1.0"]
    end.send(line(kind="ready", generation=0))
    assert next_of(member)[0].size == 2
    return member


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_of_a_stranger_is_refused_and_harms_nobody(name: str) -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        with connect(made) as end:
            end.sendall(GARBAGE[name])
            # Its random number, and at most that this was no proof.
            assert rest(end)[40:] in (b"", channel.REFUSED)
        assert not made.events
        still_works(made)


@pytest.mark.parametrize("name", BAD_HELLOS)
def test_a_hello_that_is_wrong_is_refused(name: str) -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        with End(made) as end:
            end.send(line(**HELLO | BAD_HELLOS[name]))
            said = end.answer()
        assert '"refused"' in said
        assert not made.events
        still_works(made)


@pytest.mark.parametrize("name", BAD_WORDS)
def test_a_worker_that_talks_nonsense_is_lost_and_the_others_go_on(name: str) -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        good = begun(made, end)
        end.send(BAD_WORDS[name])
        found = next_of(good)[0]
        assert (found.number, found.size, found.lost_workers) == (1, 1, ("0.1.0",))
        assert "an invalid message" in found.reason
        assert '"fenced"' in end.answer()
        assert made.left == {"0.1.0": "died"}


def test_bytes_that_are_put_into_a_workers_connection_end_it_unread() -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        good = begun(made, end)
        end.socket.sendall(line(kind="bye", done=True))
        found = next_of(good)[0]
        assert (found.size, found.lost_workers) == (1, ("0.1.0",))
        assert made.left == {"0.1.0": "died"}


def test_a_message_that_is_repeated_ends_the_connection_unread() -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        good = begun(made, end)
        accusation = end.channel.seal(line(kind="accuse", generation=7, rank=0))
        end.socket.sendall(accusation + accusation)
        assert "repeated" in next_of(good)[0].reason


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.binary(max_size=200)
        | st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), st.lists, max_leaves=5).map(
            lambda value: line(kind="confirm", generation=value, nonce=value)
        ),
        max_size=4,
    ),
    st.booleans(),
)
def test_no_bytes_stop_the_coordinator(garbage: list[bytes], known: bool) -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        with End(made) as end:
            try:
                if known:
                    end.send(line(**HELLO))
                for part in garbage:
                    end.send(part)
                for part in garbage:
                    end.socket.sendall(part)
            except OSError:  # it has closed already
                pass
        still_works(made)


def test_a_message_may_come_in_pieces() -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        for byte in end.channel.seal(line(**HELLO)):
            end.socket.sendall(bytes([byte]))
        good = made.member("0.0.0")
        assert made.forms(0) == ["0.0.0", "0.1.0"]
        end.send(line(kind="ready", generation=0))
        assert next_of(good)[0].size == 2


def test_a_worker_with_a_wrong_secret_says_why_it_ends() -> None:
    with fleet([(0, 0)]) as made:
        with pytest.raises(CommunicationError, match="this process does not know the secret of its run"):
            made.member("0.0.0", secret="a guess at the secret")
        assert next_of(made.member("0.0.0"))[0].size == 1


def test_places_ids_and_late_comers_are_checked() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        first = made.member("0.0.0")
        with pytest.raises(CommunicationError, match="is there already"):
            made.member("0.0.0")
        with pytest.raises(CommunicationError, match="no place"):
            made.member("0.0.1")
        second = made.member("0.1.0")
        next_of(first, second)
        with pytest.raises(CommunicationError, match="has begun without"):
            made.member("0.2.0")
        with pytest.raises(CommunicationError, match="is there already"):
            made.member("0.1.0", joining=True)
        first.leave(True)
        second.leave(True)
        with pytest.raises(CommunicationError, match="the run has ended"):
            made.member("0.2.0", joining=True)


def test_ranks_follow_hosts_and_newcomers_stand_behind_their_host() -> None:
    slots = [(host, local) for host in (0, 1) for local in (0, 1, 2)]
    with fleet(slots) as made:
        members = {f"{host}.{local}.0": made.member(f"{host}.{local}.0") for host, local in reversed(slots)}
        generations = next_of(*members.values())
        assert made.forms(0) == sorted(members)
        assert {found.rank: found.local_ranks for found in generations} == dict.fromkeys(range(6), (0, 1, 2, 0, 1, 2))
        for number, gone in enumerate(("0.0.0", "0.1.0"), 1):  # both at once would be one generation
            members.pop(gone).close()
            made.forms(number)
        next_of(*members.values())
        members |= {name: made.member(name, joining=True) for name in ("1.3.0", "0.1.1", "2.0.0", "0.0.1")}
        assert not members["0.2.0"].has_newcomers  # they are still on their way
        for name in ("1.3.0", "0.1.1", "2.0.0", "0.0.1"):
            members[name].announce_arrival()
            heard(members[name])
        until(lambda: members["0.2.0"].has_newcomers, "newcomers")
        found = {name: one.rank for name, one in zip(members, next_of(*members.values()), strict=True)}
        assert sorted(found, key=found.__getitem__) == made.forms(3)
        assert made.forms(3) == ["0.2.0", "0.0.1", "0.1.1", "1.0.0", "1.1.0", "1.2.0", "1.3.0", "2.0.0"]
        assert not any(member.has_newcomers for member in members.values())


def test_a_host_that_comes_back_stands_at_the_end() -> None:
    """Rank 0 is the one whose state counts: a newcomer is never it."""
    with fleet([(0, 0), (1, 0)]) as made:
        first, second = made.member("0.0.0"), made.member("1.0.0")
        next_of(first, second)
        first.close()
        assert next_of(second)[0].rank == 0
        again = made.member("0.0.1", joining=True)
        again.announce_arrival()
        heard(again)
        assert [found.rank for found in next_of(second, again)] == [0, 1]
        assert made.forms(2) == ["1.0.0", "0.0.1"]


def test_the_run_begins_without_a_worker_that_was_given_up() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        member = made.member("0.0.0")
        member.announce_arrival()
        heard(member)
        assert made.formed == []
        made.coordinator.give_up_slot((0, 1))
        assert next_of(member)[0].size == 1


def test_a_worker_lost_before_the_start_leaves_its_place() -> None:
    """Also where all had come, and it fell while it made itself ready."""
    with fleet([(0, 0), (0, 1)]) as made:
        made.member("0.0.0").close()
        until(lambda: made.left == {"0.0.0": "died"}, "the loss")
        stays = made.member("0.1.0")
        assert made.formed == []
        made.member("0.0.1")
        made.forms(0)
        answer = asked(stays)
        until(lambda: any(peer.is_ready for peer in made.coordinator._members), "the one that stays")
        made.members[-1].close()
        until(lambda: len(made.left) == 2, "the second loss")
        assert not made.began
        again = next_of(made.member("0.0.2")) + answer()
        assert [(found.number, found.rank) for found in again] == [(1, 0), (1, 1)]
        assert made.began


def test_a_killed_process_is_lost_though_its_connection_is_open() -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        member = begun(made, end)
        made.coordinator.mark_dead("0.1.0")
        assert next_of(member)[0].lost_workers == ("0.1.0",)
        end.send(line(kind="bye", done=True))  # too late
        assert '"fenced"' in end.answer()
        assert made.left == {"0.1.0": "died"}


def test_a_farewell_counts_though_the_process_was_found_dead_first() -> None:
    with fleet([(0, 0), (0, 1)]) as made, End(made) as end:
        member, busy = begun(made, end), threading.Event()
        made.coordinator._call_soon(lambda: (busy.set(), time.sleep(0.2)))
        assert busy.wait(60)
        end.send(line(kind="bye", done=True))
        made.coordinator.mark_dead("0.1.0")
        member.confirm(0)
        assert made.left == {"0.1.0": "done"}
        made.coordinator.mark_dead("0.1.0")
        member.confirm(0)
        assert len(made.formed) == 1


def test_strangers_and_silent_workers_are_cut_off() -> None:
    with fleet([(0, 0), (0, 1)], timeout_s=2.0) as made, connect(made) as stranger, End(made) as silent:
        found = next_of(begun(made, silent))[0]
        assert "was silent for 2 s" in found.reason
        assert made.left == {"0.1.0": "silent"}
        assert '"beat"' in silent.answer()
        assert len(rest(stranger)) == 40


def test_its_own_pause_is_not_taken_for_silence() -> None:
    """The launcher may be stopped for a while: what workers sent meanwhile lies in its sockets."""
    with fleet([(0, 1)], timeout_s=2.0) as made, End(made) as end:
        end.send(line(**HELLO))
        made.forms(0)
        made.coordinator._call_soon(lambda: time.sleep(2.5))
        end.send(line(kind="beat"))
        end.send(line(kind="confirm", generation=0, nonce=1))
        until(lambda: b'"current":true' in end.recv(), "the answer")
        assert made.left == {}


def test_the_end_of_the_coordinator_is_the_end_of_all() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        members = [made.member("0.0.0"), made.member("0.1.0")]
        next_of(*members)
        called = []
        members[0].watch_generation(0, lambda: called.append(True))
        made.coordinator.close()
        until(lambda: all(member.has_changed for member in members), "the end")
        for action in (members[0].check, members[0].wait_for_generation, lambda: members[0].confirm(0)):
            with pytest.raises(CommunicationError, match="launcher"):
                action()
        with pytest.raises(CommunicationError):
            members[1].leave(True)
        until(lambda: called == [True], "the call")


def test_newcomers_end_with_the_run() -> None:
    with fleet([(0, 0)]) as made:
        member = made.member("0.0.0")
        next_of(member)
        late = made.member("0.0.1", joining=True)
        member.leave(True)
        assert isinstance(next_of(late)[0], FencedError)
        assert made.left == {"0.0.0": "done"}


def test_a_newcomer_that_is_lost_while_it_waits_is_forgotten() -> None:
    with fleet([(0, 0)]) as made:
        member = made.member("0.0.0")
        next_of(member)
        late = made.member("0.0.1", joining=True)
        late.announce_arrival()
        until(lambda: member.has_newcomers, "the newcomer")
        late.close()
        until(lambda: not member.has_newcomers, "its loss")
        member.confirm(0)
        assert len(made.formed) == 1
        assert next_of(member)[0].size == 1  # who stands at a boundary all the same is not left standing


def test_a_newcomer_that_is_lost_before_its_first_generation_goes_costs_one_more() -> None:
    with fleet([(0, 0), (0, 1)]) as made:
        members = [made.member("0.0.0"), made.member("0.1.0")]
        next_of(*members)
        late = made.member("0.0.1", joining=True)
        late.announce_arrival()
        until(lambda: members[0].has_newcomers, "the newcomer")

        def lose() -> None:
            until(lambda: made.formed[-1].number == 1, "generation 1")
            late.close()

        thread = threading.Thread(target=lose)
        thread.start()
        generations = next_of(*members)
        thread.join()
        assert [(found.number, found.rank, found.size) for found in generations] == [(2, 0, 2), (2, 1, 2)]
        assert generations[0].lost_workers == ("0.0.1",)
        assert made.forms(1) == ["0.0.0", "0.1.0", "0.0.1"]


def test_a_rank_that_does_not_come_can_be_accused_once() -> None:
    with fleet([(0, local) for local in range(4)]) as made:
        members = [made.member(f"0.{local}.0") for local in range(4)]
        next_of(*members)
        for number, rank in ((0, 0), (1, 3), (0, 4), (0, -1)):  # itself, another generation, nobody
            members[0].accuse(number, rank)
        members[0].confirm(0)
        members[0].accuse(0, 3)
        until(lambda: made.formed[-1].number == 1, "the generation without it")
        members[1].accuse(0, 2)
        with pytest.raises(FencedError, match="did not come to the operation in which rank 0 waits for it"):
            until(lambda: members[3].confirm(0), "the end of the accused")
        assert made.left == {"0.3.0": "silent"}
        assert [found.size for found in next_of(*members[:3])] == [3, 3, 3]


def test_a_farewell_instead_of_being_ready_keeps_nobody_waiting() -> None:
    with fleet([(0, 0), (0, 1), (0, 2)]) as made:
        one, two, three = (made.member(f"0.{local}.0") for local in range(3))
        next_of(one, two, three)
        three.close()
        assert made.forms(1) == ["0.0.0", "0.1.0"]
        one.leave(False)
        assert [(found.number, found.size) for found in next_of(two)] == [(2, 1)]


def test_a_farewell_lets_the_others_go_on() -> None:
    with fleet([(0, 0), (0, 1), (0, 2)]) as made:
        one, two, three = (made.member(f"0.{local}.0") for local in range(3))
        next_of(one, two, three)
        one.leave(False)
        two.confirm(0)  # not a loss: the generation goes on
        assert [found.size for found in next_of(two, three)] == [2, 2]
        assert made.left == {"0.0.0": "stopped"}
        two.close()
        with pytest.raises(GenerationEndedError):
            until(lambda: three.confirm(1), "the loss")
        until(lambda: made.formed[-1].number == 2, "the generation of the last")
        three.leave(True)  # while the others would wait for it to be ready
        assert made.left == {"0.0.0": "stopped", "0.1.0": "died", "0.2.0": "done"}
