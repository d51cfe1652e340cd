"""The environment of a job: a control group with a quota, a slow disk, a slow web server, a slow network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import final

from bench import _hosts
from bench._arms import ROOT
from bench._doctor.data import NotHereError, Sets
from bench._doctor.jobs import Job

GROUPS, BLOCKS = Path("/sys/fs/cgroup"), Path("/sys/dev/block")
NAME = "headway-doctor-"
PERIOD_US = 100_000
_serial = count()
ENTER = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'


@final
@dataclass(frozen=True)
class Place:
    """Where a job runs.

    Attributes:
        files: of its training set.
        train, held_out: what its recipe calls its data.
        prefix: of its command.
    """

    files: Path
    train: str
    held_out: str = ""
    prefix: Sequence[str] = field(default_factory=tuple)

    def command(self, *arguments: str | Path) -> list[str]:
        """Python with these arguments, there."""
        return [*self.prefix, sys.executable, *map(str, arguments)]


@contextmanager
def around(job: Job, sets: Sets) -> Iterator[Place]:
    """Makes what surrounds a job, for as long as the block lasts.

    Raises:
        NotHereError: it cannot be had here.
    """
    files, held_out = sets.train(job.data), sets.held_out(job.data) if job.held_out else None
    limits, train, prefix = job.limits, str(files), list[str]()
    with ExitStack() as stack:
        if limits.remote_bits_s is not None:
            train = stack.enter_context(served(files, limits.remote_bits_s / 8))
        if limits.cores is not None or limits.disk_bytes_s is not None:
            folders = stack.enter_context(group(limits.cores, limits.disk_bytes_s, files))
            prefix += ["sh", "-c", ENTER, "sh", *map(str, folders), "--"]
        if limits.link_bits_s is not None:
            prefix += stack.enter_context(linked(limits.link_bits_s))
        yield Place(files, train, str(held_out or ""), prefix)


@contextmanager
def served(folder: Path, bytes_s: float) -> Iterator[str]:
    """The address of a web server over a folder that gives so many bytes a second."""
    command = [sys.executable, "-m", "bench._doctor.server", str(folder), str(bytes_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            if not (port := process.stdout.readline().strip()):
                raise NotHereError(f"the web server ended with status {process.wait()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


@contextmanager
def linked(bits_s: float) -> Iterator[list[str]]:
    """What puts a command into a network of its own, whose loopback carries so many bits a second: what processes on
    one host tell each other goes over it."""
    if (reason := _hosts.why_not()) is not None:
        raise NotHereError(reason)
    with _hosts.Hosts(1, None) as hosts:
        command = hosts.command(0, ["tc", "qdisc", "add", "dev", "lo", "root", *_hosts.limited(bits_s)])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotHereError(f"the loopback cannot be limited: {done.stderr.strip()}")
        yield hosts.command(0, [])


@contextmanager
def group(cores: float | None, disk_bytes_s: float | None, files: Path, groups: Path = GROUPS) -> Iterator[list[Path]]:
    """Control groups, of version 1 or 2, in which processes have so much processor time and read so much.

    Args:
        files: on the disk that is meant.

    Raises:
        NotHereError: they cannot be made: not root, or the kernel lets nobody.
    """
    name, made = f"{NAME}{os.getpid()}-{next(_serial)}", list[Path]()
    try:
        try:
            _remove_leftovers(groups)
            if cores is not None:
                quota = round(cores * PERIOD_US)
                folder, version = _made(groups, "cpu", "cpu", name)
                made.append(folder)
                if version == 2:
                    (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
                else:
                    (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                    (folder / "cpu.cfs_quota_us").write_text(str(quota))
            if disk_bytes_s is not None:
                disk, rate = disk_of(files), round(disk_bytes_s)
                folder, version = _made(groups, "blkio", "io", name)
                made.append(folder)
                if version == 2:
                    (folder / "io.max").write_text(f"{disk} rbps={rate}")
                else:
                    (folder / "blkio.throttle.read_bps_device").write_text(f"{disk} {rate}")
        except OSError as error:
            reason = f"{error.filename or groups}: {error.strerror}"
            raise NotHereError(f"no control group can be made here ({reason})") from error
        yield list(dict.fromkeys(made))
    finally:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def _made(groups: Path, first: str, second: str, name: str) -> tuple[Path, int]:
    """(folder of a new group, version) for a controller, by its names in version 1 and 2."""
    if (groups / first / "cgroup.procs").exists():
        folder, version = groups / first / name, 1
    else:
        (groups / "cgroup.subtree_control").write_text(f"+{second}")
        folder, version = groups / name, 2  # one for both controllers
    folder.mkdir(exist_ok=True)
    return folder, version


def _remove_leftovers(groups: Path) -> None:
    """Of processes that are no more."""
    for folder in [*groups.glob(f"{NAME}*"), *groups.glob(f"*/{NAME}*")]:
        process = folder.name.removeprefix(NAME).partition("-")[0]
        if not Path(f"/proc/{process}").exists():
            with suppress(OSError):
                folder.rmdir()


def disk_of(path: Path, blocks: Path = BLOCKS) -> str:
    """`MAJOR:MINOR` of the whole disk on which a file lies. Raises NotHereError: it lies on none."""
    number = path.stat().st_dev
    name = f"{os.major(number)}:{os.minor(number)}"
    place = (blocks / name).resolve()
    if not place.exists():
        raise NotHereError(f"{path} lies on no disk of this machine")
    return (place.parent / "dev").read_text().strip() if (place / "partition").exists() else name
