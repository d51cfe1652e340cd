"""Finds the mounted file system of a path."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, final

# File systems on which a read may take milliseconds, and another machine may cut a mapped file.
_NETWORK_FILE_SYSTEMS = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "9p"]
    + [f"fuse.{name}" for name in ("sshfs", "gcsfuse", "s3fs", "juicefs", "glusterfs", "rclone", "mountpoint-s3")]
)


@final
class Mount(NamedTuple):
    """A mounted file system: mount point, kind, source, and options."""

    point: str
    kind: str
    source: str
    options: str

    @property
    def is_network(self) -> bool:
        """True if this is a network file system."""
        return self.kind in _NETWORK_FILE_SYSTEMS


def find_mount(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> Mount | None:
    """Returns the file system of a path; None: the kernel does not say."""
    best, inside = None, f"{os.path.realpath(path)}/"
    with suppress(OSError), mounts.open(errors="surrogateescape") as lines:
        for line in lines:
            left, _, right = line.partition(" - ")
            if len(place := left.split()) < 5 or len(file_system := right.split()) < 3:
                continue
            # mountinfo writes a blank as \040.
            point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), place[4])
            if inside.startswith(f"{point.rstrip('/')}/") and (best is None or len(point) >= len(best.point)):
                best = Mount(point, *file_system[:3])
    return best


def is_on_network(path: Path) -> bool:
    """Returns True for a path on a network file system."""
    return (mount := find_mount(path)) is not None and mount.is_network
