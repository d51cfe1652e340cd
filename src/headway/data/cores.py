"""The cores that this process may use: its affinity, and the quota of its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")


def usable_cpus() -> list[int]:
    """The numbers of the CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def local_ranks() -> int | None:
    """How many ranks of this run share the host, as torchrun and `headway train --procs` say; None: nothing says it.

    mpirun and srun say it otherwise, or not, and are left out: they bind each rank to CPUs of its own, which its
    affinity shows.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


def default_threads() -> int:
    """How many threads decode unless the user says: one fewer than this rank's share of the usable cores, so that the
    training loop keeps one, and at least one."""
    return max(1, usable_cores() // (local_ranks() or 1) - 1)


def usable_cores(*, groups: Path = _GROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """How many cores this process can keep busy: its CPUs, or fewer where the quota of its control group (version 1
    or 2, its own or that of a group above it) allows fewer; at least one. A container's limit is such a quota, which
    the number of CPUs does not show."""
    quotas = [len(usable_cpus()), *(int(quota) for quota in _quotas(groups, membership))]
    return max(1, min(quotas))


def _quotas(groups: Path, membership: Path) -> Iterator[float]:
    """Every quota over this process, in cores."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, name = line.split(":", 2)
        unified = number == "0" and not controllers
        if not unified and "cpu" not in controllers.split(","):
            continue
        inner = PurePosixPath(name.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = groups / group if unified else groups / "cpu" / group
            try:
                if unified:
                    quota, period = (folder / "cpu.max").read_text().split()
                else:
                    quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                    period = (folder / "cpu.cfs_period_us").read_text()
            except (OSError, ValueError):  # the root has no quota; a container sees its own group as the root
                continue
            if quota not in ("max", "-1"):
                yield float(quota) / float(period)
