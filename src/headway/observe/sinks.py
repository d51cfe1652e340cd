"""Sinks: where metrics go besides metrics.jsonl. Each needs its extra; none is imported unless a recipe names it."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway.core.errors import RecipeError


class Sink(ABC):
    """Takes the records of metrics.jsonl."""

    @abstractmethod
    def record(self, record: dict[str, Any]) -> None:
        """One record: `kind`, `step`, and numbers."""

    @abstractmethod
    def close(self) -> None:
        """Writes what is still to be written."""


class TensorBoard(Sink):
    """Event files in RUN/tensorboard, one scalar a number: `train/loss`, `evaluate/accuracy`, ..."""

    def __init__(self, folder: Path, after_step: int | None) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tensorboard's own imports warn of their dependencies
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            fix = "Install it: pip install tensorboard. Or take it out of sinks."
            raise RecipeError(f"tensorboard is not installed ({error})", where="sinks", fix=fix) from None
        self._writer: Any = SummaryWriter(
            str(folder / "tensorboard"), purge_step=None if after_step is None else after_step + 1
        )

    def record(self, record: dict[str, Any]) -> None:
        for name, value in record.items():
            if isinstance(value, int | float) and name not in ("step", "position"):
                self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


def open_sinks(names: Sequence[str], folder: Path, after_step: int | None = None) -> list[Sink]:
    """The sinks of a recipe; a resumed run writes over what came after `after_step`.

    Raises:
        RecipeError: a sink's package is not installed.
    """
    return [TensorBoard(folder, after_step) for name in names if name == "tensorboard"]
