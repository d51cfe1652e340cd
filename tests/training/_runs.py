"""What the tests of runs of several processes read of a run folder, and a run as it was before its end."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests._support import finished

TIED = """
import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, num_classes)

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).relu()).relu())


def tied(num_classes):
    return Tied(num_classes)
"""
"""A network two of whose layers have one weight, as source code."""
DIE = """
import os
import signal
from pathlib import Path


class Die:
    every_rank = True

    def on_step(self, run):
        died = Path(__file__).with_name("died")
        if run.step == 6 and os.environ["RANK"] == "1" and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""
"""A callback that kills the process of rank 1 once, in step 6, as source code."""


def train(folder: Path, name: str, *options: str) -> Path:
    """Trains the recipe of a folder into a run folder in it, and loses no process meanwhile."""
    said = finished("train", folder / "recipe.yaml", "--run", folder / name, *options)
    assert said.status == 0, said.err
    # A run that was started again may have the same weights.
    assert "started again" not in said.err
    return folder / name


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
