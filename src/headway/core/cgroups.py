"""Control groups of Linux (version 1 or 2) over this process: a container's limits are theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def find_cgroups(controller: str, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> Iterator[Path]:
    """Folders of the groups with a controller that this process is in, its own first; some may not be there: a
    container sees its own group as the root."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        unified = number == "0" and not controllers
        if unified or controller in controllers.split(","):
            inner = PurePosixPath(name.lstrip("/"))
            base = groups if unified else groups / controller
            yield from (base / group for group in (inner, *inner.parents))


def read_quota_cores(folder: Path) -> float | None:
    """A group's quota of processor time, in cores; None: it has none, as the root."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else float(quota) / float(period)
    except (OSError, ValueError):
        return None
