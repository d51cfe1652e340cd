"""Commits of many threads and processes: each is made once, in groups, and a kill leaves the first ones or none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.lifecycle.store._pictures import addition, classes, state

from headway.core.errors import HeadwayError, UsageError
from headway.lifecycle.store import committing, publishing
from headway.lifecycle.store.commit_queue import CommitQueue
from headway.lifecycle.store.history import History
from headway.lifecycle.store.records import Change, Outcome, Rejected, StaleVersionError
from headway.lifecycle.store.store import Store
from headway.lifecycle.store.version_files import get_version_folder

CATS = 8


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store.make(tmp_path / "store")
    store.create("pets")
    store.add("pets", classes(tmp_path / "images", CATS))
    return store


def meet(store: Store, calls: Sequence[Callable[[], Outcome]]) -> list[object]:
    """Makes all calls wait for one commit, so that they become one group. Returns their outcomes or errors."""
    line = store._committer._queue._find_line("pets")
    done: list[object] = [None] * len(calls)

    def call(number: int) -> None:
        try:
            done[number] = calls[number]()
        except HeadwayError as error:
            done[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]
    with line.turn:
        for number, thread in enumerate(threads):
            thread.start()
            # In this order.
            while len(line.waiting) <= number:
                thread.join(0.001)
    for thread in threads:
        thread.join()
    return done


def label(store: Store, number: int, name: str, **options: object) -> Callable[[], Outcome]:
    return lambda: store.label("pets", {f"cat/{number}.png": name}, by=f"user-{number}", **options)


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Versions of each group that is committed."""
    counts: list[int] = []
    publish = publishing.publish_versions

    def count(*arguments: object) -> object:
        counts.append(len(arguments[2]))  # type: ignore[arg-type]
        return publish(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(committing, "publish_versions", count)
    return counts


def test_a_group_makes_a_version_for_each(store: Store, published: list[int]) -> None:
    done = meet(store, [label(store, number, "cow") for number in range(5)])
    assert published == [5]
    versions = [one.version for one in done if isinstance(one, Outcome)]
    assert [one.number for one in versions] == [2, 3, 4, 5, 6]
    assert [one.by for one in versions] == [f"user-{number}" for number in range(5)]
    assert all(one.counts["relabelled"] == 1 for one in versions)
    assert [one.parent for one in versions[1:]] == [one.version for one in versions[:-1]]
    assert store.log("pets")[:5] == versions[::-1]
    assert store.verify() == []
    # A new process reads the same.
    assert state(Store(store.folder), "pets") == state(store, "pets")


def test_an_error_of_one_is_its_own(store: Store) -> None:
    head = store.resolve("pets").version
    calls = [
        label(store, 0, "cow"),
        label(store, 99, "cow"),
        # Nothing is left to change, and the version that it expects is gone.
        label(store, 0, "cow"),
        label(store, 1, "cow", expected=head),
        label(store, 2, "cow"),
    ]
    first, missing, again, stale, last = meet(store, calls)
    assert isinstance(first, Outcome)
    assert isinstance(missing, UsageError)
    assert isinstance(again, Outcome)
    assert (again.is_new, again.version) == (False, first.version)
    assert isinstance(stale, StaleVersionError)
    assert stale.head == first.version.version
    assert isinstance(last, Outcome)
    assert last.version.parent == first.version.version
    assert [one.number for one in store.log("pets")] == [3, 2, 1, 0]


def test_a_merge_is_a_group_of_its_own(store: Store, published: list[int]) -> None:
    store.create("anna", start="pets")
    store.label("anna", {"dog/0.png": "fox", "dog/1.png": "fox"}, by="anna")
    merge: Callable[[], Outcome] = lambda: store.merge("pets", "anna", by="me")  # noqa: E731
    published.clear()
    done = meet(store, [label(store, 0, "cow"), merge, label(store, 1, "cow"), label(store, 2, "cow"), merge])
    assert all(isinstance(one, Outcome) for one in done)
    assert published == [1, 1, 2, 1]
    assert [one.merged is not None for one in store.log("pets")[:5]] == [True, False, False, True, False]
    labels = [one for one, *_ in state(store, "pets").values()]
    assert (labels.count("cow"), labels.count("fox")) == (3, 2)


def test_a_full_disk_fails_the_group_and_changes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", str(store.folder / "versions"))

    head = store.resolve("pets")
    with monkeypatch.context() as patch:
        patch.setattr(publishing, "_sync", fail)
        done = meet(store, [label(store, number, "cow") for number in range(3)])
    assert all(isinstance(one, HeadwayError) and "No space left" in str(one) for one in done)
    assert store.resolve("pets") == head
    assert list((store.folder / "staging").iterdir()) == []
    assert label(store, 0, "cow")().version.number == 2


def test_contents_that_come_back_within_a_group(store: Store) -> None:
    head = store.resolve("pets")
    done = meet(store, [label(store, 0, name) for name in ("cow", "cat", "cow", "cat")])
    versions = [one.version.version for one in done if isinstance(one, Outcome)]
    assert versions == [versions[0], head.version] * 2
    assert store.verify() == []


def test_requests_are_remembered_with_their_outcome(store: Store, tmp_path: Path) -> None:
    changes = [addition(tmp_path, "new.png", 70), addition(tmp_path, "copy.png", 0)]
    left_out = [Rejected(name="big.png", reason="is too large")]
    outcome = store.apply("pets", changes, request="r1", rejected=left_out)
    assert outcome.rejected == tuple(left_out)
    assert len(outcome.duplicates) == 1
    store.label("pets", {"cat/0.png": "cow"})
    same = store.apply("pets", [Change(operation="label", name="cat/0.png", label="cow")], request="r2")
    assert not same.is_new
    again = Store(store.folder)
    assert again.find_outcome("pets", "r1") == outcome
    assert again.find_outcome("pets", "r2") == same
    assert again.find_outcome("pets", "r3") is None
    with pytest.raises(UsageError):
        store.apply("pets", [Change(operation="label", name="none.png", label="cow")], request="r4")
    assert store.find_outcome("pets", "r4") is None


def test_a_store_without_the_table_of_requests(store: Store) -> None:
    with store.history.lock() as database:
        database.execute("DROP TABLE IF EXISTS requests")
    assert store.find_outcome("pets", "r1") is None
    store.apply("pets", [Change(operation="label", name="cat/0.png", label="cow")], request="r1")
    assert store.find_outcome("pets", "r1") is not None


def test_a_loser_keeps_the_others_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process commits whenever this one has built its version, until it is kept out."""
    other, find = Store(store.folder), History.find
    races = []

    def race(self: History, name: str, version: str = "") -> object:
        # Twice in each attempt: at its begin, and before it writes.
        if self is store.history and len(races) < 2 * committing.PATIENCE:
            races.append(name)
            if len(races) % 2 == 0:
                other.label("pets", {"dog/0.png": f"fox-{len(races)}"})
        return find(self, name, version)

    with monkeypatch.context() as patch:
        patch.setattr(History, "find", race)
        outcome = label(store, 0, "cow")()
    assert len(races) == 2 * committing.PATIENCE
    assert outcome.version.number == 2 + committing.PATIENCE
    labels = {name: label for name, (label, *_) in state(store, "pets").items()}
    assert (labels["cat/0.png"], labels["dog/0.png"]) == ("cow", f"fox-{2 * committing.PATIENCE}")
    # Nothing was written for the races that were lost.
    assert len(list((store.folder / "versions").iterdir())) == len({one.version for one in store.log("pets")})


def test_the_queue_survives_an_interrupt() -> None:
    """A thread that is interrupted while it commits leaves the others to each other."""
    entered, go = threading.Event(), threading.Event()

    def commit(_: str, proposals: Sequence[str]) -> list[str | Exception]:
        if proposals[0] == "stop":
            entered.set()
            go.wait()
            raise KeyboardInterrupt
        return [text.upper() for text in proposals[:2]]

    queue = CommitQueue[str, str](commit)
    with ThreadPoolExecutor(4) as pool:
        stopped = pool.submit(queue.submit, "a", "stop")
        entered.wait()
        others = [pool.submit(queue.submit, "a", text) for text in ("x", "y", "z")]
        while len(queue._lines["a"].waiting) < 4:
            threading.Event().wait(0.001)
        go.set()
        assert [one.result() for one in others] == ["X", "Y", "Z"]
        with pytest.raises(KeyboardInterrupt):
            stopped.result()


@pytest.mark.check
def test_threads_and_processes_at_once_lose_nothing(store: Store) -> None:
    code = """
import sys
from concurrent.futures import ThreadPoolExecutor
from headway.lifecycle.store.store import Store
store, first = Store(sys.argv[1]), int(sys.argv[2])
def work(number):
    return [store.label("pets", {f"cat/{number}.png": f"new-{turn}"}, by=f"user-{number}") for turn in range(8)]
with ThreadPoolExecutor(4) as pool:
    done = [one for some in pool.map(work, range(first, first + 4)) for one in some]
assert all(one.version.counts["relabelled"] == 1 for one in done)
"""
    command = [sys.executable, "-c", code, str(store.folder)]
    running = [subprocess.Popen([*command, str(first)]) for first in (0, 4)]
    assert [one.wait() for one in running] == [0, 0]
    log = store.log("pets")
    assert len(log) == 2 + 8 * CATS
    assert all(one.counts["relabelled"] == 1 for one in log[:-2])
    setters = store.count_setters("pets")
    assert {name: setters[name] for name in setters if name.startswith("user-")} == {
        f"user-{number}": 1 for number in range(CATS)
    }
    assert {label for name, (label, *_) in state(store, "pets").items() if "cat" in name} == {"new-7"}
    assert store.verify() == []


KILLED = """
import os, signal, sys, threading
from headway.lifecycle.store import committing, publishing
from headway.lifecycle.store.history import History
from headway.lifecycle.store.store import Store

store, place, after = Store(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def kill_at(owner, name):
    old, left = getattr(owner, name), [after]
    def dying(*arguments, **options):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return old(*arguments, **options)
    setattr(owner, name, dying)

owner, name = place.split(".")
kill_at({"publishing": publishing, "history": History, "committing": committing}[owner], name)
line = store._committer._queue._find_line("pets")
threads = [threading.Thread(target=store.label, args=("pets", {f"cat/{n}.png": "cow"})) for n in range(4)]
with line.turn:
    for number, thread in enumerate(threads):
        thread.start()
        while len(line.waiting) <= number:
            thread.join(0.001)
for thread in threads:
    thread.join()
"""


@pytest.mark.check
@pytest.mark.parametrize(
    ("place", "after"),
    [
        ("publishing._sync", 0),
        ("publishing._sync", 2),
        ("publishing._put", 0),
        ("publishing._put", 2),
        ("publishing.sync_folder", 0),
        ("history.commit", 0),
        ("committing.expect_files", 2),
    ],
)
def test_a_kill_within_a_group_leaves_a_whole_store(store: Store, place: str, after: int) -> None:
    before = store.resolve("pets")
    done = subprocess.run([sys.executable, "-c", KILLED, str(store.folder), place, str(after)], check=False)
    assert done.returncode == -9
    # All of it becomes visible in one step.
    assert store.resolve("pets") == before
    assert store.verify() == []
    # The versions that nothing leads to are found and used again.
    assert label(store, 0, "cow")().version.number == before.number + 1
    store.collect_garbage(grace_s=0)
    assert list((store.folder / "staging").iterdir()) == []
    assert store.verify() == []


def test_adding_again_mends_a_version_whose_shard_is_lost(store: Store, tmp_path: Path) -> None:
    version = store.resolve("pets").version
    for shard in (store.folder / "objects").rglob("*.rec"):
        shard.unlink()
    assert store.verify() != []
    names = [one.name for one in store.list_samples("pets")]
    store.remove("pets", names)
    # In two parts, so that the shards have other names.
    for number, kind in enumerate(("cat", "dog")):
        source = tmp_path / f"part-{number}"
        source.mkdir()
        (source / kind).symlink_to(tmp_path / "images" / kind)
        outcome = store.add("pets", source)
    assert outcome.version.version == version
    assert store.read_image("pets", "cat/0.png") == (tmp_path / "images/cat/0.png").read_bytes()
    assert store.verify() == []


def test_adding_again_mends_a_damaged_shard(store: Store, tmp_path: Path) -> None:
    (shard,) = (store.folder / "objects").rglob("*.rec")
    data = shard.read_bytes()
    shard.chmod(0o600)
    shard.write_bytes(b"x" * len(data))
    assert store.verify() != []
    store.add("pets", tmp_path / "images")
    assert shard.read_bytes() == data
    assert store.verify() == []


def test_what_was_read_is_kept_and_never_stale(store: Store) -> None:
    rows = store.read_rows("pets")
    assert store.read_rows("pets") is rows
    version = store.resolve("pets").version
    folder = get_version_folder(store.folder, version)
    folder.rename(folder.with_name("aside"))
    with pytest.raises(HeadwayError, match="not there"):
        store.read_rows("pets")
