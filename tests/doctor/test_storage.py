"""Where data sets of every kind lie, and what their storage gives: real packs, loose files, a server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.data._packs import folder, picture
from tests.data.tiers._server import Server, make_pack, serving

from headway.core.errors import DataError
from headway.core.mounts import find_mount
from headway.data import opening
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.pack import pack
from headway.data.tiers.remote_dataset import open_remote
from headway.doctor.page_cache import COLD, FileSpan, evict, load, measure_resident_share
from headway.doctor.storage import StorageRate, build_span_finder, describe_location, list_files, measure_storage

N = 60
WARM = 0.9
"""What lies in memory is never less, whatever the kernel takes back meanwhile for other processes."""
SHORT_S = 0.05
"""Some windows are measured however short the time is."""
Make = Callable[[Path], Dataset]


def loose(root: Path) -> Dataset:
    folder(root / "images", {"cat": N // 2, "dog": N // 2})
    return opening.open(root / "images")


def packed(root: Path, format: str | None = None, *, mapped: bool | None = None) -> Dataset:
    folder(root / "images", {"cat": N // 2, "dog": N // 2})
    pack(root / "images", root / "pack", format=format, shard_bytes=20_000)
    return opening.open(root / "pack", mapped=mapped)


def arrays(root: Path) -> Dataset:
    (root / "images").mkdir()
    random = np.random.default_rng(0)
    np.save(root / "images/images.npy", random.integers(0, 256, (N, 8, 9, 3), np.uint8))
    np.save(root / "images/labels.npy", np.arange(N) % 2)
    return opening.open(root / "images")


LOCAL: dict[str, Make] = {
    "loose": loose,
    "recordio": packed,
    "pread": lambda root: packed(root, mapped=False),
    "tar": lambda root: packed(root, "tar"),
    "lmdb": lambda root: packed(root, "lmdb"),
    "raw": lambda root: packed(root, "raw"),
    "npy": arrays,
}


@pytest.fixture(params=LOCAL)
def local(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Dataset]:
    """60 records, in every way in which they can lie on this machine."""
    with closing(LOCAL[request.param](tmp_path)) as opened:
        yield opened


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Dataset]:
    """60 records in mapped shards."""
    with closing(packed(tmp_path)) as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "columns"))
    with serving(make_pack(tmp_path)) as running:
        yield running


@pytest.fixture
def remote(server: Server) -> Iterator[Dataset]:
    """60 records behind a web server."""
    with closing(open_remote(server.uri)) as opened:
        yield opened


def order_of(data: Dataset) -> Order:
    return Order(len(data), seed=3)


def expect_whole(found: StorageRate, data: Dataset) -> None:
    assert 0 < found.images_s.low <= found.images_s.value <= found.images_s.high
    assert found.images_s.windows >= 2
    assert found.bytes_s == pytest.approx(found.images_s.value * float(np.mean(data.length)))
    assert found.note.endswith(".")


def share(data: Dataset) -> float:
    """Of its files, what lies in memory."""
    found = measure_resident_share(list_files(data))
    assert found is not None
    return found


def read_bytes() -> int:
    """What this process has had read from disks."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def on_disk(data: Dataset) -> bool:
    """Whether its files can be read cold here."""
    return evict(list_files(data)).held


def test_files_and_spans_hold_every_record(local: Dataset) -> None:
    files, n = list_files(local), len(local)
    assert len(files) == describe_location(local).files == len(set(files))
    for sample, record in enumerate(local.read(np.arange(n))):
        spans = build_span_finder(local)(np.array([sample, sample]))
        assert len(spans) == 1
        path, begin, end = spans[0]
        assert path in files
        at = 0 if local.description.format == "folder" else int(local.offset[sample])
        assert begin <= at
        assert end is None or at + len(record) <= end
        assert path.read_bytes()[at : at + len(record)] == bytes(record)
    together = build_span_finder(local)(np.arange(n))
    assert {span.path for span in together} == set(files)


def test_spans_are_of_the_samples_alone(tmp_path: Path) -> None:
    """Records further apart than what one request reads anyway are apart."""
    (tmp_path / "images/cat").mkdir(parents=True)
    for number in range(8):
        (tmp_path / f"images/cat/{number}.jpg").write_bytes(picture(number, size=(400, 300), quality=95))
    pack(tmp_path / "images", tmp_path / "pack", mode="keep")
    with closing(opening.open(tmp_path / "pack")) as data:
        spans = build_span_finder(data)(np.array([0, 5]))
        assert spans == [
            FileSpan(tmp_path / "pack" / data.description.shards[0].name, int(low), int(low) + int(length))
            for low, length in sorted(zip(data.offset[[0, 5]].tolist(), data.length[[0, 5]].tolist(), strict=True))
        ]


def test_a_place_says_what_there_is(local: Dataset) -> None:
    load(list_files(local))
    place = describe_location(local)
    assert place.at == str(local.folder)
    assert place.mount == find_mount(local.folder)
    assert place.bytes == int(local.length.sum())
    assert place.record_bytes == pytest.approx(place.bytes / N)
    assert place.resident is None or place.resident > WARM
    if on_disk(local):
        assert share(local) < COLD
        assert (describe_location(local).resident or 0) < COLD


def test_warm_records_are_measured(local: Dataset) -> None:
    found = measure_storage(local, order_of(local), 16, cold=False, seconds=SHORT_S, threads=2)
    expect_whole(found, local)
    assert not found.cold
    assert found.latency_s is None
    assert "were in memory" in found.note


def test_cold_records_are_measured_and_lie_in_memory_again(local: Dataset) -> None:
    if not on_disk(local):
        pytest.skip("files cannot be evicted here")
    load(list_files(local))
    assert share(local) > WARM
    found = measure_storage(local, order_of(local), 16, cold=True, seconds=SHORT_S, threads=2)
    expect_whole(found, local)
    assert found.cold, found.note
    assert found.latency_s is not None
    assert found.latency_s > 0
    assert "were not in memory" in found.note
    assert share(local) > WARM


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.thin(4)
def test_cold_records_come_from_the_disk(local: Dataset, loaded: bool) -> None:
    if not on_disk(local):
        pytest.skip("files cannot be evicted here")
    if loaded:
        load(list_files(local))
    before = read_bytes()
    measure_storage(local, order_of(local), 16, cold=True, seconds=SHORT_S, threads=2)
    # 16 records alone and two windows of 16, at least. What was not loaded before is not loaded afterwards.
    assert read_bytes() - before >= int(local.length.sum()) // 2


def test_a_batch_may_be_larger_than_the_set_and_smaller_than_the_threads(data: Dataset) -> None:
    for batch in (1, N, 3 * N):
        for cold in (False, True):
            expect_whole(measure_storage(data, order_of(data), batch, cold=cold, seconds=SHORT_S, threads=3), data)


def test_loose_files_are_cold_but_for_their_names(tmp_path: Path) -> None:
    with closing(loose(tmp_path)) as data:
        if not on_disk(data):
            pytest.skip("files cannot be evicted here")
        note = measure_storage(data, order_of(data), 16, cold=True, seconds=SHORT_S).note
    assert "as single files, one after the other" in note
    assert "names stayed in memory" in note


def test_files_in_memory_are_never_cold(small_disk: Path) -> None:
    with closing(packed(small_disk)) as data:
        found = measure_storage(data, order_of(data), 16, cold=True, seconds=SHORT_S)
        expect_whole(found, data)
        assert not found.cold
        assert found.note.startswith(
            "Cold reads are not possible. The files are always in memory: their file system is tmpfs."
        )


@pytest.mark.parametrize("threads", [1, 2])
def test_a_shard_that_is_cut_while_it_is_read_is_told(data: Dataset, threads: int) -> None:
    data.read(np.arange(N))  # maps all shards, and touches none
    os.truncate(list_files(data)[0], 100)
    # Every read compares the size of one mapped file, in turn: it may be this one, as other data sets are open.
    with pytest.raises(DataError, match=r"records cannot be read to their end.*headway verify|was cut from"):
        measure_storage(data, order_of(data), 16, cold=False, seconds=5.0, threads=threads)


def test_a_missing_shard_is_told(tmp_path: Path) -> None:
    with closing(packed(tmp_path, mapped=False)) as data:
        list_files(data)[0].unlink()
        with pytest.raises(DataError, match="cannot be read"):
            measure_storage(data, order_of(data), N, cold=True, seconds=SHORT_S)


def test_remote_records_are_fetched_and_not_kept(remote: Dataset, server: Server, tmp_path: Path) -> None:
    assert list_files(remote) == []
    place = describe_location(remote)
    assert (place.at, place.mount, place.files, place.resident) == (server.uri, None, 0, None)
    found = measure_storage(remote, order_of(remote), 16, cold=True, seconds=SHORT_S, folder=tmp_path / "kept")
    expect_whole(found, remote)
    assert found.cold
    assert found.latency_s is not None
    assert server.uri in found.note
    assert server.served(".rec") >= int(remote.length.sum())
    assert not (tmp_path / "kept").exists()


@pytest.mark.check
def test_remote_records_are_warm_once_they_are_kept(remote: Dataset, server: Server, tmp_path: Path) -> None:
    given = {"cold": False, "seconds": 5.0, "folder": tmp_path / "kept"}
    first = measure_storage(remote, order_of(remote), 16, **given)  # type: ignore[arg-type]
    asked = len(server.asked)
    assert server.served(".rec") >= int(remote.length.sum())
    again = measure_storage(remote, order_of(remote), 16, **given)  # type: ignore[arg-type]
    assert len(server.asked) == asked
    for found in (first, again):
        expect_whole(found, remote)
        assert not found.cold
        assert found.note == f"Records in the cache folder {tmp_path / 'kept'}."


def test_a_cache_folder_that_cannot_be_used_is_told(remote: Dataset, server: Server, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    found = measure_storage(remote, order_of(remote), 16, cold=False, seconds=SHORT_S, folder=tmp_path / "kept")
    assert f"cannot be used: each read went to {server.uri}" in found.note


def test_a_server_without_the_shards_is_told(remote: Dataset, server: Server) -> None:
    server.fault = lambda asked: "404" if asked.name.endswith(".rec") else None
    with pytest.raises(DataError, match="there is no such file"):
        measure_storage(remote, order_of(remote), 16, cold=True, seconds=SHORT_S)
