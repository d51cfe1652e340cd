"""The rendezvous of another launcher's processes: they agree on a secret that nobody else can learn or forge."""

from __future__ import annotations

import itertools
import json
import logging
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import final

import psutil
import pytest
from tests._support import free_port
from torch.distributed import TCPStore

from headway.core import rendezvous
from headway.core.errors import CommunicationError, UsageError
from headway.core.launcher_environment import LaunchedProcess
from headway.core.rendezvous import Rendezvous, join_rendezvous, read_secret

SECRET = "a secret of thirty-two characters"


@pytest.fixture(autouse=True)
def _private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for name in ("HEADWAY_SECRET", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def agent() -> TCPStore:
    """torchrun's."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def place(rank: int, port: int, *, hosts: int = 1) -> LaunchedProcess:
    return LaunchedProcess(rank, 2, rank % (2 // hosts), 2 // hosts, "127.0.0.1", port, "torchrun")


def both(port: int, hosts: int = 1) -> tuple[Rendezvous, Rendezvous]:
    """Rank 0 and rank 1 at once."""
    found: dict[int, Rendezvous] = {}
    threads = [
        threading.Thread(
            target=lambda rank=rank: found.update({rank: join_rendezvous(place(rank, port, hosts=hosts), None)})
        )
        for rank in (1, 0)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def speak(lead: Rendezvous, other: Rendezvous) -> None:
    lead.store.set("key", "value")
    assert other.store.get("key") == b"value"
    assert lead.secret == other.secret
    assert len(lead.secret) >= rendezvous.SHORTEST_SECRET
    thread = lead._server._thread if lead._server else None
    lead.__del__()
    if thread is not None:
        thread.join()


def test_on_one_host_they_meet_by_a_file_that_nobody_else_reads(tmp_path: Path) -> None:
    lead, other = both(1)
    (note,) = (tmp_path / "headway").iterdir()
    assert stat.S_IMODE(note.stat().st_mode) == 0o600
    assert stat.S_IMODE(note.parent.stat().st_mode) == 0o700
    lead.confirm()
    assert not note.exists()
    speak(lead, other)


def test_the_note_of_a_job_that_has_ended_is_passed_over(tmp_path: Path) -> None:
    script = "from headway.core.rendezvous import _SecretFile\n"
    script += "from headway.core.launcher_environment import LaunchedProcess\n"
    script += "_SecretFile(LaunchedProcess(0, 2, 0, 2, '127.0.0.1', 7, 'torchrun'), 0).write(9, b'old')"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert len(list((tmp_path / "headway").iterdir())) == 1
    lead, other = both(7)
    assert other.store.client.port == lead.store.client.port != 9
    speak(lead, other)


def test_a_clock_that_is_set_meanwhile_does_not_make_a_note_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(1e9)
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: next(clock))
    monkeypatch.setattr(rendezvous, "CONNECT_S", 60.0)
    speak(*both(8))


def test_a_folder_that_others_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "headway").mkdir(mode=0o755)
    with pytest.raises(CommunicationError, match="other users can access this folder"):
        join_rendezvous(place(0, 1), None)


def test_a_link_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "headway").symlink_to("elsewhere")
    with pytest.raises(CommunicationError, match="other users can access this folder"):
        join_rendezvous(place(0, 1), None)


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    assert read_secret({}) is None
    assert read_secret({"HEADWAY_SECRET": SECRET}) == SECRET.encode()
    with pytest.raises(UsageError, match="6 characters, which can be guessed"):
        read_secret({"HEADWAY_SECRET": "sesame"})


def test_over_torchruns_store_only_what_the_secret_signs_is_believed(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("HEADWAY_SECRET", SECRET)
    key = f"headway/{rendezvous._compute_mac(SECRET.encode(), 'key', '0')[:32]}"
    forged = [b"\xff", b"[]", json.dumps([json.dumps(["192.0.2.1", 1]), "0" * 64]).encode(), b'["x", 5]']
    found: list[tuple[str, int]] = []
    asks = threading.Thread(
        target=lambda: found.append(rendezvous._read_announced_address(agent, key, SECRET.encode(), 0))
    )
    asks.start()
    for value in forged:
        agent.set(key, value)
    assert not found
    lead, other = both(agent.port, hosts=2)
    asks.join()
    assert found == [(lead.store.client.address, lead.store.client.port)]
    speak(lead, other)


@final
class Agent:
    """A store of torchrun's to which a stranger is always quicker than rank 0, until he has nothing left to say."""

    def __init__(self, values: list[bytes]) -> None:
        self._values = iter(values)

    def check(self, keys: list[str]) -> bool:
        return True

    def get(self, key: str) -> bytes:
        return next(self._values)


def test_nonsense_in_torchruns_store_is_passed_over() -> None:
    place = json.dumps(["192.0.2.1", 5])
    signed = json.dumps([place, rendezvous._compute_mac(SECRET.encode(), "place", "0", place)]).encode()
    nonsense = [b"\xff", b"", b"[" * 1_000_000, b"{" * 3, b'[1, "\xc3\xa9"]', b'[{}, "x"]', b"[1, 2, 3]", b"9" * 10_000]
    found = rendezvous._read_announced_address(Agent([*nonsense, signed]), "key", SECRET.encode(), 0)
    assert found == ("192.0.2.1", 5)


def test_several_hosts_without_a_secret_say_what_that_means(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with caplog.at_level(logging.WARNING, "headway.core"):
        lead, other = both(agent.port, hosts=2)
    assert [record.getMessage() for record in caplog.records] == [
        "HEADWAY_SECRET is not set: anybody who can reach these hosts over the network can join this run. "
        "Set it to the same secret on all hosts."
    ]
    speak(lead, other)


def test_where_no_launcher_serves_a_store_rank_0_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_SECRET", SECRET)
    port = free_port()
    lead, other = both(port, hosts=2)
    assert lead.store.client.port == port
    speak(lead, other)
