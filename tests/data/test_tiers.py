"""Tiers in memory and on a device against the data set itself; and which one is chosen, and why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from crc32c import crc32c
from numpy.typing import NDArray
from tests.data._packs import picture
from tests.data._remote import make_pack, serving

from headway.core.errors import UsageError
from headway.data import dataset
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import Status, decoder
from headway.data.options import Cache
from headway.data.order import Order
from headway.data.pack import pack
from headway.data.tiers import choose, room
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.memory import CHUNK_SAMPLES, MemoryTier
from headway.data.tiers.opened import open_remote
from headway.data.tiers.tier import MappedTier, Tier

N = 40
WIDTH, HEIGHT = 40, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("tiers"), count=N, size=(WIDTH, HEIGHT))


@pytest.fixture
def data(folder: Path) -> Iterator[Dataset]:
    opened = dataset.open(folder)
    yield opened
    opened.close()


@pytest.fixture
def unlike(tmp_path: Path) -> Iterator[Dataset]:
    """Images of different sizes, gray and PNG among them."""
    for number in range(12):
        path = tmp_path / "unlike" / ("a", "b")[number % 2] / f"{number}.{'png' if number == 3 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, "PNG" if number == 3 else "JPEG", size=(8 + number, 9)))
    pack(tmp_path / "unlike", tmp_path / "pack")
    opened = dataset.open(tmp_path / "pack")
    yield opened
    opened.close()


def mapped(data: Dataset) -> Tier:
    return MappedTier(data, "")


def pixels_of(data: Dataset) -> NDArray[np.uint8]:
    """Every image, decoded by the reference on its own."""
    out = np.empty((len(data), HEIGHT, WIDTH, data.description.channels), np.uint8)
    reference = decoder(1, "pillow")
    kinds = np.where(data.flags & FLAG_RAW, 1, 0).astype(np.uint8)
    shapes = np.tile(np.array([HEIGHT, WIDTH, data.description.channels], np.uint32), (len(data), 1))
    boxes = np.tile(np.array([0, 0, WIDTH, HEIGHT], np.float32), (len(data), 1))
    reference(data.read(range(len(data))), boxes, out, kinds=kinds, shapes=shapes)
    reference.close()
    return out


def images(tier: Tier, ids: NDArray[np.int64], channels: int = 3) -> NDArray[np.uint8]:
    records = [np.frombuffer(record, np.uint8) for record in tier.read(ids)]
    return np.array(records).reshape(len(ids), HEIGHT, WIDTH, channels)


SOME = np.array([3, 0, 39, 3, 17])


# Memory


def test_a_decoded_set_reads_like_a_raw_one(data: Dataset) -> None:
    done: list[tuple[int, int]] = []
    decode = decoder(2, "pillow")
    tier = MemoryTier.decoded(data, mapped(data), decode, why="x", progress=lambda *part: done.append(part))
    decode.close()
    expected = pixels_of(data)
    assert (images(tier, SOME) == expected[SOME]).all()
    assert (tier.flags == FLAG_RAW).all()
    assert (tier.width == WIDTH).all()
    assert (tier.height == HEIGHT).all()
    assert tier.damaged is not None
    assert not tier.damaged.any()
    assert tier.crc32c.tolist() == [crc32c(image.tobytes()) for image in expected]
    assert done == [(N, N)]
    assert (tier.name, tier.why) == ("memory", "x")
    assert len(tier.read([])) == 0
    records = tier.read(SOME)
    tier.close()
    del tier
    assert bytes(records[1]) == expected[0].tobytes()


def test_a_set_is_decoded_in_pieces(folder: Path, data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.data.tiers.memory.CHUNK_SAMPLES", 7)
    done: list[tuple[int, int]] = []
    decode = decoder(1, "pillow")
    tier = MemoryTier.decoded(data, mapped(data), decode, why="", progress=lambda *part: done.append(part))
    decode.close()
    assert (images(tier, np.arange(N)) == pixels_of(data)).all()
    assert done == [(7, N), (14, N), (21, N), (28, N), (35, N), (40, N)]
    assert CHUNK_SAMPLES > 7


def test_a_damaged_sample_is_marked_zero_and_has_a_wrong_checksum(tmp_path: Path) -> None:
    data = dataset.open(make_pack(tmp_path, count=10, size=(WIDTH, HEIGHT)))
    shard = tmp_path / "pack" / data.description.shards[int(data.shard[4])].name
    with shard.open("r+b") as file:
        file.seek(int(data.offset[4]) + 300)
        file.write(b"\x55\xaa\x55")
    decode = decoder(1)
    for tier in (
        MemoryTier.decoded(data, mapped(data), decode, why=""),
        DeviceTier(data, mapped(data), decode, "cpu", why=""),
    ):
        assert tier.damaged is not None
        assert tier.damaged.tolist() == [Status.CHECKSUM if sample == 4 else Status.OK for sample in range(10)]
        found = images(tier, np.arange(10))
        assert not found[4].any()
        assert found[5].any()
        right = np.array([crc32c(image.tobytes()) for image in found], np.uint32) == tier.crc32c
        assert np.flatnonzero(~right).tolist() == [4]
    decode.close()
    data.close()


@pytest.mark.parametrize("format", ["recordio", "raw"])
def test_copied_records_are_the_same_bytes(tmp_path: Path, format: str) -> None:
    data = dataset.open(make_pack(tmp_path, count=20, size=(WIDTH, HEIGHT), format=format))
    tier = MemoryTier.copied(data, mapped(data), why="")
    ids = np.array([19, 0, 5, 5])
    assert [bytes(record) for record in tier.read(ids)] == [bytes(record) for record in data.read(ids)]
    assert (tier.flags == data.flags).all()
    assert (tier.crc32c == data.crc32c).all()
    assert tier.damaged is None
    data.close()


def test_copied_records_of_any_sizes_are_the_same_bytes(unlike: Dataset) -> None:
    tier = MemoryTier.copied(unlike, mapped(unlike), why="")
    for sample in range(12):
        assert bytes(tier.read([sample])[0]) == bytes(unlike.read([sample])[0])


# Device


def gathers(tier: DeviceTier, data: Dataset) -> None:
    expected = pixels_of(data)
    for ids in (SOME, np.arange(N), np.arange(0), SOME.tolist()):
        found = tier.gather(ids)
        assert found.dtype == torch.uint8
        assert found.device == tier.pixels.device
        assert (found.cpu().numpy() == expected[np.asarray(ids, np.int64)]).all()
    assert (images(tier, SOME) == expected[SOME]).all()
    assert tier.pixels.shape == (N, HEIGHT, WIDTH, 3)
    assert (tier.flags == FLAG_RAW).all()


def test_a_device_gathers_what_the_set_holds(data: Dataset) -> None:
    decode = decoder(1, "pillow")
    tier = DeviceTier(data, mapped(data), decode, "cpu", why="x")
    decode.close()
    gathers(tier, data)
    tier.close()


@pytest.mark.gpu
def test_a_gpu_gathers_what_the_set_holds_without_a_wait(data: Dataset) -> None:
    decode = decoder(1, "pillow")
    tier = DeviceTier(data, mapped(data), decode, "cuda", why="x")
    decode.close()
    gathers(tier, data)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tier.gather(SOME)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chosen = choose(data, device="cuda")
    assert isinstance(chosen, DeviceTier)
    gathers(chosen, data)


# Choice


def threads() -> int:
    return sum(thread.name.startswith("headway") for thread in threading.enumerate())


def test_auto_keeps_a_small_set_decoded(data: Dataset) -> None:
    tier = choose(data, "auto", backend="pillow")
    assert isinstance(tier, MemoryTier)
    assert (images(tier, np.arange(N)) == pixels_of(data)).all()
    assert tier.why.startswith(
        f"memory, the decoded set of {N * WIDTH * HEIGHT * 3 / 1e9:.3g} GB fits into a quarter of"
    )
    assert threads() == 0  # its decoder is closed
    tier.close()


def test_auto_maps_what_does_not_fit_has_many_sizes_or_is_raw(
    data: Dataset, unlike: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = dataset.open(make_pack(tmp_path / "raw", count=6, format="raw"))
    for some in (unlike, raw):
        tier = choose(some)
        assert isinstance(tier, MappedTier)
        assert tier.why == "none, local files are mapped, and the page cache keeps them"
    raw.close()
    free = 4 * N * WIDTH * HEIGHT * 3
    for available, kind in ((free + 4, MemoryTier), (free - 4, MappedTier)):
        monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda available=available: available)
        assert isinstance(choose(data), kind)
    monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda: 4 * free)
    assert isinstance(choose(data), MemoryTier)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")  # each of them keeps a copy
    assert isinstance(choose(data), MappedTier)


def test_what_is_asked_is_done(data: Dataset, unlike: Dataset) -> None:
    assert isinstance(choose(data, "none"), MappedTier)
    for cache in ("memory", "device"):  # of the device CPU
        tier = choose(data, cache)
        assert isinstance(tier, MemoryTier)
        assert tier.damaged is not None
        assert tier.why.startswith("memory, as asked: the decoded set")
    tier = choose(unlike, "memory")
    assert isinstance(tier, MemoryTier)
    assert tier.damaged is None
    assert "as it is, not decoded" in tier.why
    assert bytes(tier.read([7])[0]) == bytes(unlike.read([7])[0])


def test_pixels_that_do_not_fit_are_kept_as_they_are(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    size = int(data.length.sum())
    assert size < N * WIDTH * HEIGHT * 3
    monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda: int(size / 0.79))
    assert "not decoded" in choose(data, "memory").why
    monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda: int(size / 0.81))
    with pytest.raises(UsageError, match=r"the set needs .* and the process has .* free, of which 80 % may be taken"):
        choose(data, "memory")
    with pytest.raises(UsageError, match="the set needs"):
        choose(data, "device")


def test_the_impossible_is_refused_with_the_way_out(data: Dataset, unlike: Dataset) -> None:
    with pytest.raises(UsageError, match=r"data\.cache: a device keeps decoded images of one size.*Pack them"):
        choose(unlike, "device")
    with pytest.raises(UsageError, match=r"data\.cache: the set lies on a local disk already.*Leave data\.cache out"):
        choose(data, "disk")
    with pytest.raises(UsageError, match=r"'memry' is no place for a cache.*Did you mean 'memory'"):
        choose(data, "memry")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cache", "kind", "words"),
    [
        ("auto", MemoryTier, "memory, the decoded set of"),
        ("memory", MemoryTier, "memory, as asked"),
        ("disk", DiskTier, "disk, the set is remote: at most 2 GB of it in"),
        ("none", DiskTier, "none, remote records are kept until they are read"),
    ],
)
def test_remote_sets(folder: Path, tmp_path: Path, data: Dataset, cache: Cache, kind: type, words: str) -> None:
    with serving(folder) as server:
        far = open_remote(server.uri, tmp_path / "columns")
        tier = choose(far, cache, folder=tmp_path / "cache", budget_bytes=2 * 10**9, backend="pillow")
        assert isinstance(tier, kind)
        assert tier.why.startswith(words)
        order = Order(N, 1)
        tier.expect(iter([(0, N)]), order)
        ids = order(np.arange(N))[1]
        if kind is MemoryTier:
            assert (images(tier, ids) == pixels_of(data)[ids]).all()
            assert threads() == 0
        else:
            assert [bytes(record) for record in tier.read(ids)] == [bytes(record) for record in data.read(ids)]
        tier.close()
        far.close()
    assert (tmp_path / "cache").exists() == (cache != "none")


def test_a_remote_set_that_is_large_goes_to_the_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda: 100)
    with serving(folder) as server:
        far = open_remote(server.uri, tmp_path / "columns")
        tier = choose(far, folder=tmp_path / "cache")
        assert isinstance(tier, DiskTier)
        assert tier.name == "disk"
        assert tier.why == f"disk, the set is remote: at most 50 GB of it in {tmp_path / 'cache'}"
        tier.close()
        far.close()


def test_a_set_on_a_network_file_system_is_copied_where_memory_holds_it(
    unlike: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = dataset.open(tmp_path / "pack", mapped=False)
    monkeypatch.setattr("headway.data.tiers.choice.on_network", lambda path: True)
    tier = choose(slow)
    assert isinstance(tier, MemoryTier)
    assert "network file system" in tier.why
    assert bytes(tier.read([7])[0]) == bytes(unlike.read([7])[0])
    monkeypatch.setattr("headway.data.tiers.choice.free_memory_bytes", lambda: 100)
    tier = choose(slow)
    assert tier.why == "none, its files are read as they are needed"
    slow.close()


# Free memory


def test_free_memory_is_the_machines_or_what_a_limit_leaves(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    groups, membership = tmp_path / "groups", tmp_path / "membership"
    membership.write_text("")
    assert room.free_memory_bytes(groups=groups, membership=membership) == pytest.approx(free, rel=0.3)

    def group(path: Path, limit: str, used: int, cached: int, unified: bool) -> None:
        path.mkdir(parents=True, exist_ok=True)
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        (path / names[0]).write_text(f"{limit}\n")
        (path / names[1]).write_text(f"{used}\n")
        (path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    membership.write_text("0::/outer/inner\n")
    group(groups / "outer", "9000", 8000, 500, True)
    group(groups / "outer/inner", "max", 10, 0, True)
    assert room.free_memory_bytes(groups=groups, membership=membership) == 1500
    group(groups / "outer/inner", "1000", 100, 0, True)
    assert room.free_memory_bytes(groups=groups, membership=membership) == 900
    group(groups / "outer/inner", "1000", 2000, 0, True)
    assert room.free_memory_bytes(groups=groups, membership=membership) == 0
    membership.write_text("4:memory:/own\n3:cpu:/own\n")
    group(groups / "memory/own", "7000", 3000, 1000, False)
    assert room.free_memory_bytes(groups=groups, membership=membership) == 5000


def test_copies_are_as_many_as_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert room.copies_on_host() == 1
    for text, copies in (("8", 8), ("0", 1), ("", 1), ("many", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert room.copies_on_host() == copies
