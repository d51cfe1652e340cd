"""A run and its export, made once for all tests of a session, also if several processes share them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests._support import headway, packed_digits, write_recipe


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of the session that the first test that needs it fills; the other processes wait for it."""
    root = factory.getbasetemp()
    # A worker of pytest-xdist has a folder of its own inside that of the session.
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    folder = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            folder.mkdir()
            make(folder)
            (folder / "done").touch()
    return folder


def _make(folder: Path) -> None:
    packed_digits(folder)
    # Well trained, so that a wrong pixel changes its answers.
    optimizer = {"lr": 0.1, "momentum": 0.9}
    model = {"factory": "headway.model:small_net"}
    recipe = write_recipe(folder / "recipe.yaml", model=model, optimizer=optimizer, epochs=6)
    # Averaged weights, and mirrored images at test time: whatever an evaluation does belongs to the pipeline.
    options = ("model.ema={half_life_steps: 4}", "evaluate={flip: true}")
    headway("train", recipe, "--run", folder / "run", *options)
    headway("export", folder / "run", "--out", folder / "export")


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with digits/, digits.packed/, recipe.yaml, run/ (averaged weights) and its export/. Do not change it."""
    return make_once(tmp_path_factory, "exported-digits", _make)
