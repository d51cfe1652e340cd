"""The coordinator's port: who is let in, what a lost worker leads to, and one coordinator at a time."""

from __future__ import annotations

import itertools
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from headway import __version__
from headway.core.channel import connect
from headway.core.errors import CommunicationError, HeadwayError, UsageError
from headway.sweep.coordinator_address import PURPOSE, CoordinatorAddress, expect_no_coordinator, read_address
from headway.sweep.join import join_sweep
from headway.sweep.lease import EXPIRED_STATUS, return_lease
from headway.sweep.reception import Reception, RemoteWorker
from headway.sweep.slots import Event

LEASE_S = 0.5


class Guest:
    """A machine that speaks as `headway sweep --join` does, and trains nothing."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        address = read_address(folder)
        assert address is not None
        self._end, self._channel = connect(address.address, address.port, address.secret.encode(), PURPOSE)
        self._end.settimeout(20)
        self._messages: list[dict[str, Any]] = []
        self.say({"join": "b", "version": __version__} | changes)

    def say(self, message: dict[str, Any]) -> None:
        self._end.sendall(self._channel.seal(json.dumps(message).encode()))

    def hear(self) -> dict[str, Any]:
        """The next message; {} at the end of the connection."""
        while not self._messages:
            if not (data := self._end.recv(1 << 16)):
                return {}
            self._messages += [json.loads(message) for message in self._channel.feed(data)]
        return self._messages.pop(0)

    def close(self) -> None:
        self._end.close()


@pytest.fixture
def events() -> SimpleQueue[Event]:
    return SimpleQueue()


@pytest.fixture
def reception(tmp_path: Path, events: SimpleQueue[Event]) -> Iterator[Reception]:
    (tmp_path / "trials").mkdir()
    with closing(Reception(tmp_path, "127.0.0.1", LEASE_S, events, itertools.count(3))) as reception:
        yield reception


def seat(folder: Path, events: SimpleQueue[Event]) -> tuple[Guest, RemoteWorker, str]:
    """A worker that is ready, what the coordinator has of it, and the name of its lease."""
    guest = Guest(folder)
    lease = guest.hear()["welcome"]
    guest.say({"ready": 1, "core_s": 2.0})
    event = events.get(timeout=60)
    assert isinstance(event.joined, RemoteWorker)
    return guest, event.joined, lease


def train(worker: RemoteWorker, guest: Guest, folder: Path, trial: int = 7) -> Path:
    """The run folder of a trial as the machine sees it."""
    worker.send(
        {"train": [{"trial": trial, "folder": str(folder / "trials" / str(trial))}], "feed": None, "fuse": None}
    )
    return folder / str(guest.hear()["train"][0]["folder"])


def test_commands_and_answers_pass_and_a_worker_writes_by_its_lease_alone(
    tmp_path: Path, reception: Reception, events: SimpleQueue[Event]
) -> None:
    guest, worker, lease = seat(tmp_path, events)
    with closing(guest):
        assert worker.host == "b"
        assert worker.number == 3
        path = train(worker, guest, tmp_path)
        assert path == tmp_path / "leases" / lease / "7/7"
        path.mkdir()
        assert (tmp_path / "trials/7").is_dir()
        for number in range(3):
            guest.say({"beat": number})
            assert guest.hear() == {"beat": number}
        guest.say({"outcome": {"trial": 7, "kind": "crashed"}})
        event = events.get(timeout=60)
        assert event.message == {"outcome": {"trial": 7, "kind": "crashed"}}
        # A trial that it does not hold any more it cannot write.
        assert not path.exists()
        guest.say({"left": -11})
        assert events.get(timeout=60) == Event(3, None)
        assert worker.close(20) == -11


def test_a_silent_worker_loses_its_lease_and_one_that_answers_does_not(
    tmp_path: Path, events: SimpleQueue[Event]
) -> None:
    (tmp_path / "trials").mkdir()
    # Longer than this test may be kept from running on a busy machine.
    reception = Reception(tmp_path, "127.0.0.1", 3.0, events, itertools.count(3))
    with closing(reception), closing(seat(tmp_path, events)[0]) as other:
        guest, worker, _ = seat(tmp_path, events)
        path = train(worker, guest, tmp_path)
        path.mkdir()
        (path / "metrics.jsonl").write_text("{}\n")
        before = path.stat().st_ino
        for number in itertools.count():
            if not events.empty():
                break
            other.say({"beat": number})
            assert other.hear() == {"beat": number}
            time.sleep(0.1)
        assert events.get() == Event(worker.number, None)
        assert guest.hear() == {}
        assert worker.close(20) == EXPIRED_STATUS
        assert not path.exists()
        assert (tmp_path / "trials/7/metrics.jsonl").read_text() == "{}\n"
        assert (tmp_path / "trials/7").stat().st_ino != before
        guest.close()


def test_a_worker_that_has_returned_its_lease_gets_no_trial(
    tmp_path: Path, reception: Reception, events: SimpleQueue[Event]
) -> None:
    """Its machine removes the links first, and says then that it has left."""
    guest, worker, lease = seat(tmp_path, events)
    with closing(guest):
        return_lease(tmp_path, lease)
        worker.send({"train": [{"trial": 7, "folder": str(tmp_path / "trials/7")}]})
        guest.say({"left": 0})
        assert events.get(timeout=60) == Event(3, None)
        assert worker.close(20) == 0
        assert guest.hear() == {}


@pytest.mark.parametrize("returned", [True, False])
def test_a_cut_connection_frees_the_trials_when_no_process_can_be_left(
    tmp_path: Path, reception: Reception, events: SimpleQueue[Event], returned: bool
) -> None:
    guest, worker, lease = seat(tmp_path, events)
    path = train(worker, guest, tmp_path)
    path.mkdir()
    guest.close()
    assert events.get(timeout=60) == Event(3, {"unreachable": True})
    assert path.exists()
    if returned:
        return_lease(tmp_path, lease)
    assert events.get(timeout=60) == Event(3, None)
    assert worker.close(20) == EXPIRED_STATUS


def test_another_version_is_refused_with_both_versions(
    tmp_path: Path, reception: Reception, events: SimpleQueue[Event]
) -> None:
    with closing(Guest(tmp_path, version="0.0.1")) as guest:
        refused = guest.hear()["refused"]
        assert "b has version 0.0.1 of Headway" in refused
        assert __version__ in refused
        assert guest.hear() == {}
    assert events.empty()
    assert not (tmp_path / "leases").exists()


def test_a_stranger_is_refused_and_the_secret_is_for_this_user_alone(tmp_path: Path, reception: Reception) -> None:
    assert stat.S_IMODE((tmp_path / "coordinator.json").stat().st_mode) == 0o600
    address = reception.address
    with pytest.raises(CommunicationError, match="does not know the secret"):
        connect(address.address, address.port, b"another secret", PURPOSE)
    with socket.create_connection((address.address, address.port), timeout=60) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while data := stranger.recv(1 << 12):
            assert b"welcome" not in data
    # Whoever writes the file could make workers train what he likes.
    (tmp_path / "coordinator.json").chmod(0o644)
    with pytest.raises(UsageError, match="not for this user alone"):
        read_address(tmp_path)


def test_one_coordinator_at_a_time_even_without_locks(tmp_path: Path, events: SimpleQueue[Event]) -> None:
    with closing(Reception(tmp_path, "127.0.0.1", LEASE_S, events, itertools.count())) as first:
        with pytest.raises(UsageError, match="another process runs this sweep on"):
            expect_no_coordinator(tmp_path)
        first.expect_own()
        # Another one that did not reach this one: a network is cut between them.
        other = CoordinatorAddress("elsewhere", "127.0.0.1", 1, "0" * 64)
        other.write(tmp_path)
        with pytest.raises(UsageError, match="another process runs this sweep now"):
            first.expect_own()
    # The file of the other one stays.
    assert read_address(tmp_path) == other
    # Nobody answers there.
    expect_no_coordinator(tmp_path)
    with closing(Reception(tmp_path, "127.0.0.1", LEASE_S, events, itertools.count())):
        pass
    assert read_address(tmp_path) is None


def test_a_machine_waits_for_a_coordinator_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(HeadwayError, match=r"no coordinator of .* answers.*--resume") as caught:
        join_sweep(tmp_path / "none", 1, 0.0)
    assert caught.value.exit_status == 1
    # A sweep that has ended needs nobody.
    (tmp_path / "result.json").write_text("{}")
    join_sweep(tmp_path, 1, 0.0)


def test_a_machine_of_another_version_ends_with_the_reason(
    tmp_path: Path, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.sweep.join.__version__", "0.0.1")
    monkeypatch.setenv("HEADWAY_SWEEP_HOST", "old")
    with pytest.raises(UsageError, match=r"old has version 0\.0\.1 of Headway.*same installation"):
        join_sweep(tmp_path, 2, 20)
    assert sorted(os.listdir(tmp_path)) == ["coordinator.json", "trials"]


def test_the_channel_of_another_service_is_refused(reception: Reception) -> None:
    """The same secret would open the store of a run otherwise."""
    address = reception.address
    with pytest.raises(CommunicationError):
        connect(address.address, address.port, address.secret.encode(), "store")
