"""The network of the soak: in each training step every process writes down a checksum of the weights it begins with."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import final
from zlib import crc32

import torch
from torch import nn

FOLDER = "HEADWAY_SOAK"
"""Variable with the folder of the checksums."""

SLOWLY = "slowly"
"""Name of a file there: while it exists a step takes PAUSE_S longer, so that processes that start come in time."""
PAUSE_S = 0.15


@final
class Watched(nn.Module):
    """Three convolutions with batch norm for gray images of 8 x 8."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((1, 32), (32, 64), (64, 64)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, num_classes))
        self._file: int | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.training:
            self._write_down()
            if (Path(os.environ[FOLDER]) / SLOWLY).exists():
                time.sleep(PAUSE_S)
        logits: torch.Tensor = self.layers(images)
        return logits

    def _write_down(self) -> None:
        if self._file is None:
            path = Path(os.environ[FOLDER]) / f"{os.getpid()}.weights"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        found = 0
        for parameter in self.parameters():
            found = crc32(parameter.detach().contiguous().numpy().tobytes(), found)
        os.write(self._file, found.to_bytes(4, "little"))
