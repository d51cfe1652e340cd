"""Free host memory, with the limits of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from headway.core.cgroups import GROUPS, MEMBERSHIP, find_cgroups


def read_free_memory_bytes(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns the memory that this process may still take, in bytes.

    It is the machine's available memory, or less if the limit of a control group above the process leaves less.
    """
    return max(0, min([int(psutil.virtual_memory().available), *_read_cgroup_headroom(groups, membership)]))


def _read_cgroup_headroom(groups: Path, membership: Path) -> Iterator[int]:
    for folder in find_cgroups("memory", groups, membership):
        unified = (folder / "memory.max").exists()
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
            cached = _read_reclaimable(folder)
        # The root group has no such files.
        except (OSError, ValueError):
            continue
        # Page cache counts as used but is given back under pressure.
        if limit != "max":
            yield int(limit) - int(used) + cached


def _read_reclaimable(folder: Path) -> int:
    """Returns the page cache that a group's usage includes and the kernel gives back under pressure."""
    words = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(words.get("total_inactive_file", words.get("inactive_file", 0)))
