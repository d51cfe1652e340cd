"""The cores that this process may use: its affinity, and the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.cgroups import GROUPS, MEMBERSHIP, find_cgroups, read_quota_cores


def list_usable_cpus() -> list[int]:
    """The numbers of the CPUs that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def read_local_ranks() -> int | None:
    """How many ranks of this run share the host, as torchrun and `headway train --procs` say; None: nothing says it.

    mpirun and srun say it otherwise, or not, and are left out: they bind each rank to CPUs of its own, which its
    affinity shows.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


def count_rank_cores() -> int:
    """This rank's share of the usable cores; at least one."""
    return max(1, count_usable_cores() // (read_local_ranks() or 1))


def choose_thread_count() -> int:
    """How many threads decode unless the user says: one fewer than this rank's share of the usable cores, so that the
    training loop keeps one, and at least one."""
    return max(1, count_rank_cores() - 1)


def count_usable_cores(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """How many cores this process can keep busy: its CPUs, or fewer where the quota of its control group (version 1
    or 2, its own or that of a group above it) allows fewer; at least one. A container's limit is such a quota, which
    the number of CPUs does not show."""
    quotas = [read_quota_cores(folder) for folder in find_cgroups("cpu", groups, membership)]
    return max(1, min([len(list_usable_cpus()), *(int(quota) for quota in quotas if quota is not None)]))
