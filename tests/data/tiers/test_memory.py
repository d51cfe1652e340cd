"""Tiers in memory and on a device against the data set itself."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from crc32c import crc32c
from tests._waits import waits_refused
from tests.data.tiers._near import HEIGHT, SOME, WIDTH, N, images, mapped, pixels_of
from tests.data.tiers._server import make_pack

from headway.data import opening
from headway.data.columns import FLAG_RAW
from headway.data.dataset import Dataset
from headway.data.decode import build_decoder
from headway.data.reference import DecodeStatus
from headway.data.tiers import choose_tier
from headway.data.tiers.device import DeviceTier
from headway.data.tiers.memory import FILL_CHUNK_SAMPLES, MemoryTier


def test_a_decoded_set_reads_like_a_raw_one(data: Dataset) -> None:
    done: list[tuple[int, int]] = []
    decoder = build_decoder(2, "pillow")
    tier = MemoryTier.from_decoded(data, mapped(data), decoder, why="x", progress=lambda *part: done.append(part))
    decoder.close()
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
    monkeypatch.setattr("headway.data.tiers.memory.FILL_CHUNK_SAMPLES", 7)
    done: list[tuple[int, int]] = []
    decoder = build_decoder(1, "pillow")
    tier = MemoryTier.from_decoded(data, mapped(data), decoder, why="", progress=lambda *part: done.append(part))
    decoder.close()
    assert (images(tier, np.arange(N)) == pixels_of(data)).all()
    assert done == [(7, N), (14, N), (21, N), (28, N), (35, N), (40, N)]
    assert FILL_CHUNK_SAMPLES > 7


def test_a_damaged_sample_is_marked_zero_and_has_a_wrong_checksum(tmp_path: Path) -> None:
    data = opening.open(make_pack(tmp_path, count=10, size=(WIDTH, HEIGHT)))
    shard = tmp_path / "pack" / data.description.shards[int(data.shard[4])].name
    with shard.open("r+b") as file:
        file.seek(int(data.offset[4]) + 300)
        file.write(b"\x55\xaa\x55")
    decoder = build_decoder(1)
    for tier in (
        MemoryTier.from_decoded(data, mapped(data), decoder, why=""),
        DeviceTier(data, mapped(data), decoder, "cpu", why=""),
    ):
        assert tier.damaged is not None
        assert tier.damaged.tolist() == [
            DecodeStatus.CHECKSUM if sample == 4 else DecodeStatus.OK for sample in range(10)
        ]
        found = images(tier, np.arange(10))
        assert not found[4].any()
        assert found[5].any()
        right = np.array([crc32c(image.tobytes()) for image in found], np.uint32) == tier.crc32c
        assert np.flatnonzero(~right).tolist() == [4]
    decoder.close()
    data.close()


@pytest.mark.parametrize("format", ["recordio", "raw"])
def test_copied_records_are_the_same_bytes(tmp_path: Path, format: str) -> None:
    data = opening.open(make_pack(tmp_path, count=20, size=(WIDTH, HEIGHT), format=format))
    tier = MemoryTier.from_records(data, mapped(data), why="")
    ids = np.array([19, 0, 5, 5])
    assert [bytes(record) for record in tier.read(ids)] == [bytes(record) for record in data.read(ids)]
    assert (tier.flags == data.flags).all()
    assert (tier.crc32c == data.crc32c).all()
    assert tier.damaged is None
    data.close()


def test_copied_records_of_any_sizes_are_the_same_bytes(unlike: Dataset) -> None:
    tier = MemoryTier.from_records(unlike, mapped(unlike), why="")
    for sample in range(12):
        assert bytes(tier.read([sample])[0]) == bytes(unlike.read([sample])[0])


def test_a_copied_record_that_is_short_ends_in_zeros(tmp_path: Path) -> None:
    folder = make_pack(tmp_path, count=6, size=(WIDTH, HEIGHT), shard_bytes=10**6)
    data = opening.open(folder, mapped=False)
    whole = bytes(data.read([5])[0])
    os.truncate(folder / data.description.shards[0].name, int(data.offset[5]) + 100)
    tier = MemoryTier.from_records(data, mapped(data), why="")
    assert bytes(tier.read([5])[0]) == whole[:100] + bytes(len(whole) - 100)
    assert bytes(tier.read([4])[0]) == bytes(data.read([4])[0])
    data.close()


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
    decoder = build_decoder(1, "pillow")
    tier = DeviceTier(data, mapped(data), decoder, "cpu", why="x")
    decoder.close()
    gathers(tier, data)
    tier.close()


@pytest.mark.gpu
def test_a_gpu_gathers_what_the_set_holds_without_a_wait(data: Dataset) -> None:
    decoder = build_decoder(1, "pillow")
    tier = DeviceTier(data, mapped(data), decoder, "cuda", why="x")
    decoder.close()
    gathers(tier, data)
    with waits_refused():
        tier.gather(SOME)
    chosen = choose_tier(data, device="cuda")
    assert isinstance(chosen, DeviceTier)
    gathers(chosen, data)
