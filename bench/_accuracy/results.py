"""A file of finished runs, which lets a later call continue a bench."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, final

import torch

from bench._arms import ROOT
from bench._common import machine
from headway.core.run_folder import collect_provenance

FOLDER = ROOT / "bench/results"


@final
class Results:
    """One JSON object a line, of one finished run. A line that a crash has torn is left out.

    Args:
        path: of the file; it and its folder need not be there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def all(self) -> list[dict[str, Any]]:
        """Returns every run, the oldest first."""
        out = []
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(found, dict):
                out.append(found)
        return out

    def where(self, **key: Any) -> list[dict[str, Any]]:
        """Returns the runs that have all of these values."""
        return [one for one in self.all() if all(one.get(name) == value for name, value in key.items())]

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes a run, and waits until it is on the disk. Of two processes at once, neither tears the other's line."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, allow_nan=False) + "\n"
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                line = line if file.read(1) == b"\n" else "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def this_machine() -> str:
    """Describes what two runs have to share for their times to be compared."""
    found = machine()
    threads, kind = torch.get_num_threads(), torch.backends.cpu.get_cpu_capability()
    parts = [str(found["processor"]), f"{found['cores']} cores", kind, f"{threads} threads", f"torch {found['torch']}"]
    return ", ".join(parts + ([str(found["gpu"])] if found["gpu"] else []))


def commit() -> str:
    """Returns the commit of the code that runs; `-dirty` behind it where there are changes."""
    return str(collect_provenance({}, ROOT)["git"])


def made_by(commits: Iterable[str]) -> str:
    """Returns a sentence on the commits that runs were made by, and whether they are mixed."""
    found = Counter(commits).most_common()
    if not found:
        return "no runs yet"
    said = ", ".join(f"{one or 'unknown'} ({runs} runs)" for one, runs in found)
    return f"commit: {said}" if len(found) == 1 else f"mixed: runs of {len(found)} commits, {said}"


def sources(root: Path, files: Iterable[Path] | None = None) -> str:
    """Computes a digest of the files' places and contents, of eight hexadecimal digits.

    Args:
        files: within the root; unset: all that are not made by a compiler.
    """
    if files is None:
        files = (one for one in root.rglob("*") if one.is_file() and one.suffix not in (".pyc", ".so"))
    return digest(hashes(root, files))


def hashes(root: Path, files: Iterable[Path]) -> dict[str, str]:
    """Computes the SHA-256 of the contents of files within the root, by their places."""
    return {one.relative_to(root).as_posix(): hashlib.sha256(one.read_bytes()).hexdigest() for one in files}


def code(module: ModuleType) -> str:
    """Returns the code of a module without comments and docstrings, whose words change no run."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [one for one in node.body if not _is_text(one)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def digest(settings: Any) -> str:
    """Computes a digest of whatever JSON can hold, of eight hexadecimal digits."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
