"""Linux control groups (version 1 or 2) of this process: the limits of a container are theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def find_cgroups(controller: str, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Yields the folders of this process's groups that have a controller, its own first, then their parents.

    A folder may not exist: a container sees its own group as the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        # Version 2 has one line, "0::/path"; version 1 has one per hierarchy, "4:cpu,cpuacct:/path".
        number, controllers, name = line.split(":", 2)
        unified = number == "0" and not controllers
        if unified or controller in controllers.split(","):
            inner = PurePosixPath(name.lstrip("/"))
            base = groups if unified else groups / controller
            yield from (base / group for group in (inner, *inner.parents))


def read_quota_cores(folder: Path) -> float | None:
    """Returns a group's CPU quota in cores, or None without a quota, as in the root group."""
    # Version 2 writes "max 100000" or "50000 100000", version 1 two files with -1 for no quota.
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError):
        return None
