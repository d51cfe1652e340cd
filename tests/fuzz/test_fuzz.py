"""Damaged JPEGs go through the core under sanitizers (`make fuzz` sends 200,000 of them)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.fuzz import campaign

COUNT = 5000
MISSING = [program for program in ("cmake", "g++") if not shutil.which(program)]


@pytest.mark.check
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} here")
def test_damaged_images_neither_crash_the_core_nor_touch_their_neighbours(
    data_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = campaign.run(COUNT, 0, data_root / "imagenet-250", tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.out + said.err
    assert "no crash, no hang, no changed neighbour" in said.out
