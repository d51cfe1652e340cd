"""Own photographs: a folder with one sub-folder a class, and the four commands of the README."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests._support import digits, headway


def test_own_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "photos")
    headway("init", "photos")
    headway("pack", "photos", "photos.packed", "--split", "0.25")
    headway("train", "photos.yaml", "epochs=8", "precision=fp32")
    accuracy = headway("evaluate", "runs/photos", "--json").json()["accuracy"]
    assert accuracy > 0.5
    headway("report", "runs/photos")
    assert "accuracy" in Path("runs/photos/report.html").read_text(encoding="utf-8")
    rows = headway("predict", "runs/photos", "photos/3").out.splitlines()
    assert rows[0].startswith("path,label,probability")
    assert len(rows) == 25
