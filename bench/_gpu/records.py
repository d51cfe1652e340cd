"""Records of pieces, one JSON file each, and the order of the pieces that are still to run."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench._gpu.pieces import Piece

CODE = ("src/headway", "native", "bench", "tests", "recipes")
SUFFIXES = (".py", ".cpp", ".h", ".hpp", ".yaml", ".json", ".csv", ".txt")


def path_of(piece: Piece, folder: Path) -> Path:
    return folder / f"gpu-{piece.name}.json"


def code_version(root: Path) -> str:
    """Eight hexadecimal digits of all that a piece may run; results of earlier runs do not count."""
    found = hashlib.sha256()
    for room in CODE:
        for path in sorted((root / room).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and "results" not in path.parts:
                found.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:8]


def read(piece: Piece, folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of a piece in these folders. A file that is none is left out."""
    out = []
    for folder in folders:
        try:
            found = json.loads(path_of(piece, folder).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            out.append(found)
    return out


def write(piece: Piece, folder: Path, record: Mapping[str, Any]) -> Path:
    """Writes a record whole or not at all: a call that is killed meanwhile leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(piece, folder)
    aside = path.with_suffix(f".{os.getpid()}")
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    aside.replace(path)
    return path


def to_do(
    pieces: Sequence[Piece], folders: Sequence[Path], key: Mapping[str, str], *, again: bool = False
) -> list[Piece]:
    """Pieces that are not done on this device by this code: first those never tried, then those that failed."""
    new, failed = list[Piece](), list[Piece]()
    for piece in pieces:
        mine = [one for one in read(piece, folders) if all(one.get(name) == value for name, value in key.items())]
        if again or not mine:
            new.append(piece)
        elif not any(one.get("status") == "done" for one in mine):
            failed.append(piece)
    return [*new, *failed]
