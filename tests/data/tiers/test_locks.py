"""Locks on bytes of a file, between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.data.tiers.locks import ByteLocks

BLOCK = 4096
ALL = np.arange(60)
Ids = NDArray[np.int64]


def test_a_lock_keeps_other_openings_out_and_goes_with_its_own(tmp_path: Path) -> None:
    one, two = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    assert one.try_lock(5)
    assert one.try_lock(5)
    assert not two.try_lock(5)
    assert not two.try_lock(5, shared=True)
    assert two.try_lock(6)
    one.release(5)
    assert two.try_lock(5, shared=True)
    assert one.try_lock(5, shared=True)
    assert not one.try_lock(5)  # the other one still shares it
    two.close()
    assert one.try_lock(5)
    one.close()
    one.release(5)


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys, time
from headway.data.tiers.locks import ByteLocks
locks = ByteLocks(pathlib.Path({os.fspath(tmp_path / "locks")!r}))
assert locks.try_lock(3)
print("held", flush=True)
time.sleep(60)
"""
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    mine = ByteLocks(tmp_path / "locks")
    assert not mine.try_lock(3)
    child.kill()
    child.communicate()
    assert mine.try_lock(3, timeout_s=5)
    mine.close()


def test_a_forked_child_neither_holds_nor_frees_its_parents_locks(tmp_path: Path) -> None:
    mine, other = ByteLocks(tmp_path / "locks"), ByteLocks(tmp_path / "locks")
    mine.try_lock(1)
    child = os.fork()
    if not child:
        mine.release(1)
        mine.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert not other.try_lock(1)
    mine.close()
    assert other.try_lock(1)
    other.close()
