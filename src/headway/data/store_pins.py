"""Pins: versions of a store that runs were trained on, which its garbage collection keeps.

    STORE/pins/NAME.json    a run folder, its machine, and the IDs of its versions

A pin holds as long as its run folder is there, also by another name in the same place. Where that cannot be seen, on
another machine or because the disk of the folder is not mounted, it holds for 30 days after the run began, or was
resumed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from headway.core.errors import DataError
from headway.core.files import describe_os_error, read_text, write_atomically
from headway.core.untrusted_json import is_sha256, parse_object

LOG = logging.getLogger("headway.data")
PINS = "pins"
UNSEEN_S = 30 * 86400.0
"""Seconds for which a pin of a run folder holds that this machine cannot see."""
_MAX_BYTES = 1 << 16


@final
@dataclass(frozen=True, kw_only=True)
class Pin:
    """A run that needs versions of a store."""

    run: str
    """Path of its folder."""
    inode: int
    """Number of its folder in its file system; a renamed folder keeps it."""
    host: str
    """Name of the machine that has the folder."""
    versions: tuple[str, ...]
    """IDs."""


def write_pin(store: Path, run: Path, versions: Collection[str]) -> None:
    """Makes a store keep versions as long as a run folder is there. A store that cannot be written logs a warning."""
    inode = run.stat().st_ino if run.exists() else 0
    pin = Pin(run=str(run.resolve()), inode=inode, host=platform.node(), versions=tuple(sorted(set(versions))))
    name = hashlib.sha256(f"{pin.host}:{pin.run}".encode()).hexdigest()[:32]
    try:
        (store / PINS).mkdir(exist_ok=True)
        write_atomically(store / PINS / f"{name}.json", json.dumps(asdict(pin)))
    except OSError as error:
        reason = describe_os_error(error)
        LOG.warning(
            f"{store} cannot be told which version {run} needs ({reason}): tag it, so that no garbage collection "
            "removes it."
        )


def list_pins(store: Path) -> Iterator[tuple[Path, Pin | None]]:
    """Yields the file of each pin, and the pin; None: it does not hold any more, or is none.

    Raises DataError if a file cannot be read.
    """
    for path in sorted((store / PINS).glob("*.json")):
        pin = _read(path)
        yield path, pin if pin is not None and _holds(path, pin) else None


def _read(path: Path) -> Pin | None:
    try:
        facts = parse_object(read_text(path, _MAX_BYTES))
        pin = Pin(run=facts["run"], inode=facts["inode"], host=facts["host"], versions=tuple(facts["versions"]))
    # Another garbage collection has just removed it, or it was never written by `write_pin`.
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    except OSError as error:
        what = f"the versions that a run needs cannot be read ({describe_os_error(error)})"
        fix = "Make the file readable, or delete it if you do not need the run. Until then nothing is removed."
        raise DataError(what, where=str(path), fix=fix) from error
    is_sound = isinstance(pin.run, str) and isinstance(pin.inode, int) and isinstance(pin.host, str)
    return pin if is_sound and all(map(is_sha256, pin.versions)) else None


def _holds(path: Path, pin: Pin) -> bool:
    is_of_this_machine = pin.host == platform.node()
    try:
        # A folder that both machines have, on a network file system, counts on either.
        if stat.S_ISDIR(os.stat(pin.run).st_mode):
            return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError:
        # It may be there: this user must not look, or the disk does not answer.
        if is_of_this_machine:
            return True
    try:
        if is_of_this_machine:
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(os.path.dirname(pin.run)) as entries:
                # It was renamed, or deleted. If its disk is not mounted, the folder above is missing too.
                return any(entry.inode() == pin.inode for entry in entries)
        return time.time() - path.stat().st_mtime < UNSEEN_S
    except OSError:
        return False
