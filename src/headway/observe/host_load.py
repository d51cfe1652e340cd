"""Load of this process and its host: processor, memory and disk reads, from Linux counters."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, final

import psutil

from headway.core.cgroups import GROUPS, find_cgroups, read_quota_cores
from headway.core.cpu_count import list_usable_cpus
from headway.observe.load_sampler import LoadRow, LoadSource
from headway.observe.process_tree import find_run_root, read_tree_seconds

SOURCE_KIND = "host"
# busy: share of the usable cores in use by all processes. own: the same of this process. memory_bytes: resident memory
# of this process. throttled: share of scheduler periods in which the quota ran out. read_bytes_s: read from disk by
# this process. others: share of the usable cores in use by programs that do not belong to this run.
COLUMNS = ("seconds", "busy", "own", "memory_bytes", "throttled", "read_bytes_s", "others")

PROC = Path("/proc")


@final
class HostLoadSource(LoadSource):
    """Reads the load of the host of this process.

    If a control group allows fewer cores than there are CPUs, `busy` is the share of its quota that the group used, so
    other containers on the same CPUs do not count. Otherwise it is the use of these CPUs by all processes.

    Args:
        cpus: Numbers of the CPUs that this process may run on.
    """

    def __init__(self, cpus: Sequence[int], *, proc: Path = PROC, groups: Path = GROUPS) -> None:
        self._cpus = frozenset(f"cpu{number}" for number in cpus)
        # Quotas are inherited: every group above this process can have one, and the smallest holds.
        groups_above = (
            (folder, read_quota_cores(folder)) for folder in find_cgroups("cpu", groups, proc / "self/cgroup")
        )
        self._proc = proc
        self._groups = [_QuotaGroup(folder, cores) for folder, cores in groups_above if cores is not None]
        quotas = [(group.cores, group.folder) for group in self._groups if group.cores < len(cpus)]
        self._quota = min(quotas, default=None)
        self._cores = self._quota[0] if self._quota else float(len(cpus))
        self._process = psutil.Process()
        self._root = find_run_root()
        self._previous = self._read_counters()

    @property
    def kind(self) -> str:
        return SOURCE_KIND

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS

    def read(self, now_s: float) -> list[LoadRow]:
        previous, current = self._previous, self._read_counters()
        self._previous = current
        elapsed_s = max(current.at_s - previous.at_s, 1e-9)
        busy_share = _divide(current.busy - previous.busy, current.all - previous.all)
        own_share = (current.own_s - previous.own_s) / (elapsed_s * self._cores)
        throttled_shares = [
            _divide(current_periods[1] - previous_periods[1], current_periods[0] - previous_periods[0])
            for current_periods, previous_periods in zip(current.periods, previous.periods, strict=True)
        ]
        # The group that was throttled most often decides.
        throttled_share = max((share for share in throttled_shares if not math.isnan(share)), default=math.nan)
        read_bytes_s = (current.read_bytes - previous.read_bytes) / elapsed_s
        tree_share = (current.tree_s - previous.tree_s) / (elapsed_s * self._cores)
        # Counters are not read at the same moment, so a share can be slightly outside of 0 and 1.
        row = (
            now_s,
            min(busy_share, 1.0),
            min(own_share, 1.0),
            self._read_memory_bytes(),
            throttled_share,
            read_bytes_s,
            math.nan if math.isnan(busy_share) else min(max(busy_share - tree_share, 0.0), 1.0),
        )
        return [row]

    def close(self) -> None:
        pass

    def _read_counters(self) -> _HostCounters:
        at_s = time.perf_counter()
        if self._quota is None:
            busy, all_s = _read_ticks(self._proc / "stat", self._cpus)
        else:
            cores, folder = self._quota
            busy = _read_cpu_seconds(folder)
            all_s = at_s * cores
        periods = [_read_periods(group.folder) for group in self._groups]
        tree_s = read_tree_seconds(self._root, proc=self._proc)
        return _HostCounters(at_s, busy, all_s, time.process_time(), periods, self._read_disk_bytes(), tree_s)

    def _read_memory_bytes(self) -> float:
        try:
            return float(self._process.memory_info().rss)
        except psutil.Error:
            return math.nan

    def _read_disk_bytes(self) -> float:
        try:
            return float(self._process.io_counters().read_bytes)
        # Some kernels and sandboxes do not have this counter.
        except (psutil.Error, AttributeError, NotImplementedError, OSError, RuntimeError):
            return math.nan


@final
class OtherLoadMeter:
    """Measures how much of the usable cores other programs take, from its construction on."""

    def __init__(self) -> None:
        self._source = HostLoadSource(list_usable_cpus())

    def read_share(self) -> float | None:
        """Returns their share of the usable cores since the last call; None if it is unknown."""
        ((*_, share),) = self._source.read(0.0)
        return None if math.isnan(share) else share


@final
class _HostCounters(NamedTuple):
    """Counters at one moment; they only grow.

    Attributes:
        at_s: Time of the reading.
        busy: CPU time in use, in ticks or seconds.
        all: CPU time available, in the same unit.
        own_s: CPU seconds of this process.
        periods: (all, throttled) scheduler periods of each control group with a quota.
        read_bytes: Bytes that this process read from disk.
        tree_s: CPU seconds of all processes of this run.
    """

    at_s: float
    busy: float
    all: float
    own_s: float
    periods: list[tuple[float, float]]
    read_bytes: float
    tree_s: float


@final
class _QuotaGroup(NamedTuple):
    """A control group above this process that has a quota.

    Attributes:
        folder: Folder of its counters.
        cores: Quota in cores.
    """

    folder: Path
    cores: float


def _read_ticks(path: Path, cpus: frozenset[str]) -> tuple[float, float]:
    """Returns (busy, all) ticks of these CPUs since boot; NaN if they are unknown."""
    busy = total = 0.0
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return math.nan, math.nan
    for line in lines[1:]:
        name, *fields = line.split()
        if not name.startswith("cpu"):
            break
        if name in cpus:
            # user, nice, system, idle, iowait, irq, softirq, steal; user includes guests already.
            ticks = [int(field) for field in fields[:8]]
            total += sum(ticks)
            busy += sum(ticks) - sum(ticks[3:5])
    return busy, total


def _read_cpu_seconds(folder: Path) -> float:
    """Returns the CPU seconds that a control group has used; NaN if they are unknown."""
    used_us = _read_stat(folder).get("usage_usec")
    if used_us is not None:
        return used_us / 1e6
    try:
        # Version 1 of control groups, if its cpu and cpuacct controllers share a folder.
        return int((folder / "cpuacct.usage").read_text()) / 1e9
    except (OSError, ValueError):
        return math.nan


def _read_periods(folder: Path) -> tuple[float, float]:
    """Returns (all, throttled) scheduler periods of a control group; NaN if they are unknown."""
    stat = _read_stat(folder)
    return stat.get("nr_periods", math.nan), stat.get("nr_throttled", math.nan)


def _read_stat(folder: Path) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in map(str.split, (folder / "cpu.stat").read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else math.nan
