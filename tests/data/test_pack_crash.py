"""Interruptions, full disks and kills: a pack is there whole or not at all."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.data._packs import contents, folder, picture, sources

from headway.core.errors import HeadwayError, UsageError
from headway.data import dataset
from headway.data.pack import pack
from headway.data.verify import verify


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pets") / "src", {"cat": 100, "dog": 60, "eel": 40})


# Crashes


def test_an_interrupted_pack_leaves_nothing(pets: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        pack(pets, tmp_path / "dst", progress=interrupt)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of one megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", mount]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system can be mounted by root only")
    yield mount
    subprocess.run(["umount", mount], check=True)


@pytest.mark.root
def test_a_full_disk_leaves_what_was_there(pets: Path, small_disk: Path, tmp_path: Path) -> None:
    pack(folder(tmp_path / "old", {"cat": 3}), small_disk / "dst")
    before = sources(small_disk)
    (tmp_path / "large/noise").mkdir(parents=True)
    for number in range(30):
        (tmp_path / f"large/noise/{number}.png").write_bytes(picture(number, "PNG", (130, 130)))
    for shard_bytes in (1 << 30, 1 << 18):
        with pytest.raises(HeadwayError) as caught:
            pack(tmp_path / "large", small_disk / "dst", overwrite=True, shard_bytes=shard_bytes)
        assert str(caught.value).startswith(f"{small_disk}: the disk is full: ")
        assert "of about 1.6 MB were written. Free space there, or pack to another disk." in str(caught.value)
        assert sources(small_disk) == before


@pytest.mark.root
def test_a_disk_may_be_full_at_any_point(pets: Path, small_disk: Path) -> None:
    """Too little by a little: shards, index, columns and folders run out of space, each in its turn."""
    outcomes: Counter[bool] = Counter()
    needed_bytes = sum(map(len, sources(pets).values()))
    for free_bytes in range(needed_bytes, needed_bytes + 80_000, 4096):
        (small_disk / "filler").write_bytes(bytes((1 << 20) - free_bytes))
        error = ""
        try:
            pack(pets, small_disk / "dst")
        except HeadwayError as caught:
            error = caught.what
        outcomes[not error] += 1
        if error:
            assert "the disk is full" in error
            assert [path.name for path in small_disk.iterdir()] == ["filler"]
        else:
            assert verify(small_disk / "dst") == []
            shutil.rmtree(small_disk / "dst")
    assert outcomes[False] > 3
    assert outcomes[True] > 3


SLOW_PACK = """
import sys, time
from headway.data.pack import pack
print("ready", flush=True)
pack(sys.argv[1], sys.argv[2], threads=2, shard_bytes=20_000, progress=lambda done, total: time.sleep(0.1))
"""


def test_a_killed_pack_leaves_nothing_that_opens(pets: Path, tmp_path: Path) -> None:
    dst = tmp_path / "dst"
    moments = random.Random(0)
    left = 0
    for _ in range(6):
        command = [sys.executable, "-c", SLOW_PACK, str(pets), str(dst)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(moments.uniform(0, 0.4))
            process.kill()
        left += len(list(tmp_path.iterdir()))
        with pytest.raises(UsageError, match="there is no such folder"):
            dataset.open(dst)
    assert left > 0
    assert pack(pets, dst).samples == 200
    assert contents(dst) == sources(pets)
    assert list(tmp_path.iterdir()) == [dst]


CRASHES = """
import os, signal, sys
from headway.data.pack import pack

source, folder, overwrite = sys.argv[1], sys.argv[2], len(sys.argv) > 3
crash = -1

def count(call):
    def counted(*arguments, **options):
        global crash
        crash -= 1
        if crash == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return counted

for name in ("fsync", "rename", "mkdir", "rmdir", "unlink"):
    setattr(os, name, count(getattr(os, name)))

number = 0
while True:
    number += 1
    if overwrite:
        pack(source + "/old", f"{folder}/{number}/dst")
    child = os.fork()
    if child == 0:
        crash = number
        pack(source + "/new", f"{folder}/{number}/dst", overwrite=overwrite)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
        break
print(number)
"""


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_crash_between_any_two_steps_leaves_a_whole_pack_or_none(tmp_path: Path, overwrite: bool) -> None:
    """SIGKILL before each call that changes a folder or brings a file to the disk, one after the other."""
    old, new = folder(tmp_path / "src/old", {"cat": 3}), folder(tmp_path / "src/new", {"cat": 2, "dog": 3})
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", CRASHES, str(tmp_path / "src"), str(tmp_path / "out"), *["x"] * overwrite]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    crashes = int(run.stdout)
    assert crashes > 8
    seen: Counter[str] = Counter()
    for number in range(1, crashes + 1):
        dst = tmp_path / f"out/{number}/dst"
        if not dst.exists():
            seen["none"] += 1
        else:
            assert verify(dst) == []
            seen["new" if contents(dst) == sources(new) else "old"] += 1
            assert contents(dst) in (sources(new), sources(old))
        if overwrite and not dst.exists():  # killed between the two renames: the next pack finds the old one again
            with pytest.raises(UsageError, match="this exists"):
                pack(new, dst)
            assert contents(dst) == sources(old)
        pack(new, dst, overwrite=dst.exists())
        assert contents(dst) == sources(new)
        assert list(dst.parent.iterdir()) == [dst]
    assert seen["new"] > 0
    assert (seen["old"] > 8, seen["none"]) == (True, 1) if overwrite else seen["none"] > 8


def test_leftovers_of_a_running_pack_are_not_touched(pets: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        running = tmp_path / f".dst.packing-{process.pid}"
        running.mkdir()
        (tmp_path / ".other.packing-99999999").mkdir()
        (tmp_path / ".dst.packing-99999999").mkdir()
        pack(pets, tmp_path / "dst")
        assert {path.name for path in tmp_path.iterdir()} == {"dst", running.name, ".other.packing-99999999"}
        process.kill()
