"""The source tree of an older commit, with its native core built, kept below build/ from run to run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from bench._arms import ROOT, ArmError


def build_old_tree(commit: str, *, may_build: bool) -> Path:
    """Returns the folder of that commit's files.

    Raises ArmError if the history lacks the commit, its native core cannot be built here, or must not be.
    """
    tree = ROOT / "build" / f"tree-{commit}"
    if tree.is_dir():
        return tree
    if not may_build:
        raise ArmError("it is built without --quick")
    for tool in ("git", "cmake"):
        if shutil.which(tool) is None:
            raise ArmError(f"{tool} is missing")
    # Built beside its place and renamed, so that an interrupted build is not taken for a whole one.
    making = tree.with_name(f"{tree.name}.{os.getpid()}")
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir(parents=True)
    try:
        archive = _run("git", "-C", ROOT, "archive", "--format=tar", commit, "src", "native")
        _run("tar", "-x", "-C", making, data=archive)
        build = making / "build"
        _run("cmake", "-S", making / "native", "-B", build)
        _run("cmake", "--build", build, "-j", str(os.cpu_count()))
        _run("cmake", "--install", build)
        if not (making / "src/headway/data/libheadway.so").is_file():
            raise ArmError("its native core cannot be built here")
        shutil.rmtree(build)
        making.rename(tree)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return tree


def _run(*command: str | Path, data: bytes | None = None) -> bytes:
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise ArmError(f"{command[0]}: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
