"""Machines of `--hosts` that cannot work: each is named with its last words, and the last one ends the sweep."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests._support import collect_messages

from headway.launch.hosts import parse_hosts
from headway.sweep.remote_hosts import MOST_STARTS, RemoteHosts
from headway.sweep.slots import Event

SHELL = """#!/bin/sh
case $1 in
    a) echo "sh: python: not found" >&2; exit 127;;
    b) exec sh -c "$(echo "$2" | sed 's/-m headway.launch.agent/-c "raise SystemExit(3)"/')";;
    c) cd %s; exec sh -c "$2";;
esac
"""


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "shell"
    path.write_text(SHELL % tmp_path)
    path.chmod(0o755)
    monkeypatch.setenv("HEADWAY_RSH", str(path))
    return path


@pytest.mark.check
def test_hosts_that_cannot_work_are_named_with_their_last_words(tmp_path: Path, shell: Path) -> None:
    """Host c can run Headway, and there is no sweep in that folder that it may read."""
    events = SimpleQueue[Event]()
    (tmp_path / "coordinator.json").write_text("{}")
    with (
        collect_messages() as said,
        closing(RemoteHosts(tmp_path, parse_hosts(None, "a:1,b:2,c:3"), 5.0, events)) as hosts,
    ):
        message = events.get(timeout=60).message
        assert hosts.slots == 0
    assert message is not None
    lines = message["no_hosts"].splitlines()
    assert any("Host a cannot be used" in line and "python: not found" in line for line in lines)
    assert any("Host b cannot be used" in line and "status 3" in line for line in lines)
    assert "Host c: its program ended with status 2, after these messages:" in lines
    assert any("not for this user alone" in line for line in lines)
    assert sum("The sweep goes on without it." in line for line in said) == 2


def test_a_host_that_has_worked_is_started_again_and_not_for_ever(tmp_path: Path, shell: Path) -> None:
    events = SimpleQueue[Event]()
    with (
        collect_messages() as said,
        closing(RemoteHosts(tmp_path, parse_hosts(None, "a:1"), 5.0, events)) as hosts,
    ):
        # As if a worker was ready each time, before the program ended.
        while events.empty():
            hosts.note_join("a")
            time.sleep(0.001)
    assert 0 < sum("It is started again." in line for line in said) < MOST_STARTS
