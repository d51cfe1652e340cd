"""The store of a run: what torch.distributed asks of a store, and nobody else's words."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import PrefixStore

from headway.core import key_value_store as store_module
from headway.core.errors import CommunicationError
from headway.core.key_value_store import StoreClient, StoreServer, build_store, pack, unpack
from headway.core.rendezvous import Rendezvous

SECRET = b"of this run"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    made = StoreServer(SECRET, "127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def store(server: StoreServer) -> Any:
    return build_store(StoreClient(SECRET, "127.0.0.1", server.port))


def test_it_does_what_torchs_stores_do(store: Any) -> None:
    part = PrefixStore("part", store)
    part.set("key", "value")
    assert part.get("key") == b"value" == store.get("part/key") == store.open_prefix("part").get("key")
    assert part.check(["key"])
    assert not part.check(["key", "other"])
    assert [part.add("count", 2), part.add("count", 3)] == [2, 5]
    assert store.compare_set("part/key", "wrong", "new") == b"value"
    assert store.compare_set("part/key", "value", "new") == b"new"
    store.append("part/key", b"er\0")
    assert part.multi_get(["key", "count"]) == [b"newer\0", b"5"]
    assert part.num_keys() == 2
    assert part.delete_key("key")
    assert not part.delete_key("key")
    with pytest.raises(RuntimeError, match=r"wait timeout after 0\.05 s, keys: part/never"):
        part.wait(["never"], timedelta(seconds=0.05))


def test_who_waits_gets_what_another_sets_later(store: Any) -> None:
    other = store.clone()
    later = threading.Timer(0.05, lambda: other.set("later", "here"))
    later.start()
    assert store.get("later") == b"here"
    later.join()


def test_a_store_that_is_gone_is_an_error_of_every_call(server: StoreServer, store: Any) -> None:
    store.set("a", "b")
    server.close()
    with pytest.raises(RuntimeError, match="the store of the ranks is gone"):
        store.get("a")


SERVES = """
from headway.core.key_value_store import StoreServer

print(StoreServer(b"of this run", "127.0.0.1").port, flush=True)
input()
"""


def test_a_store_whose_process_is_stopped_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel still answers for the connection."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVES], **pipes) as process:
        assert process.stdout is not None
        store = build_store(StoreClient(SECRET, "127.0.0.1", int(process.stdout.readline())))
        store.set("key", "value")
        assert store.get("key") == b"value"
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        monkeypatch.setattr(store_module, "ANSWER_S", 0.1)
        try:
            with pytest.raises(RuntimeError, match=r"the store of the ranks is gone \(timed out\)"):
                store.multi_get(["key"], wait_s=0.1)
        finally:
            process.kill()
    # The answer to the call before must not be taken for that to this one.
    with pytest.raises(RuntimeError, match="the store of the ranks is gone"):
        store.check(["key"])


def test_a_stranger_neither_reads_nor_writes(server: StoreServer, store: Any) -> None:
    """With the words of torch's own store, and with those of ours without a proof."""
    store.set("key", "value")
    torchs = b"\0\xce\xf7\x85\x3c\x01" + (3).to_bytes(8, "little") + b"key" + (4).to_bytes(8, "little") + b"mine"
    for said in (torchs, pack(b"set", b"key", b"mine"), b"headway1" + bytes(64) + pack(b"delete", b"key")):
        with socket.create_connection(("127.0.0.1", server.port)) as end:
            end.settimeout(60)
            end.sendall(said)
            try:
                while end.recv(1000):
                    pass
            except ConnectionResetError:
                pass
    with pytest.raises(CommunicationError, match="HEADWAY_SECRET"):
        StoreClient(b"of another run", "127.0.0.1", server.port)
    assert store.get("key") == b"value"


@pytest.mark.parametrize("message", [b"\0\0\0\x09set", b"\0\0", pack(b"set", b"a"), pack(b"sing"), pack(b"get"), b""])
def test_a_message_that_is_none_ends_its_connection_alone(message: bytes, server: StoreServer, store: Any) -> None:
    bad = StoreClient(SECRET, "127.0.0.1", server.port)
    bad._end.sendall(bad._channel.seal(message))
    assert bad._end.recv(100) == b""
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_packed_parts_are_unpacked() -> None:
    parts = [b"", b"\0", b"x" * 300]
    assert unpack(pack(*parts)) == parts


def test_who_serves_the_store_leaves_after_the_others_have_read_it() -> None:
    server = StoreServer(SECRET, "127.0.0.1")
    mine, other = (StoreClient(SECRET, "127.0.0.1", server.port) for _ in range(2))
    meeting = Rendezvous(server, mine, 0)
    meeting.store.set("last", "word")
    leaving = threading.Thread(target=meeting.close)
    leaving.start()
    while mine._end.fileno() >= 0:
        time.sleep(0.001)
    assert build_store(other).get("last") == b"word"
    assert leaving.is_alive()
    other.close()
    leaving.join(60)
    assert not leaving.is_alive()
