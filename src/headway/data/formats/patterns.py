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
_MAX_SHARDS = 1 << 16
"""The column of shard numbers has 16 bits."""


def expand_pattern(pattern: Path) -> tuple[Path, ...]:
    """Returns the files that a pattern expands to: those of braces in order, existing or not; those of `*?[]` sorted.

    Raises UsageError if it expands to more shards than a data set can have.
    """
    files: list[Path] = []
    for name in _expand_braces(os.fspath(pattern)):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) else [name] if name != os.fspath(pattern) else []
        # A name without magic characters counts only if braces produced it: a missing shard is reported later.
        files.extend(map(Path, matches))
        if len(files) > _MAX_SHARDS:
            raise UsageError(f"the pattern names more than {_MAX_SHARDS:,} shards", where=os.fspath(pattern))
    return tuple(files)


def _expand_braces(text: str) -> Iterator[str]:
    match = _BRACES.search(text)
    if match is None:
        yield text
        return
    prefix, suffix = text[: match.start()], text[match.end() :]
    # The rightmost braces change fastest, as in a shell.
    for choice in _list_choices(match[1]):
        yield from _expand_braces(f"{prefix}{choice}{suffix}")


def _list_choices(choices: str) -> Iterable[str]:
    match = _RANGE.fullmatch(choices)
    if match is None:
        return choices.split(",")
    first, last = match.groups()
    # Leading zeros set the width, as in a shell.
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    return (str(number).zfill(width) for number in range(int(first), int(last) + 1))


def group_shards(names: Iterable[str]) -> dict[str, list[str]]:
    """Groups names of shards by the prefix before their number: `a-0.tar`, `a-1.tar` and `b.tar` give a and b."""
    names_by_group: dict[str, list[str]] = {}
    for name in sorted(names):
        # `a-00000-of-00146.tar` belongs to `a`, like `a-0.tar`.
        stem = name.partition(".")[0].partition("-of-")[0]
        names_by_group.setdefault(stem.rstrip("0123456789").rstrip("-_") or "shards", []).append(name)
    return names_by_group
