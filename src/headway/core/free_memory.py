"""How much memory is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from headway.core.cgroups import GROUPS, MEMBERSHIP, find_cgroups


def read_free_memory_bytes(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Memory that this process may still take: the machine's, or what the limit of its control group (version 1 or 2,
    its own or that of a group above it) leaves, where that is less."""
    return max(0, min([int(psutil.virtual_memory().available), *_read_cgroup_headroom(groups, membership)]))


def _read_cgroup_headroom(groups: Path, membership: Path) -> Iterator[int]:
    """What every limit over this process leaves, in bytes."""
    for folder in find_cgroups("memory", groups, membership):
        unified = (folder / "memory.max").exists()
        names = ("memory.max", "memory.current") if unified else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        try:
            limit, used = ((folder / name).read_text().strip() for name in names)
            cached = _read_reclaimable(folder)
        except (OSError, ValueError):  # the root has no limit
            continue
        if limit != "max":
            yield int(limit) - int(used) + cached


def _read_reclaimable(folder: Path) -> int:
    """Page cache of files that a group's use counts, and that the kernel takes back when it is asked for memory."""
    words = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    return int(words.get("total_inactive_file", words.get("inactive_file", 0)))
