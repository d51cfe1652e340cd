"""Fine-tuning from .pth and .safetensors, with weights that a first training made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests._support import NET, headway, packed_digits, write_recipe


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_fine_tune_from_a_file(ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    packed_digits(tmp_path)
    write_recipe(tmp_path / "first.yaml", model={"factory": "net.py:wide"}, epochs=6)
    assert "def wide" in NET
    first = headway("train", "first.yaml", "--run", "runs/first", "--json").json()
    weights = Path("runs/first/weights.safetensors")
    if ending == ".pth":
        # As DistributedDataParallel and torch.compile save them, below `state_dict`.
        tensors = {f"module._orig_mod.{name}": tensor for name, tensor in load_file(weights).items()}
        torch.save({"state_dict": tensors, "epoch": 6}, "first.pth")
        weights = Path("first.pth")
    write_recipe(tmp_path / "second.yaml", model={"factory": "net.py:wide", "weights": str(weights)}, epochs=1)
    tuned = headway("train", "second.yaml", "optimizer.lr=0.001", "--run", "runs/second", "--json").json()
    scratch = headway("train", "first.yaml", "epochs=1", "optimizer.lr=0.001", "--run", "runs/scratch", "--json").json()
    assert tuned["accuracy"] > scratch["accuracy"] + 0.1
    assert tuned["accuracy"] > first["accuracy"] - 0.1
