"""A pack behind a web server, and tiers over it; local sets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data._packs import picture
from tests.data.tiers._far import GB, N, Open
from tests.data.tiers._near import HEIGHT, WIDTH
from tests.data.tiers._near import N as NEAR
from tests.data.tiers._server import Server, make_pack, serving

from headway.data import opening
from headway.data.dataset import Dataset
from headway.data.pack import pack
from headway.data.tiers.disk import DiskTier
from headway.data.tiers.remote_dataset import RemoteShards, open_remote
from headway.storage.remote_folder import RemoteFolder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 records of about 6.5 kB in 3 shards."""
    return make_pack(tmp_path_factory.mktemp("disk"), size=(90, 60), shard_bytes=150_000)


@pytest.fixture(scope="module")
def wanted(packed: Path) -> list[bytes]:
    data = opening.open(packed)
    records = [bytes(record) for record in data.read(range(N))]
    data.close()
    return records


@pytest.fixture
def server(packed: Path) -> Iterator[Server]:
    with serving(packed) as running:
        yield running


@pytest.fixture
def tier(server: Server, tmp_path: Path) -> Iterator[Open]:
    """Opens the pack anew, as another process would, and a tier over it."""
    opened: list[tuple[Dataset, DiskTier]] = []

    def open_tier(folder: Path | None = tmp_path / "cache", budget: int = GB) -> DiskTier:
        data = open_remote(server.uri, tmp_path / "columns")
        source = data.source
        assert isinstance(source, RemoteShards)
        remote = RemoteFolder(source.remote.uri, timeout_s=60, attempts=5, pause_s=0.005)
        made = DiskTier(data, remote, folder, budget, why="")
        remote.close()
        opened.append((data, made))
        return made

    yield open_tier
    for data, made in opened:
        made.close()
        data.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("tiers"), count=NEAR, size=(WIDTH, HEIGHT))


@pytest.fixture
def data(folder: Path) -> Iterator[Dataset]:
    opened = opening.open(folder)
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
    opened = opening.open(tmp_path / "pack")
    yield opened
    opened.close()
