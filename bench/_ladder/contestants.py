"""Starts the ladder's contestants and reads their results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench._arms import Comparison
from bench._common import median

Command = list[str | Path]

BATCH = 64


def tutorial(images: Path, factory: str = "", *, batch: int = BATCH, workers: int = 1) -> Command:
    """The tutorial's loop over a folder CLASS/NAME; without a network its input alone."""
    return _module("tutorial", {"images": str(images), "factory": factory, "batch": batch, "workers": workers})


def train(recipe: Path, *overrides: str) -> Command:
    """`headway train` of a recipe without its end."""
    return _module("train", {"recipe": str(recipe), "overrides": overrides})


def _module(name: str, asked: dict[str, Any]) -> Command:
    return [sys.executable, "-m", f"bench._ladder.{name}", json.dumps(asked)]


def rows(arms: Comparison) -> list[tuple[str, ...]]:
    """The table of a comparison: one row an arm. Without core seconds, as those of a DataLoader's workers, which begin
    anew in each epoch, cannot be told afterwards."""
    table: list[tuple[str, ...]] = [("arm", "images/s (95 %)", "version")]
    for name, arm in arms.arms.items():
        middle, low, high = median([turn.images_s for turn in arm.turns])
        table.append((name, f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]", arm.version))
    return table
