"""Damage: each damaged byte is found by `dataset verify`, and named by where it is."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.lifecycle.store._pictures import classes

import headway
from headway.core.errors import DataError
from headway.data.columns import DatasetDescription, Shard, load_columns
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.version_files import read_rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    store = Store.make(folder / "store")
    store.create("pets")
    store.add("pets", classes(folder / "images", 8), split="train")
    store.label("pets", {"cat/0.png": "dog"})
    return folder / "store"


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    shutil.copytree(whole, tmp_path / "store")
    return Store(tmp_path / "store")


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_a_whole_store_has_no_damage(whole: Path) -> None:
    assert Store(whole).verify() == []
    address = f"store:{whole}//pets"
    assert headway.verify(address).damages == []
    assert headway.verify(f"{address}@v1/train").samples == {"": 16}


def test_a_damaged_shard_is_found(store: Store) -> None:
    (shard,) = (store.folder / "objects").rglob("*.rec")
    flip(shard, shard.stat().st_size - 20)
    damages = store.verify()
    assert any("SHA-256 is not its name" in one.reason for one in damages)
    assert sum("not those of its ID" in one.reason for one in damages) == 1
    (damage,) = headway.verify(f"store:{store.folder}//pets").damages
    assert damage.reason == "the image's checksum does not match"
    assert damage.name.endswith(".png")
    with pytest.raises(DataError, match="not those of the sample's ID"):
        store.read_image("pets", damage.name)


def test_a_missing_shard_is_found_and_does_not_open(store: Store) -> None:
    (shard,) = (store.folder / "objects").rglob("*.rec")
    shard.unlink()
    (damage,) = store.verify()
    assert damage.where.endswith(shard.name)
    assert "16 samples" in damage.reason
    with pytest.raises(DataError, match="a shard is missing"):
        headway.open(f"store:{store.folder}//pets")


def test_each_byte_of_a_version_counts(store: Store) -> None:
    version = store.folder / "versions" / store.resolve("pets").version
    columns = version / "train/columns.safetensors"
    arrays, _, _ = load_columns(columns)
    header = columns.stat().st_size - sum(array.nbytes for array in arrays.values())
    for place in range(header, columns.stat().st_size, 97):
        flip(columns, place)
        assert store.verify() or headway.verify(f"store:{store.folder}//pets").damages, place
        flip(columns, place)
    assert store.verify() == []
    flip(version / "manifest.json", 20)
    assert store.verify() != []


def test_a_missing_version_is_found(store: Store) -> None:
    shutil.rmtree(store.folder / "versions" / store.resolve("pets").version)
    assert any("the version is missing" in one.reason for one in store.verify())


def test_a_shard_of_another_pack_does_not_open(store: Store, tmp_path: Path) -> None:
    """The number of its own pack counts, if a shard has one."""
    headway.pack(classes(tmp_path / "images", 8, first=100), tmp_path / "packed", mode="keep")
    (shard,) = (store.folder / "objects").rglob("*.rec")
    other = (tmp_path / "packed/shard-00000.rec").read_bytes()
    shard.chmod(0o600)
    shard.write_bytes(other)
    with pytest.raises(DataError, match="this shard belongs to another pack"):
        headway.open(f"store:{store.folder}//pets")


def test_descriptions_of_packs_are_as_they_were() -> None:
    """Packs written before and after shards could have numbers of their own are equal."""
    facts: dict[str, Any] = {
        "pack_id": 7,
        "fingerprint": "0" * 64,
        "format": "recordio",
        "mode": "keep",
        "label_kind": "class",
    }
    facts |= {"classes": ("a",), "class_counts": (1,), "channels": 1, "common_size": None, "source": "x"}
    plain = DatasetDescription(**facts, shards=(Shard(name="s", size=1),))
    text = plain.to_metadata()["headway"]
    assert '"shards": [{"name": "s", "size": 1}]' in text
    assert DatasetDescription.from_metadata({"headway": text}) == plain
    own = DatasetDescription(**facts, shards=(Shard(name="s", size=1, pack_id=9),))
    assert DatasetDescription.from_metadata(own.to_metadata()) == own
    for wrong in ("-1", '"9"', "18446744073709551616", "null", "true"):
        with pytest.raises(ValueError, match="shards"):
            DatasetDescription.from_metadata({"headway": text.replace('"size": 1', f'"size": 1, "pack_id": {wrong}')})


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("schema", "shares"), {"../../x": 1_000_000}, "shares of splits"),
        (("schema", "shares"), {"train": 999_999}, "shares of splits"),
        (("schema", "classes"), [1], "a list of texts, or null"),
        (("format",), 2, "the format that this version of Headway reads"),
        (("classes",), None, "not a list of texts"),
        (("splits",), {"../../x": {"samples": 1, "fingerprint": "0" * 64}}, "a split '../../x' outside its schema"),
        (("splits",), {"train": {"samples": -1, "fingerprint": "0" * 64}}, "a number of samples"),
    ],
)
def test_a_manifest_from_anywhere_is_checked(store: Store, path: tuple[str, ...], value: Any, sentence: str) -> None:
    """The ID of a hostile manifest is as right as that of any other."""
    tree = json.loads((store.folder / "versions" / store.resolve("pets").version / "manifest.json").read_text())
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    text = json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()
    folder = store.folder / "versions" / hashlib.sha256(text).hexdigest()
    folder.mkdir()
    (folder / "manifest.json").write_bytes(text)
    assert any(sentence in one.reason for one in store.verify())
    with pytest.raises(DataError, match=re.escape(sentence)):
        read_rows(store.folder, folder.name)
