"""URLs such as s3://bucket/photos, paths on this machine, and the cache folder."""

from __future__ import annotations

import os
import re
from pathlib import Path

from headway.core.errors import UsageError


def is_url(uri: str | os.PathLike[str]) -> bool:
    """Returns True for a URL such as s3://bucket/photos, and False for a path on this machine (also with file://)."""
    return "://" in os.fspath(uri).removeprefix("file://")


def parse_local_path(uri: str | os.PathLike[str], fix: str) -> Path:
    """Returns a path on this machine; `file://` is removed.

    Raises UsageError, with the remedy `fix`, if it is a URL such as s3://bucket/photos.
    """
    text = os.fspath(uri)
    if is_url(text):
        raise UsageError("this is an address, not a path on this machine", where=redact_url(text), fix=fix)
    return Path(text.removeprefix("file://"))


def redact_url(uri: str) -> str:
    """Returns a URL without user name, password and query, for messages.

    Nothing between `://` and the last `@` is shown, since a password may hold a `/`, `?` or `#` that is not escaped.
    """
    if not is_url(uri):
        return uri
    scheme, separator, location = uri.partition("://")
    # Signed URLs carry their signature in the query.
    shown, _, query = location.partition("?")
    if "@" in query:
        # A `?` in a password, or an `@` in the query: neither part may be shown.
        return f"{scheme}{separator}***"
    before, at, rest = shown.rpartition("@")
    # An `@` behind a slash may belong to the path, and then what is shown is not the whole address.
    hidden = "***@" if at and "/" in before else ""
    return f"{scheme.partition('?')[0]}{separator}{hidden}{rest}"


def expect_escaped(uri: str) -> None:
    """Raises UsageError if the password in a URL has a character that ends the name of the host, or a space."""
    location = uri.partition("://")[2]
    authority = re.split(r"[/?#]", location, maxsplit=1)[0]
    if " " in authority:
        what = "the user, password or host in this address has a space"
        raise UsageError(what, where=redact_url(uri), fix="Write %20 for it.")
    _, colon, port = authority.rpartition(":")
    # Others would take the beginning of the password for a port, and say so in their messages.
    if colon and "@" not in authority and "@" in location and not port.isdecimal() and not port.endswith("]"):
        what = "the password in this address has a /, ? or # that is not escaped"
        raise UsageError(what, where=redact_url(uri), fix="Write %2F for /, %3F for ? and %23 for # in it.")


def get_cache_folder() -> Path:
    """Returns $HEADWAY_CACHE, or `headway` in $XDG_CACHE_HOME, or ~/.cache/headway."""
    # After HEADWAY_CACHE, the order of the XDG base directory specification.
    if folder := os.environ.get("HEADWAY_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
