"""Forks in the middle of a decode, under ThreadSanitizer.

`make check` gives it the machine for itself: the sanitizer does not promise to survive a fork of several threads. On a
busy machine it may wait for ever in the child.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fuzz import campaign
from tests.fuzz.test_fuzz import MISSING


@pytest.mark.check
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} here")
def test_a_fork_does_not_harm_the_core(data_root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = campaign.run_native("fork", 12, 0, 0, data_root / "imagenet-250", tmp_path)
    said = capfd.readouterr()
    assert status == 0, said.out + said.err
    assert "no crash, no hang" in said.out
