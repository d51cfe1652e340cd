"""Hostile inputs go through the native core under sanitizers, and through whatever reads files and messages.

These campaigns are short; `make fuzz TARGET=...` runs one for ten minutes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.fuzz import campaign

COUNTS = {
    "decode": 20,
    "gather": 2000,
    "optimize": 500,
    "convolve": 300,
    "changing": 2000,
    "sizes": 800,
    "fork": 6,
    "share": 5,
}
MISSING = [program for program in ("cmake", "g++") if not shutil.which(program)]


def test_every_target_of_python_takes_a_few_inputs(tmp_path: Path) -> None:
    for target in campaign.PYTHON:
        (tmp_path / target).mkdir()
        assert campaign.run_python(target, 10, 0, 0, tmp_path / target) == 0


@pytest.mark.parametrize(("target", "seed", "inputs"), [("manifest", 7, 340)])
def test_what_once_failed_ends_in_errors_of_ours(target: str, seed: int, inputs: int, tmp_path: Path) -> None:
    """Input 333 is a manifest of brackets."""
    assert campaign.run_python(target, inputs, 0, seed, tmp_path) == 0


@pytest.mark.check
@pytest.mark.parametrize("target", campaign.PYTHON)
def test_hostile_files_and_messages_end_in_errors_of_ours(target: str, tmp_path: Path) -> None:
    assert campaign.run_python(target, 400, 0, 1, tmp_path) == 0


@pytest.mark.check
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} here")
@pytest.mark.parametrize("target", COUNTS)
def test_hostile_images_and_arguments_do_not_harm_the_core(
    target: str, data_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = campaign.run_native(target, COUNTS[target], 0, 0, data_root / "imagenet-250", tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.out + said.err
    assert "no crash, no hang" in said.out
