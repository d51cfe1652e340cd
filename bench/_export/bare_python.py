"""A Python with numpy, ONNX Runtime and Pillow alone, without torch and Headway: all that `predict.py` needs."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("numpy", "onnxruntime", "PIL")
PROGRAM = """
import importlib.util, runpy, sys
sys.path.append(sys.argv[1])
sys.argv = sys.argv[2:]
for name in ("torch", "headway", "onnx"):
    if importlib.util.find_spec(name) is not None:
        raise SystemExit(f"{name} can be imported")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose only packages are those of a folder."""


def link_packages(folder: Path) -> Path:
    """Makes a folder with the packages alone."""
    folder.mkdir()
    for name in PACKAGES:
        found = find_spec(name)
        assert found is not None
        assert found.origin is not None
        (folder / name).symlink_to(Path(found.origin).parent)
    return folder


def run_bare(packages: Path, script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a script in a process of its own, isolated from this Python's packages, variables and current folder.

    Args:
        packages: made by `link_packages`.
    """
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, packages, script, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd="/")
