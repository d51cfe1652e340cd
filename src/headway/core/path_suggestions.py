"""Suggestions for a path that is not there: a neighbour with nearly that name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path


def suggest_path(path: Path, is_meant: Callable[[Path], bool], *, folders: Iterable[Path] = ()) -> str:
    """Returns "Did you mean 'photos.yaml'?" for the entry beside a path whose name is closest; empty if none is close.

    Args:
        is_meant: tells whether an entry is of the kind that the user needs.
        folders: other folders in which it may lie.
    """
    found: dict[str, Path] = {}
    for folder in (path.parent, *folders):
        try:
            entries = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        except OSError:
            continue
        for entry in filter(is_meant, entries):
            # An equal suffix must not make two names alike: `a.yaml` is not meant by `b.yaml`. Capitals do not count.
            name = _get_stem(entry, path)
            # Of `photos` and `photos.yaml` in one folder, the one with the suffix that was asked for is meant.
            if name not in found or (entry.suffix == path.suffix and found[name].suffix != path.suffix):
                found[name] = entry
    close = difflib.get_close_matches(_get_stem(path, path), found, n=1, cutoff=0.6)
    return f"Did you mean {str(found[close[0]])!r}?" if close else ""


def _get_stem(path: Path, asked: Path) -> str:
    return (path.stem if path.suffix == asked.suffix else path.name).lower()
