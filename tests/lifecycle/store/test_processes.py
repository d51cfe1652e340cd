"""Several processes on one store: no change is lost, and one that is killed leaves the version before or the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from tests.lifecycle.store._pictures import classes, state, write

import headway
from headway.lifecycle.store.store import Store

WRITER = """
import sys
from pathlib import Path
from headway.lifecycle.store.store import Store
store, name, folder = Store(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
first, count = map(int, sys.argv[4:])
from headway.lifecycle.store.records import Change
print("ready", flush=True)
sys.stdin.readline()
for number in range(first, first + count):
    change = Change(operation="add", name=f"{number}.png", label="cat", file=folder / f"{number}.png")
    print(store.apply(name, [change]).version.number, flush=True)
"""

KILLED = """
import sys
from pathlib import Path
from headway.lifecycle.store.store import Store
store, folder = Store(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
number = 0
while True:
    store.add("pets", folder / str(number % 2), prefix=f"{number}/")
    store.remove("pets", [f"{number}/cat/0.png"])
    store.label("pets", {f"{number}/dog/0.png": "cow"})
    number += 1
    for one in store.list_samples("pets"):
        store.remove("pets", [one.name])
"""


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def begin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


@pytest.mark.check
def test_changes_of_processes_that_run_at_once_are_all_there(tmp_path: Path) -> None:
    each, count = 6, 3
    folder = write(tmp_path / "images", {f"{number}.png": number for number in range(each * count)})
    store = Store.make(tmp_path / "store")
    store.create("pets")
    writers = [start(WRITER, store.folder, "pets", folder, number * each, each) for number in range(count)]
    for writer in writers:
        begin(writer)
    numbers = []
    for writer in writers:
        out, _ = writer.communicate()
        assert writer.returncode == 0
        numbers += list(map(int, out.split()))
    assert sorted(numbers) == list(range(1, each * count + 1))
    assert set(state(store, "pets")) == {f"{number}.png" for number in range(each * count)}
    # Each version adds one to the one before.
    assert [version.counts["added"] for version in store.log("pets")] == [*[1] * (each * count), 0]
    assert store.verify() == []


def expect_whole(store: Store) -> None:
    """Every version of the history is there and whole, and the newest one opens."""
    assert store.verify() == []
    versions = store.log("pets")
    for version, parent in pairwise(versions):
        assert version.parent == parent.version
        assert store.diff(f"pets@v{parent.number}", f"pets@v{version.number}").counts == dict(version.counts)
    for split in sorted({split for _, split, _ in state(store, "pets").values()}):
        with closing(headway.open(f"store:{store.folder}//pets/{split}")) as dataset:
            assert len(dataset) > 0


@pytest.mark.check
@pytest.mark.parametrize("turn", range(3))
def test_a_killed_process_leaves_a_whole_store(tmp_path: Path, turn: int) -> None:
    for number in range(2):
        classes(tmp_path / f"images/{number}", 3, first=10 * number)
    store = Store.make(tmp_path / "store")
    store.create("pets")
    for kill in range(5):
        process = start(KILLED, store.folder, tmp_path / "images")
        begin(process)
        # Any moment will do: packing, writing columns, moving files, or in the database.
        time.sleep(0.003 + 0.017 * ((turn * 5 + kill) % 7))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        expect_whole(store)
    # What the killed ones left behind is out of sight, and goes.
    store.collect_garbage(grace_s=0)
    assert list((store.folder / "staging").iterdir()) == []
    store.add("pets", classes(tmp_path / "last", 2, first=90), prefix="last/")
    expect_whole(store)
