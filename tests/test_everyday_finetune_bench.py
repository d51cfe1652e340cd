"""The bench of fine-tuning against training from scratch: it trains all of it shortly, on images of its own."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest
from bench._everyday import finetune
from PIL import Image


@pytest.mark.check
def test_it_trains_what_it_compares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = np.random.default_rng(0)
    for part, count in (("train", 20), ("test", 10)):
        for place, name in enumerate(("cat", "deer", "dog", "horse")):
            (tmp_path / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = chance.integers(50 * place, 50 * place + 60, (32, 32, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{number}.png")
    monkeypatch.setenv("HEADWAY_CIFAR10", str(tmp_path))
    (claim,) = finetune.compare_finetuning(tmp_path / "runs", argparse.Namespace(quick=True))
    rows = [line.rsplit(None, 3) for line in capsys.readouterr().out.splitlines() if line]
    assert claim.name == "finetune_vs_scratch_points"
    assert "36 images, 20 of test" in claim.how
    assert [row[0] for row in rows] == ["network", "eight classes", "fine-tuned", "from scratch"]
    tuned, scratch = (float(row[2]) for row in rows[2:])
    assert claim.value == pytest.approx(100 * (tuned - scratch), abs=0.02)


def test_without_images_there_is_no_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADWAY_CIFAR10", str(tmp_path))
    assert finetune.compare_finetuning(tmp_path, argparse.Namespace(quick=True)) == []
    assert "set HEADWAY_CIFAR10" in capsys.readouterr().out
