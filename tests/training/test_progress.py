"""The progress bar, on a pseudo terminal of so many columns: nothing important is cut."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests._support import packed_digits, write_recipe

from headway.training.progress import fit_parts

CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def shown_on(columns: int, folder: Path, *overrides: str) -> list[str]:
    """Everything that a run draws on a terminal, one string for each redrawn line."""
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "headway", "train", "recipe.yaml", *overrides]
    given = {"TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "24"}
    with subprocess.Popen(
        command, cwd=folder, stdin=slave, stdout=subprocess.DEVNULL, stderr=slave, env={**os.environ, **given}
    ) as child:
        os.close(slave)
        drawn = b""
        # The kernel reports an error once the last writer has closed the terminal.
        with contextlib.suppress(OSError):
            while piece := os.read(master, 65536):
                drawn += piece
    os.close(master)
    assert child.returncode == 0, drawn.decode()
    return [line for line in re.split(r"[\r\n]+", CONTROL.sub("", drawn.decode())) if line.startswith("epoch")]


@pytest.mark.parametrize(
    "columns", [80, pytest.param(40, marks=pytest.mark.check), pytest.param(160, marks=pytest.mark.check)]
)
def test_a_terminal_shows_bar_epoch_and_evaluation(columns: int, tmp_path: Path) -> None:
    packed_digits(tmp_path, per_class=20)
    write_recipe(tmp_path / "recipe.yaml", epochs=3)
    lines = shown_on(columns, tmp_path)
    assert lines
    assert all(len(line) <= columns for line in lines), "a longer one would break into two"
    last = lines[-1].rstrip()
    assert "…" not in last
    assert re.match(r"epoch 3\.00/3 ━{10,24} accuracy 0\.\d{4}", last), "the bar ends at 100 %"
    assert ("to go  loss" in last) == (columns >= 80)
    assert ("batches ready" in last) == (columns >= 160)


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1), st.integers(0, 100))
def test_parts_are_left_out_from_the_end(parts: list[str], columns: int) -> None:
    assert (fit_parts(["ab", "cd"], 5), fit_parts(["ab", "cd"], 6)) == ("ab", "ab  cd")
    text = fit_parts(parts, columns)
    kept = next(number for number in range(1, len(parts) + 1) if "  ".join(parts[:number]) == text)
    assert len(text) <= columns or kept == 1
    assert kept == len(parts) or len("  ".join(parts[: kept + 1])) > columns
