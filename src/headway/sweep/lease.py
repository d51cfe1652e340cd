"""Leases: how long a worker on another machine may train, and the paths through which it writes.

A worker on another machine never writes a run folder that was given to another process. Three things see to it, each
for where the others end:

1. Time. A worker sends heartbeats, and the coordinator answers them. The worker's patience counts from when it *sent*
   the last heartbeat that was answered, the coordinator's from when it received one, and the worker's is shorter by a
   sixth. So the worker ends itself first, whatever the network does, unless one clock runs a sixth faster.
2. Paths. A process that was stopped (SIGSTOP, a suspended virtual machine) wakes in the middle of anything, perhaps
   between a look at the clock and a write. So each worker writes through links of its own: `leases/NAME/7/7` leads to
   `trials/7`. The coordinator renames `leases/NAME` before it gives a trial away; from then on every call with one of
   the old paths fails (ENOENT), and nothing of the old worker can come to stand in `trials`.
3. Files. An open file does not care for paths. So the coordinator then puts a copy in the place of the run folder,
   whose logs are new files: the old worker may still append, to files that have no name any more. The copy is also a
   new folder for `flock`, whose lock a stopped process would keep.

2 and 3 hold at once on a file system of one machine, and on others as far as they tell all machines of a rename: an NFS
client may follow a link that it remembers for up to a minute. There a stopped worker must in addition wake between its
look at the clock and its write. `checkpoint.folder`, which may be an object store, is protected by 1 alone.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error

BEATS_PER_LEASE = 3
"""Heartbeats that a worker sends within a lease."""
PATIENCE = 5 / 6
"""The worker's part of the coordinator's patience."""
EXPIRED_STATUS = 75
"""Exit status of a worker whose lease has ended (EX_TEMPFAIL of sysexits.h)."""

# Files that a trainer appends to; all others appear whole, by a rename.
_APPENDED = (".jsonl", ".bin", ".rows")


@final
class Lease:
    """The lease of one worker, on the coordinator's side.

    Args:
        sweep: folder of the sweep.

    Attributes:
        name: a name that no other worker ever has.
    """

    def __init__(self, sweep: Path) -> None:
        self.name = secrets.token_hex(8)
        self._sweep, self._folder = sweep, sweep / "leases" / self.name
        self._granted: dict[int, Path] = {}
        self._folder.mkdir(parents=True)

    @property
    def is_returned(self) -> bool:
        """True if no process of this lease is left, as its machine says by removing the links."""
        return not self._folder.is_dir()

    def grant(self, trial: int, run: Path) -> str:
        """Lets the worker write the run folder of a trial; returns its path for the worker, from the sweep's folder."""
        link = self._folder / str(trial)
        if trial not in self._granted:
            run.parent.mkdir(exist_ok=True)
            link.symlink_to(os.path.relpath(run.parent, self._folder))
            self._granted[trial] = run
        return str((link / run.name).relative_to(self._sweep))

    def give_back(self, trial: int) -> None:
        """Ends the grant of a trial that the worker does not hold any more."""
        if self._granted.pop(trial, None) is not None:
            (self._folder / str(trial)).unlink(missing_ok=True)

    def end(self, *, is_dead: bool) -> None:
        """Ends all grants; returns once the worker, if it still lives, cannot write to any run folder.

        Args:
            is_dead: no process of the worker is left.
        """
        if is_dead:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            _revoke(self._folder)


def expect_links(sweep: Path) -> None:
    """Raises UsageError if the file system of a sweep's folder has no symbolic links."""
    link = sweep / f".link.{secrets.token_hex(8)}"
    try:
        link.symlink_to("leases")
        link.unlink()
    except OSError as error:
        what = f"workers of other machines write through symbolic links, which fail here ({describe_os_error(error)})"
        raise UsageError(what, where=str(sweep), fix="Name a folder on another file system with --out.") from None


def return_lease(sweep: Path, name: str) -> None:
    """Says that no process of a lease is left; called on the worker's machine."""
    shutil.rmtree(sweep / "leases" / name, ignore_errors=True)


def revoke_old_leases(sweep: Path, patience_s: float, say: Callable[[str], None]) -> None:
    """Ends the leases of an earlier coordinator, whose workers may still save their trials, after a wait for them.

    Call it before any trial is given away, and with the sweep locked.
    """
    folder = sweep / "leases"
    _repair(sweep)
    until_s, told = time.monotonic() + patience_s, False
    while (left := _list_leases(folder)) and time.monotonic() < until_s:
        if not told:
            say(f"Waiting up to {patience_s:g} s for workers of this sweep that may still save their trials.")
            told = True
        time.sleep(0.1)
    for lease in left:
        _revoke(lease)
    shutil.rmtree(folder, ignore_errors=True)


def _list_leases(folder: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        return [path for path in folder.iterdir() if path.is_dir()]
    return []


def _revoke(folder: Path) -> None:
    # A name that was revoked before is found again by `revoke_old_leases` if this process is killed now.
    revoked = folder if folder.name.startswith("revoked-") else folder.with_name(f"revoked-{folder.name}")
    if revoked != folder:
        try:
            os.rename(folder, revoked)
        # Returned meanwhile: no process is left.
        except FileNotFoundError:
            return
    for link in revoked.iterdir():
        # A worker that makes missing folders may have left one of its own here.
        if link.is_symlink():
            parent = revoked / os.readlink(link)
            for run in _list_runs(parent, int(link.name)):
                replace_folder(run)
    shutil.rmtree(revoked, ignore_errors=True)


def _list_runs(parent: Path, trial: int) -> list[Path]:
    """Returns the run folder of a trial, if there is one; the winner with other seeds has numbers below 0."""
    run = parent / str(trial if trial >= 0 else -trial - 1)
    return [run] if run.is_dir() else []


def replace_folder(run: Path) -> None:
    """Puts a copy in the place of a run folder, with logs that no process has open.

    Files that appear whole are linked, not copied: nobody writes to them again.
    """
    fresh, old = run.with_name(f".{run.name}.fresh"), run.with_name(f".{run.name}.old")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    # Drafts and temporary files have names with a dot; whoever wrote them is gone.
    shutil.copytree(run, fresh, symlinks=True, ignore=shutil.ignore_patterns(".*"), copy_function=_copy)
    os.rename(run, old)
    os.rename(fresh, run)
    shutil.rmtree(old, ignore_errors=True)


def _copy(source: str, target: str) -> None:
    if not source.endswith(_APPENDED):
        with suppress(OSError):
            os.link(source, target, follow_symlinks=False)
            return
    shutil.copy2(source, target)


def _repair(sweep: Path) -> None:
    """Ends the replacements of folders that a killed coordinator had begun."""
    for parent in (sweep / "trials", sweep / "retrained"):
        for old in parent.glob(".*.old"):
            run = old.with_name(old.name[1 : -len(".old")])
            if not run.exists():
                os.rename(old.with_name(f".{run.name}.fresh"), run)
            shutil.rmtree(old, ignore_errors=True)
        for fresh in parent.glob(".*.fresh"):
            shutil.rmtree(fresh, ignore_errors=True)


@final
class LeaseHolder:
    """The worker's side of a lease: sends heartbeats, and ends this process once none was answered for too long.

    Args:
        lease_s: the coordinator's patience.
        send: sends the heartbeat of a number.
    """

    def __init__(self, lease_s: float, send: Callable[[int], None]) -> None:
        self._patience_s, self._interval_s = PATIENCE * lease_s, lease_s / BEATS_PER_LEASE
        self._send = send
        self._until_s = read_clock() + self._patience_s
        self._sent: dict[int, float] = {}
        # Two threads: a heartbeat may have to wait, if this machine's own program that passes it on is stopped.
        for run in (self._watch, self._beat):
            threading.Thread(target=run, name="headway-lease", daemon=True).start()

    def renew(self, number: int) -> None:
        """Takes the answer to a heartbeat."""
        if (sent_s := self._sent.pop(number, None)) is not None:
            self._until_s = max(self._until_s, sent_s + self._patience_s)

    def _watch(self) -> None:
        while (left_s := self._until_s - read_clock()) > 0:
            # Not longer: `sleep` does not count while the machine is suspended.
            time.sleep(min(0.5, left_s))
        # Not an exception: whatever this process does, it must not write any more.
        os.write(2, b"The coordinator has not answered for too long: this worker ends.\n")
        os._exit(EXPIRED_STATUS)

    def _beat(self) -> None:
        for number in itertools.count():
            self._sent[number] = read_clock()
            self._send(number)
            time.sleep(self._interval_s)


def read_clock() -> float:
    """Returns seconds of a clock that also counts while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
