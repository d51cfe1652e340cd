"""What the tests of remote records share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.data.tiers._server import Asked, Server

from headway.data.tiers.disk import DiskTier

N = 60
GB = 10**9
Open = Callable[..., DiskTier]


def read(tier: DiskTier, ids: NDArray[np.int64] | range = range(N)) -> list[bytes]:
    return [bytes(record) for record in tier.read(np.asarray(ids))]


def spans_of(count: int, batch: int) -> list[tuple[int, int]]:
    return [(low, min(count, low + batch)) for low in range(0, count, batch)]


def shards_asked(server: Server) -> list[Asked]:
    return [asked for asked in server.asked if asked.name.endswith(".rec") and asked.end - asked.start > 1]


def kept_bytes(tier: DiskTier) -> int:
    store = tier._prefetcher._store
    assert store is not None
    return store.kept_bytes


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.glob("packs/*/*.rec"))
