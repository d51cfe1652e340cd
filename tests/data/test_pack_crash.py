"""Interruptions, full disks and kills: a pack is there whole or not at all."""

from __future__ import annotations

import json
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
from typing import Any

import numpy as np
import pytest
from tests.data._packs import contents, folder, picture, sources

from headway.core.errors import HeadwayError, UsageError
from headway.data import opening
from headway.data.pack import pack
from headway.data.verify import verify


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("pets") / "src", {"cat": 100, "dog": 60, "eel": 40})


# Crashes


def test_an_interrupted_pack_leaves_nothing(pets: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without it
    try:
        with pytest.raises(KeyboardInterrupt):
            pack(pets, tmp_path / "dst", progress=interrupt)
    finally:
        signal.signal(signal.SIGINT, before)
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
        assert "of about 1.53 MB were written. Free space there, or pack to another disk." in str(caught.value)
        assert sources(small_disk) == before


FORMATS: dict[str, dict[str, Any]] = {
    "recordio": {"format": "recordio", "mode": "seekable"},
    "tar": {"format": "tar", "mode": "keep"},
    "lmdb": {"format": "lmdb", "mode": "keep"},
    "raw": {"format": "raw"},
}
"""What is packed in the tests below."""


@pytest.mark.thin(1)
@pytest.mark.root
@pytest.mark.parametrize("how", FORMATS)
def test_a_disk_may_be_full_at_any_point(pets: Path, small_disk: Path, how: str) -> None:
    """Too little by a little: shards, index, columns and folders run out of space, each in its turn."""
    pack(pets, small_disk / "dst", **FORMATS[how])
    pages = [-(-path.stat().st_size // 4096) for path in (small_disk / "dst").iterdir()]
    shutil.rmtree(small_disk / "dst")
    outcomes: Counter[bool] = Counter()
    for free_bytes in 4096 * np.arange(max(pages) // 2, sum(pages) + 3):
        (small_disk / "filler").write_bytes(bytes((1 << 20) - free_bytes))
        error = ""
        try:
            pack(pets, small_disk / "dst", **FORMATS[how])
        except HeadwayError as caught:
            error = caught.what
        outcomes[not error] += 1
        if error:
            assert "the disk is full" in error
            assert [path.name for path in small_disk.iterdir()] == ["filler"]
        else:
            assert verify(small_disk / "dst").damages == []
            shutil.rmtree(small_disk / "dst")
    assert outcomes[False] > 3
    assert outcomes[True] > 0


SLOW_PACK = """
import json, sys, time
from headway.data.pack import pack

def progress(done, total):
    print(done, flush=True)
    time.sleep(0.05)

print("ready", flush=True)
pack(sys.argv[1], sys.argv[2], threads=2, shard_bytes=20_000, progress=progress, **json.loads(sys.argv[3]))
print("packed", flush=True)
"""


def kill_and_pack(pets: Path, dst: Path, how: str, kills: int) -> None:
    """Kills a pack at so many random moments, then lets one end."""
    wanted = dict(contents(pack(pets, dst.parent / "whole/dst", **FORMATS[how]).folders[0]))
    shutil.rmtree(dst.parent / "whole")
    moments = random.Random(how)
    killed = 0
    while killed < kills:
        command = [sys.executable, "-c", SLOW_PACK, str(pets), str(dst), json.dumps(FORMATS[how])]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            steps = moments.randrange(5)  # of four; after the last, the shards are closed and the columns written
            lines = [process.stdout.readline() for _ in range(1 + steps)]
            assert all(lines)
            time.sleep(moments.uniform(0, 0.07))
            process.kill()
            ended = process.stdout.read().endswith(b"packed\n")
        if ended or dst.exists():  # it is whole, or it would not be there
            assert verify(dst).damages == []
            assert contents(dst) == wanted
            shutil.rmtree(dst)
            continue
        killed += 1
        assert list(dst.parent.iterdir()) or not steps
        with pytest.raises(UsageError, match="there is no such"):
            opening.open(dst)
    assert pack(pets, dst, **FORMATS[how]).samples == 200
    assert contents(dst) == wanted
    assert list(dst.parent.iterdir()) == [dst]


def test_a_killed_pack_leaves_nothing_that_opens(pets: Path, tmp_path: Path) -> None:
    for how in FORMATS:
        kill_and_pack(pets, tmp_path / how / "dst", how, kills=1)


@pytest.mark.check
@pytest.mark.parametrize("how", FORMATS)
def test_packs_killed_at_many_moments_leave_nothing_that_opens(pets: Path, tmp_path: Path, how: str) -> None:
    kill_and_pack(pets, tmp_path / "dst", how, kills=13)


CRASHES = """
import functools, json, os, signal, sys
import headway.data.pack

source, folder, overwrite = sys.argv[1], sys.argv[2], len(sys.argv) > 4
pack = functools.partial(headway.data.pack.pack, **json.loads(sys.argv[3]))
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


@pytest.mark.parametrize(
    ("how", "overwrite"),
    [
        ("recordio", True),
        *(pytest.param(how, False, marks=pytest.mark.check) for how in ("recordio", "tar", "lmdb", "raw")),
    ],
)
def test_a_crash_between_any_two_steps_leaves_a_whole_pack_or_none(tmp_path: Path, how: str, overwrite: bool) -> None:
    """SIGKILL before each call that changes a folder or brings a file to the disk, one after the other."""
    options = FORMATS[how]
    for name, classes in {"old": {"cat": 3}, "new": {"cat": 2, "dog": 3}}.items():
        pack(folder(tmp_path / "src" / name, classes), tmp_path / "whole" / name, **options)
    old, new = (contents(tmp_path / "whole" / name) for name in ("old", "new"))
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", CRASHES, str(tmp_path / "src"), str(tmp_path / "out"), json.dumps(options)]
    run = subprocess.run([*command, *["x"] * overwrite], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    crashes = int(run.stdout)
    assert crashes > 7
    seen: Counter[str] = Counter()
    for number in range(1, crashes + 1):
        dst = tmp_path / f"out/{number}/dst"
        if not dst.exists():
            seen["none"] += 1
        else:
            assert verify(dst).damages == []
            seen["new" if contents(dst) == new else "old"] += 1
            assert contents(dst) in (new, old)
        source = tmp_path / "src/new"
        if overwrite and not dst.exists():  # killed between the two renames: the next pack finds the old one again
            with pytest.raises(UsageError, match="this exists"):
                pack(source, dst, **options)
            assert contents(dst) == old
        pack(source, dst, overwrite=dst.exists(), **options)
        assert contents(dst) == new
        assert list(dst.parent.iterdir()) == [dst]
    assert seen["new"] > 0
    assert (seen["old"] > 7, seen["none"]) == (True, 1) if overwrite else seen["none"] > 7


def test_leftovers_of_a_running_pack_are_not_touched(pets: Path, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        running = tmp_path / f".dst.packing-{process.pid}"
        running.mkdir()
        (tmp_path / ".other.packing-99999999").mkdir()
        (tmp_path / ".dst.packing-99999999").mkdir()
        pack(pets, tmp_path / "dst")
        assert {path.name for path in tmp_path.iterdir()} == {"dst", running.name, ".other.packing-99999999"}
        process.kill()
