"""Checkpoints at addresses of fsspec: objects first, the manifest after them, `latest` last."""

from __future__ import annotations

import shutil
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import fsspec
import pytest
import torch
from tests._support import collect_messages, headway, packed_digits, read_newest, refused, write_recipe
from tests.checkpoint._bucket import Bucket
from tests.comm._ranks import Rank, run_ranks
from torch.distributed import PrefixStore

from headway.checkpoint.agreement import StoreExchange
from headway.checkpoint.background_saver import BackgroundSaver
from headway.checkpoint.checkpoints import Checkpoints, read
from headway.core.errors import CheckpointError, DataError, HeadwayError, UsageError
from headway.storage import writable_folder


@pytest.fixture(params=["memory", "bucket", "file"])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An address that nothing is at yet, with a space in its name."""
    if request.param == "memory":
        name = f"/{uuid.uuid4()}"
        yield f"memory://{name}/my run"
        fsspec.filesystem("memory").rm(name, recursive=True)
    else:
        yield f"{request.param}://{tmp_path}/my run"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(writable_folder, "FIRST_RETRY_PAUSE_S", 0.001)
    yield f"bucket://{tmp_path}/my run"
    Bucket.fault = staticmethod(lambda method, path: None)


def state(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(step)
    tensors = {f"model/{size}": torch.randn(size, generator=chance) for size in (10, 2000, 300, 700)}
    return tensors | {"random/torch": torch.full((5,), rank)}


def same(tensors: dict[str, torch.Tensor], step: int) -> bool:
    return tensors.keys() == state(step).keys() and all(torch.equal(tensors[n], t) for n, t in state(step).items())


def stored(uri: str) -> list[str]:
    """Every object at an address, without the tokens in the names of files."""
    files, root = fsspec.core.url_to_fs(uri)
    names = [str(path).removeprefix(root).lstrip("/") for path in files.find(root)]
    return sorted(".".join(part for part in name.split(".") if len(part) != 16) for name in names)


def whole(*steps: int, ranks: int = 1) -> list[str]:
    files = [*(f"tensors-{rank}.safetensors" for rank in range(ranks)), "manifest.json"]
    return sorted(["latest", *(f"step-{step:08d}/{name}" for step in steps for name in files)])


def test_saved_there_and_read_back(uri: str) -> None:
    checkpoints = Checkpoints(uri, keep=2)
    assert checkpoints.newest() is None
    checkpoints.expect_none()
    with closing(BackgroundSaver(checkpoints)) as saver:
        for step in (5, 10, 15):
            saver.save(step, state(step), {"position": step})
        saver.wait()
    assert stored(uri) == whole(10, 15)
    found = read_newest(Checkpoints(uri))
    assert found is not None
    assert (found.step, found.scalars, found.path.name) == (15, {"position": 15}, "step-00000015")
    assert same(found.tensors, 15)
    assert same(read(checkpoints.paths()[1]).tensors, 10)
    with pytest.raises(
        UsageError, match=r"checkpoints of another run are here already \(the newest is step-00000015\)"
    ):
        checkpoints.expect_none()


def test_a_folders_files_need_no_more_than_a_copy(tmp_path: Path, bucket: str) -> None:
    """From a disk to an address and back: the files are the same."""
    Checkpoints(tmp_path / "disk").save(5, state(5), {})
    shutil.copytree(tmp_path / "disk", bucket.removeprefix("bucket://"))
    found = read_newest(Checkpoints(bucket))
    assert found is not None
    assert same(found.tensors, 5)
    Checkpoints(bucket).save(10, state(10), {})
    shutil.copytree(bucket.removeprefix("bucket://"), tmp_path / "again")
    found = read_newest(Checkpoints(tmp_path / "again"))
    assert found is not None
    assert same(found.tensors, 10)


def test_the_same_step_again_and_an_earlier_one(uri: str) -> None:
    """What is of a later step stays, and is what opens."""
    checkpoints = Checkpoints(uri, keep=2)
    for step, content in ((5, 5), (10, 10), (10, 11), (7, 7), (8, 8), (8, 9)):
        checkpoints.save(step, state(content), {"content": content})
    assert [path.name for path in checkpoints.paths()] == ["step-00000010", "step-00000008", "step-00000007"]
    found = read_newest(checkpoints)
    assert found is not None
    assert same(found.tensors, 11)
    assert same(read(checkpoints.paths()[1]).tensors, 9)
    checkpoints.save(15, state(15), {})
    assert stored(uri) == whole(10, 15)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "gone"])
@pytest.mark.parametrize("name", ["manifest", "tensors"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(bucket: str, name: str, damage: str) -> None:
    checkpoints = Checkpoints(bucket)
    for step in (5, 10):
        checkpoints.save(step, state(step), {})
    folder = Path(bucket.removeprefix("bucket://")) / "step-00000010"
    (path,) = folder.glob(f"{name}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes({"cut": data[: len(data) // 2], "flipped": data, "empty": b"", "gone": b""}[damage])
    if damage == "gone":
        path.unlink()
    warnings: list[str] = []
    found = checkpoints.newest(warnings)
    assert found is not None
    assert found.step == 5
    if (name, damage) == ("manifest", "gone"):  # nobody can tell it from an upload that was not finished
        assert warnings == []
        return
    (warning,) = warnings
    assert warning.startswith(f"{bucket}/step-00000010: ")
    assert warning.endswith("The one before it is used.")
    shutil.rmtree(folder.with_name("step-00000005"))
    with pytest.raises(CheckpointError, match="every checkpoint is damaged"):
        checkpoints.newest([])


def failing(method: str, after: int, error: Callable[[], Exception], times: int = 10**9) -> Callable[[str, str], None]:
    """A fault at some call of a kind, and at so many more of them."""
    count = [0]

    def fault(called: str, path: str) -> None:
        if called == method:
            count[0] += 1
            if after < count[0] <= after + times:
                raise error()

    return fault


@pytest.mark.parametrize("method", ["ls", "makedirs", "put_file", "pipe_file", "piece", "rm_file"])
def test_a_network_that_fails_for_a_while_does_no_harm(bucket: str, method: str) -> None:
    checkpoints = Checkpoints(bucket, keep=1)
    checkpoints.save(5, state(5), {})
    Bucket.fault = staticmethod(failing(method, 1, lambda: TimeoutError("no answer"), times=3))
    checkpoints.save(10, state(10), {})
    assert stored(bucket) == whole(10)


@pytest.mark.parametrize("outage", [writable_folder.MAX_ATTEMPTS, 10**9])
def test_an_upload_that_fails_anywhere_leaves_nothing_that_opens(bucket: str, outage: int) -> None:
    """At every call of a save, and at every piece of an upload, for good or until it is given up; the save after it
    leaves nothing behind."""
    checkpoints = Checkpoints(bucket, keep=1)
    after, sentence, steps = 0, "", []
    while sentence is not None:
        shutil.rmtree(Path(bucket.removeprefix("bucket://")), ignore_errors=True)
        checkpoints.save(5, state(5), {})
        assert stored(bucket) == whole(5)
        count = [0]

        def fault(method: str, path: str, after: int = after, count: list[int] = count) -> None:
            count[0] += 1
            if after < count[0] <= after + outage:
                raise ConnectionError("the line is dead")

        Bucket.fault = staticmethod(fault)
        saver, sentence = BackgroundSaver(checkpoints), None
        saver.save(10, state(10), {})
        try:
            saver.wait()
        except HeadwayError as error:
            sentence = str(error)
        saver.close()
        Bucket.fault = staticmethod(lambda method, path: None)
        if sentence is not None:
            assert sentence.startswith(f"{bucket}: the checkpoints cannot be reached: the line is dead (6 attempts). ")
        found = [read(path) for path in checkpoints.paths()]
        assert [one.step for one in found] in ([5], [10, 5], [10])
        assert all(same(one.tensors, one.step) for one in found)
        steps.append(found[0].step)
        after += 1
    assert steps == sorted(steps)
    assert steps.count(5) > 20
    assert steps[-1] == 10


def test_a_store_that_cannot_be_reached_says_nothing_about_the_checkpoint(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no damage: the one before is not used for it."""
    from headway.storage import remote_folder

    checkpoints = Checkpoints(bucket)
    for step in (5, 10):
        checkpoints.save(step, state(step), {})
    Bucket.fault = staticmethod(failing("ls", 0, lambda: OSError("unreachable")))
    with pytest.raises(HeadwayError, match="the checkpoints cannot be reached: unreachable"):
        read_newest(checkpoints)
    monkeypatch.setattr(remote_folder, "MAX_PAUSE_S", 0.001)
    Bucket.fault = staticmethod(failing("cat_file", 0, lambda: OSError("unreachable")))
    with pytest.raises(DataError, match="the file cannot be read: unreachable"):
        read_newest(checkpoints)


def test_what_may_not_be_written_is_said_at_once(bucket: str) -> None:
    Bucket.fault = staticmethod(failing("put_file", 0, lambda: PermissionError("Access Denied")))
    with pytest.raises(
        HeadwayError, match=r"cannot be reached: Access Denied\. Check the address, the network and the right"
    ):
        Checkpoints(bucket).save(5, state(5), {})
    assert stored(bucket) == []


def test_a_slow_upload_holds_up_the_next_save_and_not_the_training(bucket: str) -> None:
    go_on, reached = threading.Event(), threading.Event()

    def slow(method: str, path: str) -> None:
        if method == "piece" and "tensors" in path:
            reached.set()
            assert go_on.wait(60)

    Bucket.fault = staticmethod(slow)
    checkpoints = Checkpoints(bucket)
    with closing(BackgroundSaver(checkpoints)) as saver:
        saver.save(5, state(5), {})
        assert reached.wait(60)
        assert checkpoints.paths() == []
        second = threading.Thread(target=saver.save, args=(10, state(10), {}))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        go_on.set()
        second.join()
        saver.wait()
    assert stored(bucket) == whole(5, 10)


@pytest.mark.root
def test_a_full_staging_folder_is_named(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = tmp_path / "stage"
    stage.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", stage], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    monkeypatch.setattr("tempfile.tempdir", str(stage))
    try:
        with pytest.raises(HeadwayError) as caught:
            Checkpoints(bucket).save(5, {"a": torch.ones(100_000)}, {})
        assert list(stage.iterdir()) == []
    finally:
        subprocess.run(["umount", "--lazy", stage], check=True)
    sentence = f"{stage}: the disk is full that holds a checkpoint until it is uploaded. Make room there, or set TMPDIR"
    assert sentence in str(caught.value)
    assert stored(bucket) == []


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("http://127.0.0.1:9/x", "checkpoints cannot be written over HTTP. Name a folder, or an address such as"),
        ("https://me:secret@host/x", "https://host/x: checkpoints cannot be written over HTTP."),
        ("nothing://x", "nothing installed reads nothing://"),
    ],
)
def test_addresses_that_cannot_be_written(uri: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        Checkpoints(uri)
    assert sentence in str(caught.value)
    assert "secret" not in str(caught.value)


# Runs


@pytest.mark.thin(1)
@pytest.mark.parametrize("uri", ["bucket", "file"], indirect=True)
def test_a_run_keeps_its_checkpoints_where_the_recipe_says_and_goes_on_from_there(uri: str, tmp_path: Path) -> None:
    packed_digits(tmp_path)
    changes = {"model": {"factory": "net.py:dropout"}, "epochs": 3, "checkpoint": {"every_steps": 5}}
    recipe = write_recipe(tmp_path / "recipe.yaml", **changes)
    headway("train", recipe, "--run", tmp_path / "whole", "checkpoint.asynchronous=false")
    headway("train", recipe, "--run", tmp_path / "run", f"checkpoint.folder={uri}")
    assert stored(uri) == whole(15, 18)
    assert list((tmp_path / "run/checkpoints").iterdir()) == []

    def assert_same() -> None:
        first, second = (Checkpoints(place).newest() for place in (uri, tmp_path / "whole/checkpoints"))
        assert first is not None
        assert second is not None
        assert first.step == second.step == 18
        assert all(torch.equal(first.tensors[name], value) for name, value in second.tensors.items())

    assert_same()
    sentence = refused("train", recipe, "--run", tmp_path / "other", f"checkpoint.folder={uri}", status=2)
    assert "checkpoints of another run are here already (the newest is step-00000018)" in sentence

    checkpoints = Checkpoints(uri)
    checkpoints.folder.remove(checkpoints.paths()[0])
    said = headway("train", "--resume", tmp_path / "run")
    assert "Resumed at step 15 of 18 from step-00000015." in said.err
    assert stored(uri) == whole(15, 18)
    assert_same()


def test_a_relative_folder_begins_at_the_recipe(tmp_path: Path) -> None:
    packed_digits(tmp_path)
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=0.5, checkpoint={"folder": "kept here"})
    headway("train", recipe, "--run", tmp_path / "run")
    assert [path.name for path in Checkpoints(tmp_path / "kept here").paths()] == ["step-00000003"]


# Several ranks


def saves(rank: Rank, root: str) -> list[list[str]]:
    """To a bucket that all see, and to memory that is each rank's own."""
    said: list[list[str]] = []
    for number, uri in enumerate((f"bucket://{root}/all", f"memory://{root}")):
        with collect_messages() as found, closing(BackgroundSaver(Checkpoints(uri))) as saver:
            saver.set_exchange(StoreExchange(PrefixStore(str(number), rank.store), rank.rank, rank.size))
            for step in (5, 10, 15):
                saver.save(step, state(step, rank.rank), {})
            saver.wait()
        said.append(found)
        if number == 1:
            assert stored(uri) == (whole(10, 15) if rank.rank == 0 else [])
    return said


def test_ranks_upload_their_shares(tmp_path: Path) -> None:
    said = run_ranks(3, saves, str(tmp_path))
    sentence = f"memory://{tmp_path} cannot be seen by ranks 1, 2: rank 0 writes the checkpoints alone."
    assert said == [[[], [sentence]], [[], []], [[], []]]
    assert stored(f"bucket://{tmp_path}/all") == whole(10, 15, ranks=3)
    found = read_newest(Checkpoints(f"bucket://{tmp_path}/all"))
    assert found is not None
    assert same(found.tensors, 15)


def sleeps(rank: Rank, uri: str) -> None:
    """Rank 1 of three stops in the middle of an upload, and goes on after the others have saved that step."""
    store = StoreExchange(rank.store, rank.rank, rank.size, name="test")

    def stop(method: str, path: str) -> None:
        if method == "piece" and "tensors-1" in path:
            store.publish("stopped", b"")
            store.collect("saved", [0, 2], lambda: None)

    if rank.rank == 1:
        Bucket.fault = staticmethod(stop)
    saver = BackgroundSaver(Checkpoints(uri))
    saver.set_exchange(StoreExchange(rank.store, rank.rank, rank.size))
    saver.save(5, state(5), {})
    if rank.rank == 1:
        store.collect("saved", [0, 2], lambda: None)
        saver.set_exchange(StoreExchange(PrefixStore("lost", rank.store), 0, 1))
    else:
        store.collect("stopped", [1], lambda: None)
        saver.set_exchange(StoreExchange(PrefixStore("next", rank.store), rank.rank // 2, 2))
        saver.save(5, state(5), {})
        saver.wait()
        store.publish("saved", b"")
    saver.wait()
    saver.close()


def test_whoever_slept_writes_over_nobodys_files(bucket: str) -> None:
    run_ranks(3, sleeps, bucket)
    assert len([name for name in stored(bucket) if name.endswith("/tensors-1.safetensors")]) == 2
    found = read_newest(Checkpoints(bucket))
    assert found is not None
    assert same(found.tensors, 5)
    Checkpoints(bucket, keep=1).save(10, state(10), {})
    assert stored(bucket) == whole(10)
