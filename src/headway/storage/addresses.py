"""URLs such as s3://bucket/photos, paths on this machine, and the cache folder."""

from __future__ import annotations

import os
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
    """Returns a URL without user name, password and query, for messages."""
    # Signed URLs carry their signature in the query.
    url, _, _ = uri.partition("?")
    scheme, separator, location = url.partition("://")
    authority, slash, path = location.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def get_cache_folder() -> Path:
    """Returns $HEADWAY_CACHE, or `headway` in $XDG_CACHE_HOME, or ~/.cache/headway."""
    # After HEADWAY_CACHE, the order of the XDG base directory specification.
    if folder := os.environ.get("HEADWAY_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
