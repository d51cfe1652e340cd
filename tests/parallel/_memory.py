"""What a process holds of memory, and a limit for it."""

from __future__ import annotations

import re
import resource
from pathlib import Path


def read_status(name: str) -> int:
    """Bytes of an entry of this process's status, such as VmData."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    assert found is not None
    return int(found[1]) << 10


def limit_more_memory(budget_bytes: int) -> None:
    """Lets this process take so many bytes more than it has, and no more."""
    limit = read_status("VmData") + budget_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
