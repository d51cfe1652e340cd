"""Shards at an address: the same versions as in a folder, whole or not there, and none deleted that is needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec import AbstractFileSystem
from tests.checkpoint._bucket import Bucket
from tests.lifecycle.store._pictures import addition, classes, draw, state
from tests.lifecycle.store.test_garbage import age

import headway
from headway.core.errors import DataError, HeadwayError, UsageError
from headway.data.tiers.choice import choose_tier
from headway.data.tiers.store import name_cached_set
from headway.lifecycle.interchange.croissant_files import write_croissant
from headway.lifecycle.mining.folds import write_subset
from headway.lifecycle.service.blobs import BlobIndex
from headway.lifecycle.service.served_store import open_store
from headway.lifecycle.store import compaction
from headway.lifecycle.store.shard_objects import stage
from headway.lifecycle.store.store import Store
from headway.storage import remote_folder, writable_folder


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder behind bucket://, which no store uses yet."""
    monkeypatch.setattr(writable_folder, "FIRST_RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(remote_folder, "MAX_PAUSE_S", 0.001)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))
    Bucket.calls.clear()
    yield tmp_path / "bucket"
    Bucket.fault = staticmethod(lambda method, path: None)


@pytest.fixture
def store(tmp_path: Path, bucket: Path) -> Store:
    store = Store.make(tmp_path / "store", shards=f"bucket://{bucket}")
    store.create("pets")
    return store


ABOUT = {"description": "pets", "license": "CC0-1.0", "creator": "anna", "url": "https://x.org"}


def there(bucket: Path) -> set[str]:
    """Digests of the shards at the address."""
    return {path.stem for path in bucket.rglob("*.rec")}


def noted(store: Store) -> set[str]:
    return {path.stem for path in store.folder.rglob("*.remote")}


def test_versions_are_those_of_a_store_in_a_folder(store: Store, bucket: Path, tmp_path: Path) -> None:
    near = Store.make(tmp_path / "near")
    near.create("pets")
    for one in (store, near):
        one.add("pets", classes(tmp_path / "images"))
        one.label("pets", {"cat/0.png": "dog"})
        one.apply("pets", [addition(tmp_path, "late.png", 77)])
        one.remove("pets", ["dog/1.png"])
    # What was just uploaded is not fetched back to be compared with other images.
    assert not [path for method, path in Bucket.calls if method == "cat_file" and path.endswith(".rec")]
    assert [one.version for one in store.log("pets")] == [one.version for one in near.log("pets")]
    assert state(store, "pets") == state(near, "pets")
    assert store.diff("pets@v1", "pets") == near.diff("pets@v1", "pets")
    assert not list(store.folder.rglob("*.rec"))
    assert there(bucket) == noted(store) == {path.stem for path in near.folder.rglob("*.rec")}
    assert store.read_image("pets", "late.png") == draw(77)
    assert store.verify() == []


@pytest.mark.parametrize("cache", ["none", "disk", "memory"])
def test_a_tier_reads_the_records(store: Store, tmp_path: Path, cache: str) -> None:
    store.add("pets", classes(tmp_path / "images"), split="train")
    with closing(headway.open(f"store:{store.folder}//pets")) as dataset:
        wanted = [
            draw(int(dataset.name(row).partition(".")[0][4:]) + 6 * (dataset.label[row] == 1)) for row in range(12)
        ]
        assert [bytes(record) for record in dataset.read(range(12))] == wanted
        with closing(choose_tier(dataset, cache)) as tier:  # type: ignore[arg-type]
            assert tier.name == cache
            if cache != "memory":
                assert [bytes(record) for record in tier.read(range(12))] == wanted


def test_equal_versions_in_other_shards_do_not_share_a_cache(store: Store, bucket: Path, tmp_path: Path) -> None:
    """The fingerprint is that of the contents; a cached record is found by its place."""
    other = Store.make(tmp_path / "other", shards=f"bucket://{bucket}-2")
    other.create("pets")
    for number in range(4):
        other.apply("pets", [addition(tmp_path, f"{number}.png", number, split="train")])
    store.apply("pets", [addition(tmp_path, f"{number}.png", number, split="train") for number in range(4)])
    assert store.resolve("pets").version == other.resolve("pets").version
    addresses = [f"store:{one.folder}//pets" for one in (store, other, store)]
    with ExitStack() as opened:
        first, second, again = (opened.enter_context(closing(headway.open(address))) for address in addresses)
        assert first.fingerprint == second.fingerprint
        assert name_cached_set(first) == name_cached_set(again) != name_cached_set(second)


def test_garbage_leaves_the_address(store: Store, bucket: Path, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"))
    store.apply("pets", [addition(tmp_path, "late.png", 77)])
    store.remove("pets", ["late.png"])
    assert len(there(bucket)) == 2
    assert store.collect_garbage(keep=1).shards == 0
    age(store, 1e6)
    would = store.collect_garbage(keep=1, dry_run=True)
    assert len(there(bucket)) == 2
    assert store.collect_garbage(keep=1) == would
    assert would.shards == 1
    assert len(there(bucket)) == 1
    assert there(bucket) == noted(store)
    assert store.verify() == []


def test_garbage_that_cannot_be_reached_goes_the_next_time(store: Store, bucket: Path, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    store.remove("pets", ["a.png"])
    age(store, 1e6)
    Bucket.fault = staticmethod(fail_at("rm_file"))
    with pytest.raises(HeadwayError, match="the shards of the store cannot be reached: the line is dead"):
        store.collect_garbage(keep=1)
    Bucket.fault = staticmethod(lambda method, path: None)
    assert len(there(bucket)) == 1
    assert not noted(store)
    store.collect_garbage()
    assert not there(bucket)
    # And it can come again.
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    assert store.verify() == []


def fail_at(wanted: str) -> Callable[[str, str], None]:
    def fault(method: str, path: str) -> None:
        if method == wanted:
            raise OSError("the line is dead")

    return fault


@pytest.mark.parametrize("method", ["makedirs", "put_file", "piece", "info"])
def test_an_upload_that_fails_changes_nothing(store: Store, bucket: Path, tmp_path: Path, method: str) -> None:
    store.add("pets", classes(tmp_path / "images"))
    before = store.resolve("pets")
    Bucket.fault = staticmethod(fail_at(method))
    with pytest.raises(HeadwayError, match="the line is dead"):
        store.apply("pets", [addition(tmp_path, "late.png", 77)])
    Bucket.fault = staticmethod(lambda method, path: None)
    assert store.resolve("pets") == before
    assert store.verify() == []
    store.collect_garbage()
    assert there(bucket) == noted(store)
    assert store.apply("pets", [addition(tmp_path, "late.png", 77)]).is_new


@pytest.mark.parametrize("method", ["piece", pytest.param("info", marks=pytest.mark.check)])
def test_a_killed_upload_leaves_nothing_that_stays(store: Store, bucket: Path, tmp_path: Path, method: str) -> None:
    """During the upload, and between it and the note."""
    store.add("pets", classes(tmp_path / "images"))
    addition(tmp_path, "late.png", 77)
    script = f"""if True:
        import os, signal
        from tests.checkpoint._bucket import Bucket
        from headway.lifecycle.store.store import Store
        from headway.lifecycle.store.records import Change
        from pathlib import Path

        def kill(method, path):
            if method == {method!r}:
                os.kill(os.getpid(), signal.SIGKILL)

        Bucket.fault = staticmethod(kill)
        Store({str(store.folder)!r}).apply(
            "pets", [Change(operation="add", name="late.png", label="cat", file=Path({str(tmp_path / "77.png")!r}))]
        )
    """
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parents[3], capture_output=True, check=False
    )
    assert done.returncode == -9, done.stderr.decode()
    assert store.verify() == []
    if method == "info":
        assert there(bucket) > noted(store)
    # Nobody can be uploading any more, so no grace is needed.
    store.collect_garbage()
    assert there(bucket) == noted(store)
    assert not list(store.folder.rglob("*.left"))
    assert store.apply("pets", [addition(tmp_path, "late.png", 77)]).is_new


@pytest.mark.parametrize("damage", ["flipped", "cut", "lost"])
def test_damage_is_found_and_mended(store: Store, bucket: Path, tmp_path: Path, damage: str) -> None:
    store.add("pets", classes(tmp_path / "images"), split="train")
    version = store.resolve("pets").version
    (shard,) = bucket.rglob("*.rec")
    whole = shard.read_bytes()
    # A byte of the last image.
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    shard.unlink() if damage == "lost" else shard.write_bytes(flipped if damage == "flipped" else whole[:-40])
    found = store.verify()
    assert any(shard.stem in one.where for one in found)
    if damage == "flipped":
        assert sum("not those of its ID" in one.reason for one in found) == 1
    names = [one.name for one in store.list_samples("pets")]

    def read_all() -> list[bytes]:
        return [store.read_image("pets", name) for name in names]

    with pytest.raises(DataError):
        read_all()
    store.remove("pets", names)
    store.add("pets", tmp_path / "images", split="train")
    assert store.resolve("pets").version == version
    assert shard.read_bytes() == whole
    assert store.verify() == []


def test_what_is_there_and_sound_is_not_written_again(store: Store, bucket: Path, tmp_path: Path) -> None:
    """A training may be reading it: object stores count a new upload as a change."""
    store.add("pets", classes(tmp_path / "images"), split="train")
    (shard,) = bucket.rglob("*.rec")
    before = shard.stat()
    assert not store.add("pets", tmp_path / "images", split="train").is_new
    assert (shard.stat().st_mtime_ns, shard.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_small_shards_are_joined_there(
    store: Store, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "MOST_SMALL_SHARDS", 3)
    for number in range(5):
        store.apply("pets", [addition(tmp_path, f"{number}.png", number)])
    assert len(store.read_rows("pets").shards) <= 3
    assert [store.read_image("pets", f"{number}.png") for number in range(5)] == [draw(number) for number in range(5)]
    assert store.verify() == []


def test_labels_change_while_the_address_cannot_be_reached(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])

    class Unreachable(AbstractFileSystem):
        def __init__(self, *args: object, **options: object) -> None:
            raise EOFError("no such host")

    fsspec.register_implementation("unreachable", Unreachable)
    facts = store.folder / "objects.json"
    with facts.open("r+") as file:
        file.write(facts.read_text().replace("bucket://", "unreachable://anna:geheim@host"))
    assert store.label("pets", {"a.png": "dog"}).is_new
    with pytest.raises(DataError, match=r"^unreachable://host/.*: the address cannot be reached \(.*no such host"):
        store.apply("pets", [addition(tmp_path, "b.png", 2)])


def test_a_shard_that_is_read_needs_room(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    (store.folder / "staging").rmdir()
    assert store.verify() == []
    (store.folder / "staging").rmdir()
    (store.folder / "staging").touch()
    with pytest.raises(HeadwayError, match=r"a shard cannot be kept while it is read .* Make room"):
        store.verify()


def test_the_data_service_reads_a_sample(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    store.remove("pets", ["a.png"])
    blob = BlobIndex(store, tmp_path / "index/removed.db", store.rows.read).find(hashlib.sha256(draw(1)).hexdigest())
    assert blob.objects.read(blob.shard, blob.offset, blob.length) == draw(1)


def test_a_version_at_an_address_is_packed_and_added_elsewhere(store: Store, tmp_path: Path) -> None:
    store.add("pets", classes(tmp_path / "images"))
    headway.pack(f"store:{store.folder}//pets", tmp_path / "packed", mode="keep")
    assert headway.verify(tmp_path / "packed").damages == []
    version = store.folder / "versions" / store.resolve("pets").version
    # Part of a version, with the shards of the whole one.
    write_subset(version / "train", np.array([1, 0]), tmp_path / "part")
    with closing(headway.open(tmp_path / "part")) as part, closing(headway.open(version / "train")) as whole:
        assert [bytes(record) for record in part.read([0, 1])] == [bytes(record) for record in whole.read([1, 0])]
    write_croissant(f"store:{store.folder}//pets", tmp_path / "croissant.json", **ABOUT)
    files = json.loads((tmp_path / "croissant.json").read_text())["distribution"]
    (shard,) = (one for one in files if one["contentUrl"].startswith("bucket://"))
    assert shard["sha256"] in shard["contentUrl"]
    near = Store.make(tmp_path / "near")
    near.create("pets")
    near.add("pets", f"store:{store.folder}//pets")
    assert state(near, "pets") == state(store, "pets")
    with pytest.raises(UsageError, match="only local ones are read here"):
        headway.verify(f"store:{store.folder}//pets")


def test_a_copy_deletes_nothing_that_the_store_needs(store: Store, bucket: Path, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1, split="train")])
    shutil.copytree(store.folder, tmp_path / "copy")
    copy = Store(tmp_path / "copy")
    assert copy.read_image("pets", "a.png") == draw(1)
    copy.remove("pets", ["a.png"])
    age(copy, 1e6)
    with pytest.raises(UsageError, match="this folder is a copy of a store"):
        copy.collect_garbage(keep=1)
    # The store would delete it one day, or never: it does not know of it.
    with pytest.raises(UsageError, match="this folder is a copy of a store"):
        copy.apply("pets", [addition(tmp_path, "b.png", 2)])
    assert len(there(bucket)) == 1
    assert store.verify() == []
    # Now the copy has the shards, and the store must leave them alone.
    assert copy.collect_garbage(keep=1, is_moved=True).shards == 1
    assert not there(bucket)
    copy.collect_garbage()
    assert copy.apply("pets", [addition(tmp_path, "b.png", 2)]).is_new
    with pytest.raises(UsageError, match="another store has taken the shards"):
        store.collect_garbage(keep=1)
    with pytest.raises(UsageError, match="another store has taken the shards"):
        store.apply("pets", [addition(tmp_path, "b.png", 2)])
    assert copy.verify() == []


def test_of_two_stores_that_are_created_at_once_one_has_the_address(bucket: Path, tmp_path: Path) -> None:
    address, stores = f"bucket://{bucket}", []

    def create_another(method: str, path: str) -> None:
        # After the first one has seen that the address is free.
        if method == "makedirs" and not stores:
            stores.append(None)
            stores[0] = Store.make(tmp_path / "second", shards=address)

    Bucket.fault = staticmethod(create_another)
    stores.append(Store.make(tmp_path / "first", shards=address))
    for one in stores:
        one.create("pets")
    # The claim of the first one was written last.
    with pytest.raises(UsageError, match="another store has taken the shards"):
        stores[0].apply("pets", [addition(tmp_path, "a.png", 1)])
    assert stores[1].apply("pets", [addition(tmp_path, "a.png", 1)]).is_new


def test_a_disk_with_the_shards_has_them_before_the_note_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store.make(tmp_path / "store", shards=str(tmp_path / "disk/cars"))
    store.create("pets")
    synced, sync = list[str](), os.fsync

    def note(handle: int) -> None:
        sync(handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    monkeypatch.setattr(os, "fsync", note)
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    (shard,) = (tmp_path / "disk").rglob("*.rec")
    folders = [str(folder) for folder in (shard.parent, shard.parent.parent, tmp_path / "disk/cars")]
    place = synced.index(str(shard))
    assert synced[place + 1 : place + 4] == folders
    assert f".{shard.stem}.remote." in synced[place + 4]
    # A disk that is not mounted is not written to.
    (tmp_path / "disk/cars").rename(tmp_path / "disk/away")
    with pytest.raises(UsageError, match=r"is missing at .* Check that the disk is mounted"):
        store.apply("pets", [addition(tmp_path, "b.png", 2)])
    assert not (tmp_path / "disk/cars").exists()


def test_garbage_leaves_what_a_long_upload_has_brought(store: Store, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    store.remove("pets", ["a.png"])
    (digest,) = noted(store)
    with stage(store.folder) as staging:
        (staging / "0").mkdir()
        (staging / f"0/{digest}.rec").touch()
        age(store, 1e6)
        assert store.collect_garbage(keep=1).shards == 0
    assert store.collect_garbage().shards == 1


def test_garbage_leaves_a_shard_that_is_compared(store: Store, bucket: Path, tmp_path: Path) -> None:
    store.apply("pets", [addition(tmp_path, "a.png", 1)])
    store.remove("pets", ["a.png"])
    age(store, 1e6)
    collected = []

    def collect(method: str, path: str) -> None:
        if method == "cat_file" and path.endswith(".rec") and not collected:
            collected.append("")
            store.collect_garbage(keep=1)

    Bucket.fault = staticmethod(collect)
    assert store.apply("pets", [addition(tmp_path, "a.png", 1)]).is_new
    assert collected
    assert store.verify() == []


def test_a_password_is_shown_to_nobody(bucket: Path, tmp_path: Path) -> None:
    store = Store.make(tmp_path / "store", shards=f"bucket://{bucket}?key=geheim")
    store.create("pets")
    assert (store.folder / "objects.json").stat().st_mode & 0o077 == 0
    Bucket.fault = staticmethod(fail_at("put_file"))
    with pytest.raises(HeadwayError) as failed:
        store.apply("pets", [addition(tmp_path, "a.png", 1)])
    assert "geheim" not in str(failed.value)
    with pytest.raises(UsageError) as refused:
        Store.make(tmp_path / "other", shards=f"bucket://{bucket}?key=geheim")
    assert "geheim" not in str(refused.value)
    # Some copies have the rights of every new file.
    shutil.copytree(store.folder, tmp_path / "copy", copy_function=shutil.copyfile)
    copy = Store(tmp_path / "copy")
    copy.collect_garbage(is_moved=True)
    assert (copy.folder / "objects.json").stat().st_mode & 0o077 == 0


def test_impossible_places_are_refused(store: Store, bucket: Path, tmp_path: Path) -> None:
    for folder, shards, sentence in (
        (tmp_path / "new", f"bucket://{bucket}/", "another store has its shards at this address"),
        (tmp_path / "new", "memory://cars", "memory of the process"),
        (tmp_path / "new", "https://x.org/cars", "cannot be written over HTTP"),
        (tmp_path / "new", "nosuch://x", "nothing installed reads nosuch://"),
        (store.folder, f"bucket://{bucket}-2", "this store has its shards at bucket://"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Store.make(folder, shards=shards)
    assert not (tmp_path / "new/store.db").exists()
    assert Store.make(store.folder, shards=f"bucket://{bucket}").folder == store.folder
    near = Store.make(tmp_path / "near")
    with pytest.raises(UsageError, match="this store has its shards in its folder"):
        Store.make(near.folder, shards=f"bucket://{bucket}-3")
    with pytest.raises(UsageError, match="--moved is for stores whose shards lie at an address"):
        near.collect_garbage(is_moved=True)
    with pytest.raises(UsageError, match="--shards is for the folder of a new store, and a service is named"):
        open_store("http://127.0.0.1:1", create=True, shards=f"bucket://{bucket}-3")
    (store.folder / "objects.json").write_text("{}")
    with pytest.raises(DataError, match="the address of the shards cannot be read"):
        store.verify()
