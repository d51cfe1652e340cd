"""The hosts of a run, and the address at which its launcher listens."""

from __future__ import annotations

import os
from contextlib import closing

import pytest
from tests.security._stranger import listening

from headway.core.errors import UsageError
from headway.launch.hosts import Host, find_launcher_address, parse_hosts
from headway.launch.launcher import _LaunchSession


@pytest.mark.parametrize(
    ("procs", "hosts", "match"),
    [
        (None, "", "which is not of the form HOST:NUMBER"),
        (None, "a", "which is not of the form HOST:NUMBER"),
        (None, "a:4,", "'', which is not of the form"),
        (None, ":4", "':4', which is not of the form"),
        (None, "a:0", "'0' is not a number of processes"),
        (None, "a:b", "'b' is not a number of processes"),
        (None, "a:-1", "'-1' is not a number of processes"),
        (None, "a:99999", "'99999' is not a number of processes"),
        (None, "::1:2", "not of the form HOST:NUMBER"),
        (None, "-oProxyCommand=x:2", "not of the form HOST:NUMBER"),
        (None, "a b:2", "not of the form HOST:NUMBER"),
        (None, "a:1,b:1,a:2", "names a twice"),
        (None, "localhost:1,127.0.0.1:2", "names localhost twice"),
        (5, "a:2,b:2", "asks for 4 processes, and --procs for 5"),
        (0, None, "--procs is 0"),
    ],
)
def test_bad_hosts_are_refused(procs: int | None, hosts: str | None, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        parse_hosts(procs, hosts)


def test_hosts_and_processes() -> None:
    assert parse_hosts(4, "me@a:3, [fe80::1]:1") == (Host("me@a", 3, False), Host("fe80::1", 1, False))
    assert parse_hosts(None, "localhost:2") == parse_hosts(2, None) == (Host("localhost", 2, True),)
    assert parse_hosts(2, "[::1]:2")[0].is_local


def test_the_launchers_address_is_that_of_the_route() -> None:
    assert find_launcher_address(parse_hosts(4, None), {}) == "127.0.0.1"
    assert find_launcher_address(parse_hosts(None, "127.0.0.2:1"), {}) == "127.0.0.1"
    assert find_launcher_address(parse_hosts(2, None), {"HEADWAY_ADDRESS": "here.example"}) == "127.0.0.1"
    assert find_launcher_address(parse_hosts(None, "b:1"), {"HEADWAY_ADDRESS": "here.example"}) == "here.example"
    with pytest.raises(UsageError, match=r"--hosts: host no\.such\.host\.invalid is not known here .*HEADWAY_ADDRESS"):
        find_launcher_address(parse_hosts(None, "localhost:1,nobody@no.such.host.invalid:1"), {})


@pytest.mark.parametrize("left", ["", "192.0.2.1"])
def test_a_run_on_one_host_listens_on_the_loopback_alone(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address that another run has left in the environment does not count."""
    monkeypatch.setenv("HEADWAY_ADDRESS", left)
    hosts = parse_hosts(2, None)
    with closing(
        _LaunchSession([], list, {}, hosts, find_launcher_address(hosts), timeout_s=60, respawn=False)
    ) as made:
        ports = {made._store.port, made._coordinator.port}
        assert {place for place in listening(os.getpid()) if place[1] in ports} == {("127.0.0.1", one) for one in ports}
