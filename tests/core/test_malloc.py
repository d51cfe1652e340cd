"""Freed memory stays with the process: what is asked for again has its pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import numpy as np
from headway.core.malloc import keep_freed_memory

kept = keep_freed_memory()

def faults():
    blocks = [np.ones(n, np.uint8) for n in (40_000_000, 3_000_000, 70_000_000)]  # one alone would be the heap's end
    del blocks
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [np.ones(n, np.uint8) for n in (40_000_000, 3_000_000, 70_000_000)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

found = [faults()]
thread = threading.Thread(target=lambda: found.append(faults()))  # it has a heap of its own, too small for these
thread.start()
thread.join()
print(int(kept), *found)
"""


def faults(**environment: str) -> tuple[bool, list[int]]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    kept, *found = map(int, done.stdout.split())
    return bool(kept), found


@pytest.mark.fresh
def test_memory_that_is_asked_for_again_has_its_pages() -> None:
    left, before = faults(HEADWAY_HEAP="system")
    assert not left
    kept, after = faults()
    if not kept:
        pytest.skip("this C library has no mallopt")
    assert before[0] > 10 * after[0]
    assert before[1] > after[1]
    assert after[0] < 200
