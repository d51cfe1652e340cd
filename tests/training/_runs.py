"""What the tests of runs of several processes read of a run folder, and a run as it was before its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file


def weights(run: Path) -> dict[str, torch.Tensor]:
    """The saved weights of a run, by name."""
    return load_file(run / "weights.safetensors")


def cut_back(run: Path, to: Path, step: int = 4) -> Path:
    """A copy of a run as it was after a step."""
    shutil.copytree(run, to)
    for one in (to / "checkpoints").glob("step-*"):
        if one.name != f"step-{step:08}":
            shutil.rmtree(one)
    (to / "checkpoints/latest").write_text(f"step-{step:08}\n")
    return to
