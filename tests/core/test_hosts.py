from __future__ import annotations

import platform
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from headway.core.errors import CommunicationError
from headway.core.hosts import (
    ANYWHERE,
    choose_listening_address,
    find_interface_address,
    find_interface_to,
    find_own_address,
    identify_host,
)

IDENTITY = "from headway.core.hosts import identify_host; print(identify_host())"


def test_processes_of_one_host_have_one_identity() -> None:
    other = subprocess.run([sys.executable, "-c", IDENTITY], capture_output=True, text=True, check=True).stdout.strip()
    assert other == identify_host()
    assert other.startswith(f"{platform.node()}/")


@pytest.mark.root
def test_a_network_namespace_is_a_host_of_its_own_although_its_name_is_the_same() -> None:
    name = f"hw-{uuid.uuid4().hex[:8]}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        inside = ["ip", "netns", "exec", name, sys.executable, "-c", IDENTITY]
        there = subprocess.run(inside, capture_output=True, text=True, check=True).stdout.strip()
        assert there != identify_host()
        assert there.rpartition("/")[0] == identify_host().rpartition("/")[0]
        far = "from headway.core.hosts import find_interface_to; print(find_interface_to('192.0.2.1'))"
        alone = subprocess.run([*inside[:-1], far], capture_output=True, text=True, check=False)
        assert alone.returncode == 1
        assert "there is no route to this address" in alone.stderr
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.8.7", "localhost"])
def test_the_loopback_is_reached_by_itself(address: str) -> None:
    assert find_interface_to(address) == loopback()


def test_who_is_reached_by_an_address_of_his_own_listens_there_alone() -> None:
    own = [one.address for entries in psutil.net_if_addrs().values() for one in entries if one.family == socket.AF_INET]
    assert own
    assert [choose_listening_address(address) for address in (*own, "localhost")] == [*own, "localhost"]
    # Those of a router, and a name that is not known here.
    assert [choose_listening_address(address) for address in (*ANYWHERE, "no.such.host.invalid")] == ["", "::", ""]


def test_every_address_of_this_host_is_on_its_own_interface() -> None:
    """Not on the loopback, by which the kernel takes them: the other hosts would not reach that."""
    owned = [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    ]
    assert owned
    firsts = {}
    for name, address in owned:
        firsts.setdefault(address, name)
    for address, name in firsts.items():
        assert find_interface_to(address) == name


def test_a_far_address_is_reached_by_the_interface_of_its_route() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        try:
            end.connect((ANYWHERE[0], 9))
        except OSError:
            pytest.skip("no route out of this host")
    default = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    names = {row[0] for row in default if int(row[1], 16) & int(row[7], 16) == 0}
    assert find_interface_to(ANYWHERE[0]) in names or find_interface_to(ANYWHERE[0]) in {row[0] for row in default}


def test_an_own_name_that_means_the_loopback_here_gives_the_interface_of_the_default_route() -> None:
    """Debian writes `127.0.1.1 NAME`; the other hosts know NAME by its real address."""
    here = socket.gethostbyname(platform.node()) if _resolves(platform.node()) else ""
    if not here.startswith("127."):
        pytest.skip(f"this host's name means {here or 'nothing'}")
    assert find_interface_to(platform.node()) == find_interface_to(ANYWHERE[0])


def test_a_host_reaches_itself_at_the_address_it_is_asked_for() -> None:
    assert find_own_address("127.0.0.1") == "127.0.0.1"
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert find_own_address(entry.address) == entry.address, name


def test_an_interface_gives_its_ipv4_address_where_it_has_one() -> None:
    assert find_interface_address(loopback()) == "127.0.0.1"
    for name, entries in psutil.net_if_addrs().items():
        found = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
        if found:
            assert find_interface_address(name) in found
    with pytest.raises(CommunicationError, match="none-such: this network interface has no address"):
        find_interface_address("none-such")


@pytest.mark.parametrize("address", ["no-such-host.invalid", "", "a..b", "999.1.1.1"])
def test_a_name_that_means_nothing_is_refused(address: str) -> None:
    with pytest.raises(CommunicationError, match=r"has no address|no route") as refused:
        find_interface_to(address or "x" * 300)
    assert "`interface`" in str(refused.value)


def loopback() -> str:
    return next(
        name for name, all_ in psutil.net_if_addrs().items() if any(entry.address == "127.0.0.1" for entry in all_)
    )


def _resolves(name: str) -> bool:
    try:
        socket.gethostbyname(name)
    except OSError:
        return False
    return True
