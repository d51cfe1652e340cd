"""Remote records when the network, the source or the local disk fail."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.data.tiers._far import GB, N, Open, read, shards_asked, spans_of
from tests.data.tiers._server import Asked, Fault, Server

from headway.core.errors import DataError
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.tiers import disk, layout, prefetch, sparse
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.store import RecordStore


def some_faults() -> Callable[[Asked], Fault]:
    rng = np.random.default_rng(1)
    lock = threading.Lock()
    kinds: list[Fault] = [None, None, "drop", "503", 3000, 1, 20_000]

    def fault(asked: Asked) -> Fault:
        with lock:
            return kinds[int(rng.integers(len(kinds)))] if asked.name.endswith(".rec") else None

    return fault


@pytest.mark.parametrize("folder", ["cache", None])
def test_an_unsteady_network_changes_nothing(
    tier: Open, server: Server, wanted: list[bytes], tmp_path: Path, folder: str | None
) -> None:
    opened = tier(tmp_path / folder if folder else None)
    opened._prefetcher._remote._attempts = 50
    server.fault = some_faults()
    order = Order(N, 3)
    spans = spans_of(2 * N, 9)
    opened.expect(iter(spans), order)
    for span in spans:
        ids = order(np.arange(*span))[1]
        assert read(opened, ids) == [wanted[sample] for sample in ids]


def test_a_network_that_fails_is_a_sentence_and_may_come_back(tier: Open, server: Server, wanted: list[bytes]) -> None:
    opened = tier()
    server.fault = lambda asked: "503"
    with pytest.raises(DataError, match="the server answered 503"):
        read(opened)
    server.fault = lambda asked: None
    assert read(opened) == wanted


def test_a_failure_that_was_met_ahead_of_need_is_raised_when_it_is_needed(
    tier: Open, server: Server, wanted: list[bytes]
) -> None:
    opened = tier()
    server.fault = lambda asked: "404" if asked.name == "shard-00002.rec" else None
    opened.expect(iter(spans_of(N, 5)))
    good = int(np.count_nonzero(opened._dataset.shard < 2)) // 5 * 5
    for low, high in spans_of(good, 5):
        assert read(opened, range(low, high)) == wanted[low:high]
    with pytest.raises(DataError, match=r"shard-00002\.rec: there is no such file"):
        read(opened, range(N - 5, N))


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 16]))


def middle_of(data: Dataset, sample: int) -> tuple[str, int]:
    shard = data.description.shards[int(data.shard[sample])]
    return shard.name, int(data.offset[sample]) + int(data.length[sample]) // 2


def test_a_record_that_is_damaged_in_the_cache_is_fetched_again(
    tier: Open, server: Server, wanted: list[bytes], tmp_path: Path
) -> None:
    first = tier()
    assert read(first) == wanted
    first.close()
    damaged = (0, 17, 59)
    for sample in damaged:
        name, at = middle_of(first._dataset, sample)
        (path,) = (tmp_path / "cache").glob(f"packs/*/{name}")
        flip(path, at)
    server.asked.clear()
    again = tier()
    assert read(again) == wanted
    assert sum(request.end - request.start for request in shards_asked(server)) < 4 * len(wanted[0])


@pytest.mark.parametrize("folder", ["cache", None])
def test_a_record_that_is_damaged_on_the_way_is_fetched_again(
    tier: Open, server: Server, wanted: list[bytes], tmp_path: Path, packed: Path, folder: str | None
) -> None:
    opened = tier(tmp_path / folder if folder else None)
    name, at = middle_of(opened._dataset, 20)
    tag = server.tag(packed / name)
    server.tag = lambda path: tag if path.name == name else "same"
    flip(packed / name, at)
    mended = threading.Event()

    def fault(asked: Asked) -> Fault:
        asks = asked.name == name and asked.end - asked.start == 1  # whether the file has changed
        if asks and not mended.is_set():
            mended.set()
            flip(packed / name, at)
        return None

    read(opened, range(1))  # marks the other shards
    opened._prefetcher._remote.read_version(name)
    if mended.is_set():  # not by that
        flip(packed / name, at)
    server.fault = fault
    try:
        assert read(opened) == wanted
        assert mended.is_set()
        assert not opened._dataset.select_unchecked(np.arange(N)).any()
    finally:
        if not mended.is_set():
            flip(packed / name, at)


@pytest.mark.parametrize("folder", ["cache", None])
def test_a_record_that_is_damaged_at_its_source_is_served_as_it_is_and_counts_as_unchecked(
    tier: Open, wanted: list[bytes], tmp_path: Path, packed: Path, folder: str | None
) -> None:
    opened = tier(tmp_path / folder if folder else None)
    name, at = middle_of(opened._dataset, 20)
    flip(packed / name, at)
    try:
        for _ in range(2):
            found = read(opened)
            assert [place for place in range(N) if found[place] != wanted[place]] == [20]
            assert len(found[20]) == len(wanted[20])
            assert np.flatnonzero(opened._dataset.select_unchecked(np.arange(N))).tolist() == [20]
    finally:
        flip(packed / name, at)


def test_a_shard_that_changes_is_a_sentence(tier: Open, server: Server, packed: Path) -> None:
    opened = tier()
    read(opened, range(2))
    tags = iter(range(1000))
    server.tag = lambda path: str(next(tags))
    with pytest.raises(DataError, match="the file changed while it was in use"):
        read(opened)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == disk.LOG.name]


def test_a_folder_that_cannot_be_used_is_said_once_and_records_are_streamed(
    tier: Open, wanted: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        opened = tier(tmp_path / "file" / "cache")
        opened.expect(iter(spans_of(2 * N, 6)), Order(N, 1))
        assert read(opened) == wanted
        assert read(opened) == wanted
    assert len(said(caplog)) == 1
    assert "cannot be used (Not a directory)" in said(caplog)[0]


@pytest.mark.parametrize("lack", ["holes", "place"])
def test_a_file_system_that_will_not_do_is_said_once(
    tier: Open,
    wanted: list[bytes],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    lack: str,
) -> None:
    def refuse(number: int, begin: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    if lack == "holes":
        monkeypatch.setattr(sparse, "_punch", refuse)
    else:
        monkeypatch.setattr(disk, "is_on_network", lambda path: True)
    with caplog.at_level(logging.WARNING):
        opened = tier()
        assert read(opened) == wanted
    (sentence,) = said(caplog)
    assert ("Operation not supported" if lack == "holes" else "it lies on a network file system") in sentence


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        point = tmp_path / f"disk{len(mounted)}"
        point.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", point], check=True)
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        subprocess.run(["umount", "--lazy", point], check=True)


@pytest.mark.root
def test_a_full_disk_is_said_once_and_records_are_streamed(
    tier: Open, server: Server, wanted: list[bytes], small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = small_disk("size=200k")
    with caplog.at_level(logging.WARNING):
        opened = tier(folder / "cache")
        order = Order(N, 1)
        spans = spans_of(3 * N, 6)
        opened.expect(iter(spans), order)
        for span in spans:
            ids = order(np.arange(*span))[1]
            assert read(opened, ids) == [wanted[sample] for sample in ids]
    assert len(said(caplog)) == 1
    assert "No space left on device" in said(caplog)[0]
    assert str(folder) in said(caplog)[0]
    server.asked.clear()
    here = np.flatnonzero(opened._prefetcher._store.find_present(np.arange(N)))  # type: ignore[union-attr]
    assert len(here) > 5
    assert read(opened, here) == [wanted[sample] for sample in here]
    assert not shards_asked(server)  # what it kept, it still has


def test_what_has_no_room_on_the_disk_does_not_fill_the_memory(
    tier: Open, wanted: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "MAX_PREFETCH_BYTES", 20_000)
    monkeypatch.setattr(layout, "MAX_GAP_BYTES", 100)
    monkeypatch.setattr(layout, "MAX_RUN_BYTES", 7_000)
    first = tier()
    opened = DiskTier(first._dataset, first._remote, first._folder, GB, why="", threads=2)
    monkeypatch.setattr(RecordStore, "keep", lambda store, ids, extents: False)  # as if others had just taken the room
    order = Order(N, 1, 40)  # it would read a whole window ahead
    opened.expect(iter(spans_of(N, 2)), order)
    for span in spans_of(N, 2):
        ids = order(np.arange(*span))[1]
        assert read(opened, ids) == [wanted[sample] for sample in ids]
        time.sleep(0.01)
        assert opened._prefetcher._buffered_bytes < 20_000 + 4 * 14_000
    opened.close()


@pytest.mark.root
def test_a_disk_too_small_for_the_state_is_not_used(
    tier: Open, wanted: list[bytes], small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened = tier(small_disk("size=4k") / "cache")
        assert read(opened) == wanted
    assert "No space left on device" in said(caplog)[0]


@pytest.mark.root
def test_a_read_only_disk_is_said_once_and_records_are_streamed(
    tier: Open, wanted: list[bytes], small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        opened = tier(small_disk("size=1m,ro") / "cache")
        assert read(opened) == wanted
    assert len(said(caplog)) == 1
    assert "Read-only file system" in said(caplog)[0]
