"""The network of the soak: in each training step every process records a checksum of its weights before the step."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, final
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
        self._last: int | None = None

    def state_dict(self, *args: Any, **more: Any) -> Any:
        """Also notes which weights are given away, and from which the last step began: who gives them to another
        process at the end of a step may never begin the next one."""
        if self._last is not None:
            pair = self._last.to_bytes(4, "little") + self._checksum().to_bytes(4, "little")
            with (Path(os.environ[FOLDER]) / f"{os.getpid()}.given").open("ab", buffering=0) as file:
                file.write(pair)
        return super().state_dict(*args, **more)

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
        self._last = self._checksum()
        os.write(self._file, self._last.to_bytes(4, "little"))

    def _checksum(self) -> int:
        found = 0
        for parameter in self.parameters():
            found = crc32(parameter.detach().contiguous().numpy().tobytes(), found)
        return found
