"""Addresses such as s3://bucket/photos, paths on this machine, and the cache folder."""

from __future__ import annotations

import os
from pathlib import Path

from headway.core.errors import UsageError


def is_address(uri: str | os.PathLike[str]) -> bool:
    """Returns True for an address such as s3://bucket/photos, and False for a path on this machine."""
    return "://" in os.fspath(uri).removeprefix("file://")


def parse_local_path(uri: str | os.PathLike[str], fix: str) -> Path:
    """Returns a path on this machine; `file://` is removed.

    Raises UsageError, with the remedy `fix`, for an address such as s3://bucket/photos.
    """
    text = os.fspath(uri)
    if is_address(text):
        raise UsageError("this is an address, not a path on this machine", where=redact_address(text), fix=fix)
    return Path(text.removeprefix("file://"))


def redact_address(uri: str) -> str:
    """Returns an address as messages show it: without a password or a signed query."""
    # Signed URLs carry their signature in the query.
    address, _, _ = uri.partition("?")
    scheme, mark, rest = address.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}"


def get_cache_folder() -> Path:
    """Returns $HEADWAY_CACHE, or `headway` in $XDG_CACHE_HOME, or ~/.cache/headway."""
    if folder := os.environ.get("HEADWAY_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headway"
