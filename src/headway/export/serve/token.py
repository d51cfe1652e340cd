"""Token: the password of a server that other machines can reach."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import final

from headway.core.errors import UsageError
from headway.core.files import describe_os_error, open_regular
from headway.http.problems import ProblemError

MIN_CHARACTERS = 16
MAX_BYTES = 4096
_MAKE_ONE = "(umask 077; openssl rand -hex 32 > token)"


@final
class Token:
    """Compares the header Authorization with a secret, in a time that does not depend on where they differ."""

    def __init__(self, text: str) -> None:
        self._expected = b"Bearer " + text.encode()

    def check(self, authorization: bytes | None) -> None:
        """Raises ProblemError (401) if the header is missing or wrong."""
        if authorization is None or not hmac.compare_digest(authorization, self._expected):
            what = "the token is missing" if authorization is None else "the token is wrong"
            fix = "Send the header Authorization: Bearer TOKEN, with the token of the server's --token-file."
            raise ProblemError(401, what, fix, headers=[(b"www-authenticate", b"Bearer")])


def read_token(path: Path) -> Token:
    """Reads the token in a file.

    Raises:
        UsageError: the file cannot be read, others can read it, or the token is too short or not plain ASCII.
    """
    try:
        with open_regular(path) as file:
            # The descriptor, not the path: the file could be replaced between check and read.
            status = os.fstat(file.fileno())
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        what = f"the token cannot be read ({describe_os_error(error)})"
        raise UsageError(what, where=str(path), fix=f"Make one: {_MAKE_ONE}.") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        raise UsageError(f"other users may use the token (mode {mode:04o})", where=str(path), fix="chmod 600 it.")
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError("the token is another user's file", where=str(path), fix="Make a file of your own.")
    text = data.decode("ascii", "replace").strip()
    if len(data) > MAX_BYTES or len(text) < MIN_CHARACTERS or not text.isascii() or not text.isprintable():
        what = f"the token is not one line of {MIN_CHARACTERS} to {MAX_BYTES:,} ASCII characters"
        raise UsageError(what, where=str(path), fix=f"Make one: {_MAKE_ONE}.")
    return Token(text)
