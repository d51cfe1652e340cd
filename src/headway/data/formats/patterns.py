"""Patterns of shards, such as `train-{000..146}.tar`, `{a,b}.rec` and `*.tar`; and groups of shards in a folder."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from headway.core.errors import UsageError

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_LIMIT = 1 << 16
"""A shard's number is a 16-bit column."""


def expand_pattern(pattern: Path) -> tuple[Path, ...]:
    """Returns the files that a pattern names: those of braces in order, existing or not; those of `*?[]` sorted.

    Raises UsageError if braces name more shards than a data set can have.
    """
    files: list[Path] = []
    for name in _expand_braces(os.fspath(pattern)):
        paths = sorted(glob.glob(name)) if glob.has_magic(name) else [name] if name != os.fspath(pattern) else []
        # A name without magic characters counts only if braces produced it: a missing shard is reported later.
        files.extend(map(Path, paths))
        if len(files) > _LIMIT:
            raise UsageError(f"the pattern names more than {_LIMIT:,} shards", where=os.fspath(pattern))
    return tuple(files)


def _expand_braces(text: str) -> Iterator[str]:
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    before, after = text[: match.start()], text[match.end() :]
    for choice in _list_choices(match[1]):
        yield from _expand_braces(f"{before}{choice}{after}")


def _list_choices(inside: str) -> Iterable[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",")
    low, high = match.groups()
    # Leading zeros set the width, as in a shell.
    width = max(len(low), len(high)) if low.startswith("0") or high.startswith("0") else 0
    return (str(number).zfill(width) for number in range(int(low), int(high) + 1))


def group_shards(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names of shards by the part before their number: `a-0.tar`, `a-1.tar` and `b.tar` give a and b."""
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        stem = name.partition(".")[0].partition("-of-")[0]
        groups.setdefault(stem.rstrip("0123456789").rstrip("-_") or "shards", []).append(name)
    return groups
