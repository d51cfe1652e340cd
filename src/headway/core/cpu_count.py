"""Usable CPU cores of this process: its affinity mask and the quota of its control group."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.cgroups import GROUPS, MEMBERSHIP, find_cgroups, read_quota_cores


def list_usable_cpus() -> list[int]:
    """Returns the numbers of the CPUs in this process's affinity mask."""
    return sorted(os.sched_getaffinity(0))


def read_local_ranks() -> int | None:
    """Returns the number of ranks on this host, as torchrun and `headway train --procs` set it, or None.

    mpirun and srun are not read: they bind each rank to its own CPUs, which the affinity mask shows.
    """
    # A malformed value is ignored here; `read_launcher_environment` refuses it with a message.
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and int(text) else None


def count_rank_cores() -> int:
    """Returns this rank's share of the host's usable cores, at least one."""
    return max(1, count_usable_cores() // (read_local_ranks() or 1))


def choose_thread_count() -> int:
    """Returns the default number of decoding threads: this rank's cores less one for the training loop."""
    return max(1, count_rank_cores() - 1)


def count_usable_cores(*, groups: Path = GROUPS, membership: Path = MEMBERSHIP) -> int:
    """Returns how many cores this process can keep busy, at least one.

    The affinity mask counts, and so does the CPU quota of every control group above the process: a container is
    limited by such a quota, which `os.cpu_count()` does not show.
    """
    # Rounded down: with 3.5 cores, a fourth thread would be throttled half of the time.
    quotas = [read_quota_cores(folder) for folder in find_cgroups("cpu", groups, membership)]
    return max(1, min([len(list_usable_cpus()), *(int(quota) for quota in quotas if quota is not None)]))
