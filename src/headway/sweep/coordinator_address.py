"""The address of a sweep's coordinator with a secret: `coordinator.json` in the sweep's folder, for this user alone."""

from __future__ import annotations

import json
import os
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.channel import connect
from headway.core.errors import CommunicationError, HeadwayError, UsageError
from headway.core.files import read_text
from headway.core.untrusted_json import JsonError, expect_entries, is_text, is_whole_number, parse_object

PURPOSE = "sweep"
"""Name of the service, for `Channel`."""
ANSWER_S = 5.0
"""Seconds in which a coordinator that runs accepts a connection."""

_NAME = "coordinator.json"
_ENTRIES = {
    "host": (is_text, "a text"),
    "address": (is_text, "a text"),
    "port": (lambda value: is_whole_number(value, 1, 65535), "a port"),
    "secret": (lambda value: is_text(value) and len(value) >= 32, "a secret"),
}


@final
@dataclass(frozen=True)
class CoordinatorAddress:
    """The address of a coordinator.

    Attributes:
        host: name of its machine, for messages.
        secret: a new one for each coordinator.
    """

    host: str
    address: str
    port: int
    secret: str

    def write(self, folder: Path) -> None:
        """Writes the file in place of that of an earlier coordinator."""
        path = folder / _NAME
        aside = path.with_name(f".{_NAME}.{secrets.token_hex(8)}")
        # O_EXCL: a link that another user has prepared must not get the secret.
        number = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(number, "w") as file:
            json.dump(vars(self), file)
            file.flush()
            os.fsync(number)
        os.replace(aside, path)

    def remove(self, folder: Path) -> None:
        """Removes the file, unless it is another coordinator's by now."""
        with suppress(HeadwayError, OSError):
            if read_address(folder) == self:
                (folder / _NAME).unlink(missing_ok=True)


def read_address(folder: Path) -> CoordinatorAddress | None:
    """Returns the address of the coordinator that runs this sweep, or of one that was killed; None if there is none.

    Raises:
        UsageError: others can read the file, or have written it.
        HeadwayError: it is damaged.
    """
    path = folder / _NAME
    try:
        status = path.stat()
        # Whoever writes this file tells workers what to train, which may be a program.
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            what = "this file has a secret, and is not for this user alone"
            fix = "Join a sweep as the user who runs it, on a file system with permissions."
            raise UsageError(what, where=str(path), fix=fix)
        tree = parse_object(read_text(path))
        expect_entries(tree, _ENTRIES)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, JsonError) as error:
        raise HeadwayError(f"this file cannot be read ({error})", where=str(path)) from None
    return CoordinatorAddress(**{name: tree[name] for name in _ENTRIES})


def expect_no_coordinator(folder: Path) -> None:
    """Raises UsageError if the coordinator that the file names still answers.

    Locks tell that too, but not between the machines of every network file system.
    """
    if (old := read_address(folder)) is None:
        return
    try:
        end, _ = connect(old.address, old.port, old.secret.encode(), PURPOSE, timeout_s=ANSWER_S)
    # Nobody is there, or another program, or a later coordinator of another sweep.
    except (OSError, CommunicationError):
        return
    end.close()
    what = f"another process runs this sweep on {old.host}"
    raise UsageError(what, where=str(folder), fix="Wait for it, or stop it.")
