"""Tokens: who may do what. Only the SHA-256 of a token is stored, so its file is of no use to a thief."""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError, suggest_nearest
from headway.core.files import is_plain_name, read_regular, sync_folder, write_atomically
from headway.core.untrusted_json import JsonError, expect_entries, is_any_number, is_sha256, parse_object
from headway.lifecycle.service.problems import refuse

SCOPES = ("read", "label", "write", "admin")
"""Rights of a token: to look, to set labels, to add and remove samples, to do everything."""
_FILE_BYTES = 1 << 20


def _are_scopes(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(scope in SCOPES for scope in value)


_CHECKS = {
    "name": (is_plain_name, "a name"),
    "sha256": (is_sha256, "a SHA-256"),
    "scopes": (_are_scopes, f"a list of {', '.join(SCOPES)}"),
    "created_s": (is_any_number, "a number"),
}


@final
@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request.

    Attributes:
        name: of the token.
        scopes: what it may do.
    """

    name: str
    scopes: tuple[str, ...]

    def expect(self, *scopes: str) -> None:
        """Raises ProblemError (403) unless one of the scopes is there. `admin` includes all others."""
        if not {*scopes, "admin"} & set(self.scopes):
            needed = " or ".join(scopes)
            what = f"the token {self.name!r} lacks the scope {needed}"
            challenge = f'Bearer error="insufficient_scope", scope="{scopes[0]}"'
            headers = [(b"www-authenticate", challenge.encode())]
            raise refuse("wrong-scope", what, "Ask for a token that has it.", headers=headers)


LOCAL = Principal("local", ("admin",))
"""A program of this machine, at a server without tokens."""


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """One token as it is stored."""

    name: str
    sha256: str
    scopes: tuple[str, ...]
    created_s: float


@final
class Tokens:
    """The tokens of a store, in a file that is read again when it changes.

    Args:
        path: of the file, which need not exist.

    Raises:
        UsageError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        self._entries: tuple[Entry, ...] = ()
        self._were_made = False
        self._refresh()

    @property
    def were_made(self) -> bool:
        """True if there are tokens or have been: whoever removes the last one does not open the server to all."""
        self._refresh()
        return self._were_made

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All tokens."""
        self._refresh()
        return self._entries

    def add(self, name: str, scopes: Iterable[str]) -> str:
        """Makes a token, and returns it; it is stored nowhere. Raises UsageError."""
        chosen = tuple(dict.fromkeys(scopes))
        if not is_plain_name(name) or len(name) > 80:
            raise UsageError(f"{name[:80]!r} is no name for a token", fix="Use up to 80 letters and digits.")
        if not chosen:
            raise UsageError("the token has no scope", fix=f"Name one or more of {', '.join(SCOPES)}.")
        for scope in chosen:
            if scope not in SCOPES:
                raise UsageError(f"{scope!r} is no scope", fix=suggest_nearest(scope, SCOPES))
        token = secrets.token_urlsafe(32)
        with self._lock():
            if any(one.name == name for one in self.entries) or name == LOCAL.name:
                raise UsageError(f"there is a token {name!r} already", fix="Choose another name, or remove it first.")
            self._write((*self._entries, Entry(name, _hash(token), chosen, time.time())))
        return token

    def remove(self, name: str) -> None:
        """Removes a token: requests with it are refused from now on. Raises UsageError if there is none."""
        with self._lock():
            kept = tuple(one for one in self.entries if one.name != name)
            if len(kept) == len(self._entries):
                known = (one.name for one in self._entries)
                raise UsageError(
                    f"there is no token {name!r}", fix=suggest_nearest(name, known) or "See headway data-token."
                )
            self._write(kept)

    def find(self, authorization: str | None) -> Principal:
        """Returns who sends a request with this header Authorization. Raises ProblemError (401)."""
        scheme, _, token = (authorization or "").partition(" ")
        found = None
        if scheme.lower() == "bearer":
            digest = _hash(token.strip())
            # All are compared, each in a time that does not depend on where they differ.
            for entry in self.entries:
                if hmac.compare_digest(entry.sha256, digest):
                    found = entry
        if found is None:
            what = "the token is wrong" if authorization else "the token is missing"
            headers = [(b"www-authenticate", b'Bearer realm="headway"')]
            raise refuse("no-token", what, "Send Authorization: Bearer TOKEN.", headers=headers)
        return Principal(found.name, found.scopes)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Keeps other processes from changing the file in the block: both would write what they have read before."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_name(f".{self._path.name}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _refresh(self) -> None:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._stamp, self._entries = None, ()
            return
        stamp = (status.st_mtime_ns, status.st_ino)
        self._were_made = True
        if stamp == self._stamp:
            return
        try:
            tree = parse_object(read_regular(self._path, _FILE_BYTES))
            expect_entries(tree, {"tokens": (lambda value: isinstance(value, list), "a list")})
            for place, row in enumerate(tree["tokens"]):
                expect_entries(row, _CHECKS, f"tokens[{place}].")
        except (OSError, JsonError) as error:
            what = f"the tokens cannot be read: {error}"
            raise UsageError(what, where=str(self._path), fix="Remove the file, and make new tokens.") from error
        self._entries = tuple(
            Entry(row["name"], row["sha256"], tuple(row["scopes"]), row["created_s"]) for row in tree["tokens"]
        )
        self._stamp = stamp

    def _write(self, entries: tuple[Entry, ...]) -> None:
        text = json.dumps({"tokens": [asdict(one) for one in entries]}, indent=1)
        write_atomically(self._path, text, mode=0o600)
        # After a power failure a token that was removed must not be back.
        sync_folder(self._path.parent)
        self._stamp, self._entries = None, ()
        self._refresh()


def _hash(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()
