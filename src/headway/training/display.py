"""Display: shows the progress of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from headway.training.trainer import Trainer


class Display(Protocol):
    """Shows the progress of a run. Displays that wrap another one pass every call on to it."""

    def step(self, trainer: Trainer) -> None:
        """Called after every step; must be cheap."""

    def record(self, record: dict[str, Any]) -> None:
        """Called with every record of metrics.jsonl."""

    def stop(self) -> None:
        """Called once at the end of the run; leaves the terminal as it was. Most displays have nothing to do."""
        return
