"""Which tier is chosen, and why."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from tests.data.tiers._near import HEIGHT, WIDTH, N, images, pixels_of
from tests.data.tiers._server import make_pack, serving

from headway.core.errors import UsageError
from headway.data import opening
from headway.data.data_recipe import CacheMode
from headway.data.dataset import Dataset
from headway.data.order import Order
from headway.data.tiers import choose_tier
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.memory import MemoryTier
from headway.data.tiers.remote_dataset import open_remote
from headway.data.tiers.tier import MappedTier


def threads() -> int:
    return sum(thread.name.startswith("headway") for thread in threading.enumerate())


def test_auto_keeps_a_small_set_decoded(data: Dataset) -> None:
    tier = choose_tier(data, "auto", backend="pillow")
    assert isinstance(tier, MemoryTier)
    assert (images(tier, np.arange(N)) == pixels_of(data)).all()
    size = f"{N * WIDTH * HEIGHT * 3 / 1e3:.3g} kB"
    assert tier.why.startswith(f"memory, the decoded set of {size} fits into a quarter of the free memory of ")
    assert threads() == 0  # its decoder is closed
    tier.close()


def test_auto_maps_what_does_not_fit_has_many_sizes_or_is_raw(
    data: Dataset, unlike: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = opening.open(make_pack(tmp_path / "raw", count=6, format="raw"))
    for some in (unlike, raw):
        tier = choose_tier(some)
        assert isinstance(tier, MappedTier)
        assert tier.why == "none, local files are mapped, and the page cache keeps them"
    raw.close()
    free = 4 * N * WIDTH * HEIGHT * 3
    for available, kind in ((free + 4, MemoryTier), (free - 4, MappedTier)):
        monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda available=available: available)
        assert isinstance(choose_tier(data), kind)
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: 4 * free)
    assert isinstance(choose_tier(data), MemoryTier)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "5")  # each of them keeps a copy
    assert isinstance(choose_tier(data), MappedTier)


def test_what_is_asked_is_done(data: Dataset, unlike: Dataset) -> None:
    assert isinstance(choose_tier(data, "none"), MappedTier)
    for cache in ("memory", "device"):  # of the device CPU
        tier = choose_tier(data, cache)
        assert isinstance(tier, MemoryTier)
        assert tier.damaged is not None
        assert tier.why.startswith("memory, as asked: the decoded set")
    tier = choose_tier(unlike, "memory")
    assert isinstance(tier, MemoryTier)
    assert tier.damaged is None
    assert "as it is, not decoded" in tier.why
    assert bytes(tier.read([7])[0]) == bytes(unlike.read([7])[0])


def test_pixels_that_do_not_fit_are_kept_as_they_are(data: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    size = int(data.length.sum())
    assert size < N * WIDTH * HEIGHT * 3
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: int(size / 0.79))
    assert "not decoded" in choose_tier(data, "memory").why
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: int(size / 0.81))
    with pytest.raises(UsageError, match=r"the set needs .* and the process has .* free, of which 80 % may be taken"):
        choose_tier(data, "memory")
    with pytest.raises(UsageError, match="the set needs"):
        choose_tier(data, "device")


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (999, "999 bytes"),
        (1000, "1 kB"),
        (92_345, "92.3 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (3_456_789, "3.46 MB"),
        (999_600_000, "1 GB"),
        (12_345_678_901, "12.3 GB"),
    ],
)
def test_sizes_are_told_in_the_unit_that_suits_them(
    data: Dataset, monkeypatch: pytest.MonkeyPatch, free: int, words: str
) -> None:
    monkeypatch.setattr("headway.data.tiers.choice.MAX_REQUESTED_SHARE", 0)  # nothing fits, however much is free
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: free)
    with pytest.raises(UsageError, match=f"and the process has {words} free"):
        choose_tier(data, "memory")


def test_the_impossible_is_refused_with_the_way_out(data: Dataset, unlike: Dataset) -> None:
    pack = r"Pack them to one size \(headway pack --transform, with ImageOps\.fit\)"
    with pytest.raises(UsageError, match=rf"data\.cache: a device keeps decoded images of one size.*{pack}"):
        choose_tier(unlike, "device")
    with pytest.raises(UsageError, match=r"data\.cache: the set is on a local disk already.*Leave data\.cache out"):
        choose_tier(data, "disk")
    with pytest.raises(UsageError, match=r"'memry' is not a cache.*Did you mean 'memory'"):
        choose_tier(data, "memry")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cache", "kind", "words"),
    [
        ("auto", MemoryTier, "memory, the decoded set of"),
        ("memory", MemoryTier, "memory, as asked"),
        ("disk", DiskTier, "disk, the set is remote: at most 2 GB of it in"),
        ("none", DiskTier, "none, remote records are kept until they are read"),
    ],
)
def test_remote_sets(folder: Path, tmp_path: Path, data: Dataset, cache: CacheMode, kind: type, words: str) -> None:
    with serving(folder) as server:
        far = open_remote(server.uri, tmp_path / "columns")
        tier = choose_tier(far, cache, folder=tmp_path / "cache", budget_bytes=2 * 10**9, backend="pillow")
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
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: 100)
    with serving(folder) as server:
        far = open_remote(server.uri, tmp_path / "columns")
        tier = choose_tier(far, folder=tmp_path / "cache")
        assert isinstance(tier, DiskTier)
        assert tier.name == "disk"
        assert tier.why == f"disk, the set is remote: at most 50 GB of it in {tmp_path / 'cache'}"
        tier.close()
        far.close()


def test_a_set_on_a_network_file_system_is_copied_where_memory_holds_it(
    unlike: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = opening.open(tmp_path / "pack", mapped=False)
    monkeypatch.setattr("headway.data.tiers.choice.is_on_network", lambda path: True)
    tier = choose_tier(slow)
    assert isinstance(tier, MemoryTier)
    assert "network file system" in tier.why
    assert bytes(tier.read([7])[0]) == bytes(unlike.read([7])[0])
    monkeypatch.setattr("headway.data.tiers.choice.read_free_memory_bytes", lambda: 100)
    tier = choose_tier(slow)
    assert tier.why == "none, its files are read as they are needed"
    slow.close()
