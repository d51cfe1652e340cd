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
        for entry in entries:
            # An equal suffix must not make two names alike: `a.yaml` is not meant by `b.yaml`. Capitals do not count.
            found.setdefault(_get_stem(entry, path), entry)
    names = [name for name, entry in found.items() if is_meant(entry)]
    close = difflib.get_close_matches(_get_stem(path, path), names, n=1, cutoff=0.6)
    return f"Did you mean {str(found[close[0]])!r}?" if close else ""


def _get_stem(path: Path, asked: Path) -> str:
    return (path.stem if path.suffix == asked.suffix else path.name).lower()
