"""One cache for several processes, which fork, stop and are killed; and the end of a tier."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.data.tiers._far import GB, N, Open, kept_bytes, on_disk, read, shards_asked, spans_of
from tests.data.tiers._server import Server, wait_until

from headway.core.errors import UsageError
from headway.data.order import Order
from headway.data.tiers import prefetch
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.locks import ByteLocks
from headway.data.tiers.remote_dataset import RemoteShards, open_remote
from headway.data.tiers.store import FETCH_LOCK

CHILD = """
import sys, pathlib, numpy as np
from headway.data.batch_plan import BatchPlan
from headway.data.order import Order
from headway.data.tiers import prefetch
from headway.data.tiers.next_use import HostSlots
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.remote_dataset import open_remote
uri, cache, seed, epochs = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = open_remote(uri, cache / "columns")
tier = DiskTier(data, data.source.remote, cache, int(sys.argv[5]), why="", threads=4)
n = len(data)
order = Order(n, seed)
spans = [(low, low + 5) for low in range(0, epochs * n, 5)]
slots = None
if int(sys.argv[5]) < 10**6:  # one of two hosts, so that room is made all the time
    prefetch.MAX_PREFETCH_BYTES = 20_000
    slots = HostSlots(BatchPlan(10), 0, 1, 2)
    spans = spans[::2]
prefetch._OTHER_PROCESS_TIMEOUT_S = 300.0  # however late a busy machine lets the other fetch
tier.expect(iter(spans), order, slots)
print("ready", flush=True)
sys.stdin.readline()
from crc32c import crc32c
for span in spans:
    ids = order(np.arange(*span))[1]
    records = tier.read(ids)
    for sample, record in zip(ids, records):
        assert crc32c(record) == data.crc32c[sample], sample
    del record, records
print("done", flush=True)
sys.stdin.readline()
tier.close()
"""


def child(uri: str, cache: Path, seed: int = 1, epochs: int = 3, budget: int = GB) -> subprocess.Popen[bytes]:
    arguments = [uri, os.fspath(cache), str(seed), str(epochs), str(budget)]
    return subprocess.Popen([sys.executable, "-c", CHILD, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def tell(process: subprocess.Popen[bytes], expected: bytes) -> None:
    """Waits for its next word, and lets it go on."""
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline().strip() == expected
    process.stdin.write(b"\n")
    process.stdin.flush()


def test_two_processes_share_a_cache_and_fetch_each_record_once(server: Server, tmp_path: Path) -> None:
    pair = [child(server.uri, tmp_path, seed) for seed in (1, 2)]
    for word in (b"ready", b"done"):
        for process in pair:
            tell(process, word)
    for process in pair:
        process.communicate(timeout=60)
        assert process.returncode == 0
    total = sum(request.end - request.start for request in shards_asked(server))
    assert total < 1.5 * sum(path.stat().st_size for path in server.folder.glob("*.rec"))  # alone each would make 2


@pytest.mark.check
def test_two_processes_share_a_small_cache(server: Server, tmp_path: Path) -> None:
    pair = [child(server.uri, tmp_path, seed, epochs=12, budget=200_000) for seed in (1, 2)]
    for process in pair:
        tell(process, b"ready")
    while any(process.poll() is None for process in pair):
        assert on_disk(tmp_path) <= 200_000
        if all(process.stdout.peek(1) for process in pair if process.stdout):  # type: ignore[attr-defined]
            break
    for process in pair:
        tell(process, b"done")
        process.communicate(timeout=60)
        assert process.returncode == 0


def killed_and_opened_again(server: Server, cache: Path, tier: Open, wanted: list[bytes], rounds: int) -> None:
    rng = np.random.default_rng(rounds)
    for turn in range(rounds):
        budget = GB if turn % 2 else 200_000
        process = child(server.uri, cache, seed=turn, epochs=20, budget=budget)
        tell(process, b"ready")
        time.sleep(float(rng.uniform(0, 0.25)))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        opened = tier(cache, budget)
        assert on_disk(cache) <= kept_bytes(opened) + (1 << 20)
        assert read(opened) == wanted
        assert on_disk(cache) <= max(budget, 420_000)
        opened.close()


def test_a_killed_process_leaves_nothing_wrong(server: Server, tmp_path: Path, tier: Open, wanted: list[bytes]) -> None:
    killed_and_opened_again(server, tmp_path / "kept", tier, wanted, 2)


@pytest.mark.check
def test_processes_killed_at_many_moments_leave_nothing_wrong(
    server: Server, tmp_path: Path, tier: Open, wanted: list[bytes]
) -> None:
    killed_and_opened_again(server, tmp_path / "kept", tier, wanted, 25)


def test_a_process_that_stopped_while_it_fetches_does_not_stop_another(
    tier: Open, wanted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_OTHER_PROCESS_TIMEOUT_S", 0.1)
    opened = tier()
    store = opened._prefetcher._store
    assert store is not None
    other = ByteLocks(store.folder / "locks")
    try:
        for sample in range(10):
            assert other.try_lock(FETCH_LOCK + sample)
        opened.expect(iter(spans_of(N, 6)))
        for low, high in spans_of(N, 6):
            assert read(opened, range(low, high)) == wanted[low:high]
    finally:
        other.close()


def test_what_another_process_fetches_is_waited_for(
    tier: Open, server: Server, wanted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "_OTHER_PROCESS_TIMEOUT_S", 300.0)
    opened = tier()
    store = opened._prefetcher._store
    assert store is not None
    other = ByteLocks(store.folder / "locks")
    assert other.try_lock(FETCH_LOCK + 5)

    def finish() -> None:
        time.sleep(0.1)
        store.keep(np.array([5]), [np.frombuffer(wanted[5], np.uint8)])
        other.close()

    thread = threading.Thread(target=finish)
    thread.start()
    assert read(opened, np.array([5])) == [wanted[5]]
    thread.join()
    assert not shards_asked(server)


def test_a_process_that_has_fetched_lets_others_fetch(tier: Open, wanted: list[bytes]) -> None:
    opened = tier()
    assert read(opened) == wanted
    store = opened._prefetcher._store
    assert store is not None
    other = ByteLocks(store.folder / "locks")
    try:
        wait_until(lambda: all(other.try_lock(FETCH_LOCK + sample) for sample in range(N)))
    finally:
        other.close()


def test_a_forked_child_reads_with_threads_of_its_own(tier: Open, wanted: list[bytes], tmp_path: Path) -> None:
    for folder in (tmp_path / "cache", None):
        opened = tier(folder)
        order = Order(N, 1)
        opened.expect(iter(spans_of(10 * N, 5)), order)
        held = opened.read(order(np.arange(5))[1])
        number = os.fork()
        if not number:
            good = False
            try:
                good = read(opened) == wanted
                opened.close()
            finally:
                os._exit(0 if good else 1)
        assert os.waitpid(number, 0)[1] == 0
        assert [bytes(record) for record in held] == [wanted[sample] for sample in order(np.arange(5))[1]]
        ids = order(np.arange(5, 10))[1]
        assert read(opened, ids) == [wanted[sample] for sample in ids]
        del held


def fetchers() -> int:
    return sum(thread.name == "headway-fetch" for thread in threading.enumerate())


def test_close_ends_the_threads_whatever_they_wait_for(tier: Open, server: Server) -> None:
    server.fault = lambda asked: "stall" if asked.name.endswith(".rec") and asked.end - asked.start > 1 else None
    opened = tier()
    opened._prefetcher._remote._transport._timeout_s = 60  # type: ignore[attr-defined]
    opened.expect(iter(spans_of(N, 5)))
    failures: list[BaseException] = []

    def reader() -> None:
        try:
            read(opened)
        except UsageError as error:
            failures.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    wait_until(lambda: bool(shards_asked(server)))
    opened.close()  # the server would be silent for 120 s, and 60 s would be waited for it
    assert not server.ended.is_set()
    assert fetchers() == 0
    thread.join(60)
    assert "closed" in str(failures[0])
    with pytest.raises(UsageError, match="closed"):
        read(opened)
    opened.close()


def test_a_tier_that_is_let_go_ends_its_threads(server: Server, tmp_path: Path) -> None:
    data = open_remote(server.uri, tmp_path)
    assert isinstance(data.source, RemoteShards)
    opened = DiskTier(data, data.source.remote, tmp_path, GB, why="")
    opened.read(np.arange(3))
    assert fetchers() > 0
    del opened
    gc.collect()
    wait_until(lambda: fetchers() == 0)
    data.close()


def test_records_outlive_the_tier(
    tier: Open, wanted: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.store._LOCK_TIMEOUT_S", 0.1)
    for folder in (tmp_path / "cache", None):
        opened = tier(folder, budget=450_000)
        held = opened.read(np.arange(20))
        opened.close()
        other = tier(folder, budget=450_000)
        assert read(other) == wanted
        if folder:
            store = other._prefetcher._store
            assert store is not None
            assert not store.make_room(np.tile(np.arange(N), 5), lambda ids: ids, -1)
            assert store.find_present(np.arange(20)).all()
        assert [bytes(record) for record in held] == wanted[:20]
        other.close()
