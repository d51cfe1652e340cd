"""Mounted file systems: the longest mount point counts, and escaped characters of the kernel's table are undone."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headway.core.mounts import find_mount, is_on_network

MOUNTS = """\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
30 21 0:30 / /data rw,relatime shared:5 master:2 - nfs4 server:/export rw,vers=4.2
31 30 0:31 / /data/fast rw - xfs /dev/nvme0n1 rw,size=5
32 21 0:32 / /with\\040blank rw - tmpfs tmpfs rw,size=65536k
33 21 0:33 / /twice rw - ext3 /dev/a rw
34 33 0:34 / /twice rw - btrfs /dev/b rw
cut 1 2
- ext4
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "ext4"),
        ("/home/me", "ext4"),
        ("/data", "nfs4"),
        ("/data/set/train", "nfs4"),
        ("/database", "ext4"),
        ("/data/fast/set", "xfs"),
        ("/with blank/set", "tmpfs"),
        ("/twice/set", "btrfs"),
    ],
)
def test_the_longest_and_latest_mount_counts(path: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    found = find_mount(Path(path), tmp_path / "mountinfo")
    assert found is not None
    assert (found.kind, found.is_network) == (kind, kind == "nfs4")


def test_options_are_those_of_the_file_system(tmp_path: Path) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert find_mount(Path("/with blank"), tmp_path / "mountinfo") == (
        "/with blank",
        "tmpfs",
        "tmpfs",
        "rw,size=65536k",
    )
    assert find_mount(Path("/"), tmp_path / "gone") is None


def test_the_kernel_names_the_file_system_of_a_real_path(tmp_path: Path) -> None:
    told = subprocess.run(
        ["df", "--output=fstype,target", tmp_path], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1]
    found = find_mount(tmp_path)
    assert found is not None
    assert [found.kind, found.point] == told.split()


def test_this_folder_is_on_no_network(tmp_path: Path) -> None:
    assert is_on_network(tmp_path) is False
    assert is_on_network(Path("/proc/self/mounts")) is False
