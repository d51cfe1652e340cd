"""What Linux counts, from trees of files like its own, and from the process that runs the test."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from headway.observe.host_load import COLUMNS, HostLoadSource, OtherLoadMeter
from headway.observe.process_tree import find_run_root, read_tree_seconds

IDLE = "cpu  0 0 0 0 0 0 0 0 0 0\n"


def stat(proc: Path, *cpus: tuple[int, int, int, int, int]) -> None:
    """/proc/stat: (user, nice, system, idle, iowait) of each CPU."""
    lines = [f"cpu{number} {' '.join(map(str, ticks))} 0 0 0 0 0" for number, ticks in enumerate(cpus)]
    (proc / "stat").write_text(IDLE + "\n".join(lines) + "\nintr 1 2 3\nctxt 5\n")


def group(folder: Path, *, quota: str | None, periods: tuple[int, int] = (0, 0), used_us: int = 0) -> None:
    """A control group of version 2."""
    folder.mkdir(parents=True, exist_ok=True)
    if quota is not None:
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    text = f"usage_usec {used_us}\nuser_usec 0\nnr_periods {periods[0]}\nnr_throttled {periods[1]}\nthrottled_usec 7\n"
    (folder / "cpu.stat").write_text(text)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    stat(tmp_path / "proc", *[(0, 0, 0, 0, 0)] * 4)
    return tmp_path / "proc"


def read(load: HostLoadSource) -> dict[str, float]:
    (row,) = load.read(1.5)
    return dict(zip(COLUMNS, row, strict=True))


@pytest.mark.parametrize(("cpus", "busy"), [((0,), 0.6), ((1,), 0.0), ((0, 1), 0.3), ((0, 3), 0.8)])
def test_the_share_of_the_usable_cpus_that_is_busy(
    proc: Path, tmp_path: Path, cpus: tuple[int, ...], busy: float
) -> None:
    """Waiting for a disk is no work of a processor."""
    load = HostLoadSource(cpus, proc=proc, groups=tmp_path / "none")
    stat(proc, (30, 20, 10, 30, 10), (0, 0, 0, 60, 40), (9, 9, 9, 9, 9), (100, 0, 0, 0, 0))
    found = read(load)
    assert found["busy"] == pytest.approx(busy)
    assert found["seconds"] == 1.5
    assert math.isnan(found["throttled"])
    assert math.isnan(read(load)["busy"])  # no tick has passed since


@pytest.mark.parametrize(
    ("inner", "outer", "throttled"), [("150000", "max", 0.3), ("150000", "400000", 0.5), ("max", None, None)]
)
def test_the_share_of_periods_in_which_a_quota_was_used_up(
    proc: Path, tmp_path: Path, inner: str, outer: str | None, throttled: float | None
) -> None:
    """Of its own group or one above, the one that is stopped more."""
    groups = tmp_path / "groups"
    group(groups / "a", quota=outer, periods=(100, 50))
    group(groups / "a/b", quota=inner, periods=(100, 50))
    load = HostLoadSource(range(8), proc=proc, groups=groups)
    group(groups / "a", quota=outer, periods=(110, 55))
    group(groups / "a/b", quota=inner, periods=(110, 53))
    found = read(load)["throttled"]
    assert math.isnan(found) if throttled is None else found == pytest.approx(throttled)


def test_under_a_quota_busy_is_of_the_quota(proc: Path, tmp_path: Path) -> None:
    """What other containers do on the same CPUs is no part of it."""
    groups = tmp_path / "groups"
    group(groups / "a/b", quota="150000", used_us=10**6)
    load = HostLoadSource(range(4), proc=proc, groups=groups)
    stat(proc, *[(100, 0, 0, 0, 0)] * 4)
    assert read(load)["busy"] == 0
    group(groups / "a/b", quota="150000", used_us=10**12)
    assert read(load)["busy"] == 1


def test_control_groups_of_version_1(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("5:memory:/x\n4:cpu,cpuacct:/docker/1\n0::/\n")
    folder = tmp_path / "groups/cpu/docker/1"
    folder.mkdir(parents=True)
    for name, text in (("cpu.cfs_quota_us", "200000"), ("cpu.cfs_period_us", "100000"), ("cpuacct.usage", "0")):
        (folder / name).write_text(f"{text}\n")
    (folder / "cpu.stat").write_text("nr_periods 0\nnr_throttled 0\nthrottled_time 0\n")
    load = HostLoadSource(range(4), proc=proc, groups=tmp_path / "groups")
    (folder / "cpu.stat").write_text("nr_periods 4\nnr_throttled 1\nthrottled_time 5\n")
    (folder / "cpuacct.usage").write_text(f"{10**15}\n")
    found = read(load)
    assert (found["busy"], found["throttled"]) == (1, 0.25)
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert math.isnan(read(HostLoadSource(range(4), proc=proc, groups=tmp_path / "groups"))["throttled"])


def test_where_nothing_is_told_nothing_is_known(tmp_path: Path) -> None:
    found = read(HostLoadSource([0], proc=tmp_path, groups=tmp_path))
    assert math.isnan(found["busy"])
    assert math.isnan(found["throttled"])


def test_this_process_works(tmp_path: Path) -> None:
    load = HostLoadSource(sorted(os.sched_getaffinity(0)))
    assert sum(number * number for number in range(10**6))
    found = read(load)
    assert 0 < found["own"] <= 1
    assert found["memory_bytes"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.5)
    path = tmp_path / "file"
    path.write_bytes(bytes(1 << 20))
    assert read(load)["read_bytes_s"] >= 0 or math.isnan(found["read_bytes_s"])
    load.close()


def process(proc: Path, pid: int, ticks: tuple[int, int, int, int], *children: int, name: str = "python") -> None:
    """/proc/PID: (user, system) time of a process and of its children that have ended."""
    folder = proc / str(pid) / "task" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    (folder.parent.parent / "stat").write_text(f"{pid} ({name}) S 1 1 1 0 -1 4 0 0 0 0 {' '.join(map(str, ticks))} 20")
    (folder / "children").write_text("".join(f"{child} " for child in children))


def test_other_programs_are_those_outside_of_the_run(
    proc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers belong to the run, and so do those that have ended; a name may look like fields."""
    hertz = os.sysconf("SC_CLK_TCK")
    process(proc, os.getpid(), (0, 0, 0, 0), 11, 99)
    process(proc, 11, (0, 0, 0, 0), 12, name="a) b (c")
    process(proc, 12, (0, 0, 0, 0))
    assert read_tree_seconds(os.getpid(), proc=proc) == 0, "process 99 has ended meanwhile"
    load = HostLoadSource(range(4), proc=proc, groups=tmp_path / "none")
    process(proc, os.getpid(), (1, 2, 3, 4), 11)
    process(proc, 11, (10, 0, 0, 0), 12, name="a) b (c")
    process(proc, 12, (0, 0, 0, 20))
    assert read_tree_seconds(os.getpid(), proc=proc) == pytest.approx(40 / hertz)
    assert read_tree_seconds(11, proc=proc) == pytest.approx(30 / hertz)
    now, seen = load._read_counters(), load._previous
    # Of four seconds of four cores all were busy, and 40 ticks of them were the run's.
    times = iter([seen._replace(at_s=0.0), now._replace(at_s=1.0, busy=seen.busy + 4, all=seen.all + 4)])
    monkeypatch.setattr(load, "_previous", next(times))
    monkeypatch.setattr(load, "_read_counters", lambda: next(times))
    assert read(load)["others"] == pytest.approx(1 - 40 / hertz / 4)


def test_ranks_of_one_launcher_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert find_run_root() == os.getppid()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find_run_root() == os.getpid()
    share = OtherLoadMeter().read_share()
    assert share is None or 0 <= share <= 1


def test_a_worker_is_part_of_the_run() -> None:
    """By the kernel's own files: a child that works adds to the time of the tree, while it runs and afterwards."""
    before = read_tree_seconds(os.getpid())
    busy = "import time\nprint(flush=True)\nwhile time.process_time() < 0.2: pass\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", busy], stdin=-1, stdout=-1, text=True) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        child.stdout.readline()
        child.stdout.readline()
        running = read_tree_seconds(os.getpid())
        assert running >= before + 0.15
        child.stdin.write("\n")
    assert read_tree_seconds(os.getpid()) >= running - 0.02
