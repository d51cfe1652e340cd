"""A type checker sees Headway's public names, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import headway

headway.Loader, headway.optim.LARS, headway.watch.watch
headway.Loadr
headway.optim.LARSS
headway.watch.wach
"""


# 11 CPU seconds: mypy reads torch.
@pytest.mark.check
@pytest.mark.fresh
def test_a_name_that_is_not_there_is_an_error_of_mypy(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--config-file=", "--follow-imports=silent", "mine.py"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    errors = [line.split(": error: ")[0] for line in checked.stdout.splitlines() if ": error: " in line]
    assert errors == ["mine.py:4", "mine.py:5", "mine.py:6"], checked.stdout + checked.stderr
