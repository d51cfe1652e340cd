"""The hosts that the other tests here, and benches, run on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from bench._hosts import LINKS, NAMESPACES, Hosts, HostsError, why_not

pytestmark = pytest.mark.root

SERVER = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
while True:
    end, _ = server.accept()
    while end.recv(1 << 16):
        pass
    print("all of it", flush=True)
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[4])) as end:
    end.sendall(bytes(int(sys.argv[3])))
"""
HOLDER = """
import sys, time
from bench._hosts import Hosts
with Hosts(2) as hosts:
    print(hosts.namespace(0), hosts.run(1, [sys.executable, "-c", "import time; time.sleep(60)"]).pid, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as found:
        yield found


@pytest.fixture
def server(hosts: Hosts) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER, hosts.addresses[0]]
    with hosts.run(0, command, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def send(hosts: Hosts, port: str, numbers: int, timeout_s: float) -> bool:
    """Whether host 1 could send so many bytes to host 0."""
    command = [sys.executable, "-c", CLIENT, hosts.addresses[0], port, str(numbers), str(timeout_s)]
    with hosts.run(1, command, stderr=subprocess.DEVNULL) as process:
        return process.wait() == 0


def test_what_a_host_sends_is_counted_without_headers(hosts: Hosts, server: subprocess.Popen[str]) -> None:
    port, before = line(server), [hosts.payload_out(host) for host in (0, 1)]
    assert send(hosts, port, 10_000_000, 30)
    assert line(server) == "all of it"
    answered, sent = (hosts.payload_out(host) - was for host, was in zip((0, 1), before, strict=True))
    assert sent == pytest.approx(10_000_000, abs=1000)  # and a question for an address
    assert answered == pytest.approx(0, abs=1000)
    assert hosts.bytes_out(1) > 10_000_000 + before[1]


def test_every_port_is_shaped_and_tcp_is_what_was_asked_for(hosts: Hosts, server: subprocess.Popen[str]) -> None:
    for host in (0, 1):
        inside = subprocess.run(hosts.command(host, ["tc", "qdisc", "show", "dev", "eth0"]), capture_output=True)
        assert b"tbf" in inside.stdout
        assert b"200Mbit" in inside.stdout
    outside = subprocess.run(["tc", "qdisc"], capture_output=True, text=True, check=True).stdout
    assert sum(hosts.namespace(0)[:-2] in row and "200Mbit" in row for row in outside.splitlines()) == 2
    code = "import socket; print(socket.create_connection(('10.77.0.1', {port})).getsockopt(6, 13, 16).strip(b'\\0'))"
    asked = subprocess.run(
        hosts.command(1, [sys.executable, "-c", code.format(port=line(server))]), capture_output=True
    )
    assert asked.stdout.strip() == b"b'cubic'"


def test_a_cut_host_is_alone_until_its_link_is_restored(hosts: Hosts, server: subprocess.Popen[str]) -> None:
    port = line(server)
    hosts.cut(1)
    assert not send(hosts, port, 1, 0.3)
    hosts.restore(1)
    assert send(hosts, port, 1, 30)


def test_at_the_end_nothing_is_left() -> None:
    with Hosts(2) as mine:
        names = [mine.namespace(host) for host in (0, 1)]
        stopped = mine.run(0, [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
        while psutil.Process(stopped.pid).status() != psutil.STATUS_STOPPED:
            continue
        assert all((NAMESPACES / name).exists() for name in names)
    assert stopped.returncode == -9
    assert not left(names[0])


def left(namespace: str) -> list[str]:
    """Namespaces and links of those hosts."""
    prefix = namespace.rpartition("n")[0]
    return [name for folder in (NAMESPACES, LINKS) for name in os.listdir(folder) if name.startswith(prefix)]


def test_what_a_killed_process_left_is_removed_by_the_next() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        name, pid = line(holder).split()
        holder.kill()
    assert len(left(name)) == 5  # two namespaces, two ports, a bridge
    sleeper = psutil.Process(int(pid))
    with Hosts(1):
        assert not left(name)
    assert not sleeper.is_running() or sleeper.status() == psutil.STATUS_ZOMBIE


def test_a_running_process_keeps_its_hosts() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True) as holder:
        name, _ = line(holder).split()
        with Hosts(1):
            assert len(left(name)) == 5
        holder.terminate()
    with Hosts(1):
        assert not left(name)


def test_what_the_kernel_lacks_is_said_and_undone() -> None:
    lacking = Hosts(1, congestion="no-such-algorithm")
    with pytest.raises(HostsError, match="no-such-algorithm"):
        lacking.__enter__()
    assert not left(lacking.namespace(0))


def test_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_not() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no ip" in str(why_not())
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in str(why_not())
