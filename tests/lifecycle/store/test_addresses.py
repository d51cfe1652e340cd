"""Addresses in a store: what they say, which version they find, and what is refused."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lifecycle.store._pictures import classes

import headway
from headway.core.errors import DataError, UsageError
from headway.data import store_address
from headway.data.store_address import StoreAddress, find_version, is_store_address
from headway.lifecycle.store import store as store_module
from headway.lifecycle.store.store import Store

PLAIN = st.text("aZ09._-", max_size=20).map(lambda text: f"x{text}")
EMPTY = st.just("")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("addresses")
    store = Store.make(folder / "store")
    store.create("pets", splits={"train": 0.5, "eval": 0.5})
    store.add("pets", classes(folder / "pets", 20))
    store.remove("pets", ["cat/0.png"])
    store.tag("pets@v1", "gold")
    store.create("empty")
    return store


@given(name=PLAIN, version=PLAIN | EMPTY, split=PLAIN | EMPTY, folder=st.sampled_from(["", "/a/b", "a//b", "~/a"]))
def test_an_address_is_read_as_it_is_written(name: str, version: str, split: str, folder: str) -> None:
    address = StoreAddress(name=name, version=version, split=split, folder=folder)
    assert StoreAddress.parse(str(address)) == address
    assert is_store_address(str(address))


@pytest.mark.parametrize(
    "text",
    ["store:", "store:@v1", "store:a@", "store:a/", "store:a@v1/", "store:a/b/c", "store://a", "store:..", "store:a b",
     "store:s3://bucket//a", "store:a@../x", "store:a/..", "store:" + "a" * 101],
)  # fmt: skip
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"Write store:NAME|a store lies in a folder of this machine"):
        StoreAddress.parse(text)


def test_versions_by_number_tag_and_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_STORE", str(store.folder))
    first, second = store.resolve("pets@v1").version, store.resolve("pets").version
    for text, version in (("v1", first), ("gold", first), (first, first), (first[:8], first), ("", second)):
        assert find_version(store.folder, "pets", text) == version
        address = f"store:pets@{text}" if text else "store:pets"
        with closing(headway.open(f"{address}/eval")) as found:
            assert found.folder.parent.name == version
    with closing(headway.open(f"store:{store.folder}//pets")) as train:
        assert train.folder.name == "train"
        assert train.classes == ("cat", "dog")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("store:pet", "no data set 'pet'. Did you mean 'pets'"),
        ("store:pets@v9", "pets has no version or tag 'v9'"),
        ("store:pets@silver", "no version or tag 'silver'"),
        ("store:pets@" + "0" * 64, "no version with this ID"),
        ("store:pets/test", r"no samples in the split 'test'. It has samples in: eval, train"),
        ("store:empty", "no samples in the split 'train'. It has no samples at all"),
    ],
)
def test_what_is_not_there_is_named(store: Store, text: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_STORE", str(store.folder))
    with pytest.raises(UsageError, match=sentence):
        headway.open(text)


def test_a_store_must_be_named_and_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_STORE", raising=False)
    with pytest.raises(UsageError, match="Set HEADWAY_STORE"):
        headway.open("store:pets")
    with pytest.raises(UsageError, match="there is no store in this folder"):
        headway.open(f"store:{tmp_path}//pets")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="not a store, and not empty"):
        Store.make(tmp_path)


def test_a_network_file_system_is_refused_but_for_whole_ids(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.resolve("pets").version
    for module in (store_address, store_module):
        monkeypatch.setattr(module, "is_on_network", lambda _: True)
    with pytest.raises(UsageError, match="cannot lie on a network file system"):
        Store.make(tmp_path / "new")
    for use in (lambda: headway.open(f"store:{store.folder}//pets"), lambda: Store(store.folder).log("pets")):
        with pytest.raises(UsageError, match="SQLite's locks do not work on a network file system"):
            use()
    headway.open(f"store:{store.folder}//pets@{version}/train").close()


def test_a_damaged_database_is_named(store: Store, tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"not SQLite at all" * 100)
    with pytest.raises(DataError, match="the database cannot be used"):
        headway.open(f"store:{tmp_path}//pets")


def test_tags_are_names_of_one_version(store: Store) -> None:
    for tag in ("v3", "abcdef", "a/b", ""):
        with pytest.raises(UsageError):
            store.tag("pets", tag)
    store.tag("pets@v1", "moving")
    with pytest.raises(UsageError, match=r"a tag 'moving' already, on v1. .*--replace"):
        store.tag("pets@v2", "moving")
    assert store.tag("pets@v2", "moving", replace=True).number == 2
    assert "moving" in store.resolve("pets@v2").tags
    assert store.resolve("pets@moving").version == store.resolve("pets@v2").version
