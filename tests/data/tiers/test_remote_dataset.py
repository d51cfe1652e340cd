"""Opening a pack at a remote address."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tests.data.tiers._far import N
from tests.data.tiers._server import Server, make_pack, serving

from headway.core.errors import DataError, UsageError
from headway.data import opening
from headway.data.columns import COLUMNS_FILE, load_columns
from headway.data.tiers.remote_dataset import open_remote


def test_a_remote_set_is_opened_like_a_local_one(server: Server, packed: Path, tmp_path: Path) -> None:
    local = opening.open(packed)
    for _ in range(2):
        data = open_remote(f"{server.uri}/", tmp_path)
        assert data.fingerprint == local.fingerprint
        assert data.description == local.description
        assert [data.name(sample) for sample in range(N)] == [local.name(sample) for sample in range(N)]
        for name in ("shard", "offset", "length", "crc32c", "width", "height", "flags", "label"):
            assert (getattr(data, name) == getattr(local, name)).all()
        data.close()
    assert sum(asked.end - asked.start > 1 for asked in server.asked) == 1  # the second time they were here
    local.close()


def test_open_takes_an_address(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: list[bytes]
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", os.fspath(tmp_path))
    data = opening.open(server.uri)
    assert [bytes(record) for record in data.read(range(N))] == wanted
    data.close()
    assert list(tmp_path.glob("packs/*/columns.safetensors"))


def test_columns_that_have_changed_are_fetched_anew(tmp_path: Path) -> None:
    one, two = make_pack(tmp_path / "1", count=6), make_pack(tmp_path / "2", count=8)
    served = tmp_path / "served"
    served.symlink_to(one)
    with serving(served) as server:
        assert len(open_remote(server.uri, tmp_path / "cache")) == 6
        served.unlink()
        served.symlink_to(two)
        assert len(open_remote(server.uri, tmp_path / "cache")) == 8


def test_columns_of_a_server_that_marks_nothing_are_fetched_each_time(server: Server, tmp_path: Path) -> None:
    server.tag = lambda path: ""
    for count in (1, 2):
        open_remote(server.uri, tmp_path).close()
        assert sum(asked.end - asked.start > 1 for asked in server.asked) == count


def test_columns_without_their_fingerprint_are_a_sentence(tmp_path: Path) -> None:
    folder = make_pack(tmp_path, count=6)
    data = (folder / COLUMNS_FILE).read_bytes()
    with serving(folder) as server:
        for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[:-3], b"", b"\0" * 100):
            (folder / COLUMNS_FILE).write_bytes(damaged)
            with pytest.raises(DataError) as raised:
                open_remote(server.uri, tmp_path / "cache")
            assert server.uri in str(raised.value)
            assert not list((tmp_path / "cache").glob("packs/*/*"))


def test_columns_are_opened_where_the_cache_cannot_be_written(
    server: Server, tmp_path: Path, wanted: list[bytes]
) -> None:
    (tmp_path / "file").write_text("in the way")
    data = open_remote(server.uri, tmp_path / "file")
    assert [bytes(record) for record in data.read([5])] == [wanted[5]]
    data.close()


@pytest.mark.parametrize("name", ["../evil.rec", "/tmp/evil.rec", "a/../../evil", "state", "columns.safetensors", ""])
def test_a_pack_cannot_name_files_outside_of_the_cache(tmp_path: Path, name: str) -> None:
    folder = make_pack(tmp_path, count=6)
    path = folder / COLUMNS_FILE
    _, description, _ = load_columns(path)
    shards = (replace(description.shards[0], name=name), *description.shards[1:])
    save_file(load_file(path), path, metadata=replace(description, shards=shards).to_metadata())
    with serving(folder) as server, pytest.raises(DataError, match="is not the name of a shard"):
        open_remote(server.uri, tmp_path / "cache")


def test_an_address_with_no_pack_is_wrong_usage(server: Server, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no packed data set"):
        open_remote(f"{server.uri}/nowhere", tmp_path)
    (tmp_path / "train").symlink_to(packed)
    with serving(tmp_path) as other, pytest.raises(UsageError, match=r"Name one: http.*/train"):
        open_remote(other.uri, tmp_path / "cache")
