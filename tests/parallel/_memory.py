"""What a process holds of memory, and a limit for it."""

from __future__ import annotations

import re
import resource
from collections.abc import Callable
from pathlib import Path

from tests.comm._ranks import run_ranks


def read_status(name: str) -> int:
    """Bytes of an entry of this process's status, such as VmData."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10


def limit_more_memory(budget_bytes: int) -> None:
    """Lets this process take so many bytes more than it has, and no more."""
    limit = read_status("VmData") + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))


def expect_two_to_fit(train: Callable[..., int], share: float) -> None:
    """With this share of the memory that one process takes, one fails and two do not.

    Args:
        train: trains under a budget of bytes; returns the bytes that it took, -1 if there were too few.
    """
    (needed,) = run_ranks(1, train, None)
    budget = int(share * needed)
    assert run_ranks(1, train, budget) == [-1]
    assert min(run_ranks(2, train, budget)) > 0
