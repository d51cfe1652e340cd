"""A network, a transform and a task with one slow operation each, in the role of the user's code. Network and task get
the operation and its strength as arguments, the transform by environment variables, since a recipe cannot pass it
arguments.

Slow lines end with `# NAME`, by which the bench finds their line numbers.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench._doctor.user import Lenet
from headway.setup.task import Classification, TargetSpec, Task

DOES, AMOUNT = "HEADWAY_BENCH_DOES", "HEADWAY_BENCH_AMOUNT"
"""What `transform` does, and how much of it."""

FILE_MB = 16
"""Of the file that `read` reads again and again."""

Keys = NDArray[np.uint64]


def sleep(milliseconds: float) -> None:
    time.sleep(milliseconds / 1e3)  # sleep


def numpy(thousands: float) -> None:
    np.sort(np.random.default_rng(1).random(int(1e3 * thousands)))  # numpy


def lock(milliseconds: float) -> None:
    with _held(milliseconds):  # lock
        pass


def collect(thousands: float) -> None:
    _heap(int(1e3 * thousands))
    gc.collect()  # collect


def read(megabytes: float) -> None:
    for _ in range(max(1, round(megabytes / FILE_MB))):
        _file().read_bytes()  # read


def log(lines: float) -> None:
    for number in range(int(lines)):
        _logger().info("%d of %d: %s", number, lines, time.monotonic())  # log


def reads(values: float) -> None:
    found = _values()
    for number in range(int(values)):
        found[number % len(found), 0, 0, 0].item()  # reads


ALL: Mapping[str, Callable[[float], None]] = {
    "sleep": sleep,
    "numpy": numpy,
    "lock": lock,
    "collect": collect,
    "read": read,
    "log": log,
    "reads": reads,
}


def line_of(name: str) -> int:
    """The number of the line that does a thing."""
    lines = Path(__file__).read_text(encoding="utf-8").split("\n")
    (found,) = [number for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}")]
    return found


@final
class Net(nn.Module):
    """LeNet whose forward pass does something slow first. Input: float [N, in_channels, H, W]."""

    def __init__(self, num_classes: int, in_channels: int = 3, *, does: str, amount: float) -> None:
        super().__init__()
        self.inner, self._does, self._amount = Lenet(num_classes, in_channels), ALL[does], amount

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._does(self._amount)
        logits: torch.Tensor = self.inner(images)
        return logits


def transform(images: torch.Tensor, labels: torch.Tensor, keys: Keys) -> tuple[torch.Tensor, torch.Tensor]:
    """Leaves the batch as it is."""
    if DOES in os.environ:
        ALL[os.environ[DOES]](float(os.environ[AMOUNT]))
    return images, labels


@final
class Slow(Task):
    """Classification whose loss or metric does something slow first. Args: where: `loss` or `metrics`."""

    primary, higher_is_better = Classification.primary, Classification.higher_is_better

    def __init__(self, target: TargetSpec, *, where: str, does: str, amount: float) -> None:
        self._inner, self._where, self._does, self._amount = Classification(target), where, ALL[does], amount

    @property
    def outputs(self) -> int:
        return self._inner.outputs

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self._where == "loss":
            self._does(self._amount)
        return self._inner.loss(outputs, labels)

    def metrics(self, outputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if self._where == "metrics":
            self._does(self._amount)
        return self._inner.metrics(outputs, labels)

    def predict(self, outputs: torch.Tensor) -> list[dict[str, Any]]:
        return self._inner.predict(outputs)


@cache
def _held(milliseconds: float) -> threading.Lock:
    """A lock that another thread holds for so long, again and again, and lets go of for a moment between."""
    found = threading.Lock()

    def hold() -> None:
        while True:
            with found:
                time.sleep(milliseconds / 1e3)
            time.sleep(0.0005)

    threading.Thread(target=hold, daemon=True, name="bench-holder").start()
    return found


@cache
def _heap(objects: int) -> list[dict[str, int]]:
    """Objects that a collection has to look at."""
    return [{"number": number} for number in range(objects)]


@cache
def _file() -> Path:
    """A file that lies in memory after it was written; it goes with the process."""
    path = _temporary(".bytes")
    path.write_bytes(bytes(FILE_MB << 20))
    return path


@cache
def _values() -> torch.Tensor:
    """Images whose values are read."""
    return torch.zeros(8, 3, 32, 32)


@cache
def _logger() -> logging.Logger:
    """A logger into a file, which goes with the process."""
    found = logging.getLogger("bench.user")
    found.setLevel(logging.INFO)
    found.propagate = False
    found.addHandler(logging.FileHandler(_temporary(".log")))
    return found


def _temporary(suffix: str) -> Path:
    handle, name = tempfile.mkstemp(prefix="headway-bench-", suffix=suffix)
    os.close(handle)
    atexit.register(Path(name).unlink, missing_ok=True)
    return Path(name)
