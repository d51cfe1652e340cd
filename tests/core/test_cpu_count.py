from __future__ import annotations

import os
from pathlib import Path

import pytest

from headway.core.cpu_count import choose_thread_count, count_usable_cores, list_usable_cpus, read_local_ranks
from headway.data.decode import build_decoder

CPUS = len(os.sched_getaffinity(0))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight CPUs, and a folder for control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    return tmp_path


def cores(root: Path, membership: str, **files: str) -> int:
    (root / "membership").write_text(membership)
    for name, text in files.items():
        path = root / "groups" / name.replace("__", "/").replace("cpu_", "cpu.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return count_usable_cores(groups=root / "groups", membership=root / "membership")


def test_this_process_can_use_its_own_cpus() -> None:
    assert list_usable_cpus() == sorted(os.sched_getaffinity(0))
    assert 1 <= count_usable_cores() <= CPUS


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5})
    assert list_usable_cpus() == [5]
    assert count_usable_cores() == 1


def test_the_quota_of_version_2_counts(machine: Path) -> None:
    assert cores(machine, "0::/a/b\n", a__b__cpu_max="250000 100000\n") == 2
    assert cores(machine, "0::/a/b\n", a__cpu_max="150000 100000\n") == 1  # of the group above
    assert cores(machine, "0::/a/b\n", a__cpu_max="50000 100000\n") == 1  # half a core is still one thread
    assert cores(machine, "0::/a/b\n", a__cpu_max="max 100000\n", a__b__cpu_max="max 100000\n") == 8
    assert cores(machine, "0::/elsewhere\n", cpu_max="300000 100000\n") == 3  # a container's own root


def test_the_quota_of_version_1_counts(machine: Path) -> None:
    membership = "5:memory:/x\n4:cpu,cpuacct:/docker/1\n1:name=systemd:/y\n"
    period = {"cpu__docker__1__cpu_cfs_period_us": "100000\n"}
    assert cores(machine, membership, cpu__docker__1__cpu_cfs_quota_us="-1\n", **period) == 8
    assert cores(machine, membership, cpu__docker__1__cpu_cfs_quota_us="450000\n", **period) == 4


def test_machines_without_groups_have_no_quota(machine: Path) -> None:
    assert count_usable_cores(groups=machine, membership=machine / "none") == 8
    assert cores(machine, "0::/\n") == 8


def test_ranks_of_a_host_are_as_many_as_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert read_local_ranks() is None
    for text, ranks in (("8", 8), ("0", None), ("", None), ("many", None), ("-1", None)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
        assert read_local_ranks() == ranks


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training loop keeps one core of each rank's share."""
    monkeypatch.setattr("headway.core.cpu_count.count_usable_cores", lambda: 16)
    for ranks, threads in (("", 15), ("1", 15), ("2", 7), ("4", 3), ("5", 2), ("8", 1), ("16", 1), ("64", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert choose_thread_count() == threads
        found = build_decoder(backend="pillow")
        found.close()
        assert found.threads == threads
