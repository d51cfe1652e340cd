"""Progress displays: a bar on a terminal, log lines elsewhere. On most steps they only compare two clocks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import Any, final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from headway.core.text_format import format_duration
from headway.launch.ranks import Ranks
from headway.training.display import Display
from headway.training.trainer import Trainer

REFRESH_S = 0.5
"""Seconds between two refreshes of the bar; one takes about 2 ms."""
LINE_S = 5.0
"""Least seconds between two lines about training; every evaluation has a line."""


# Columns of the bar: it takes what the numbers leave, and numbers are left out before it gets narrower.
NARROWEST_BAR, WIDEST_BAR = 10, 24


def fit_parts(parts: Sequence[str], columns: int) -> str:
    """Joins as many parts as fit into so many columns: the first ones, and always the very first."""
    text = ""
    for part in parts:
        longer = f"{text}  {part}" if text else part
        if text and len(longer) > columns:
            break
        text = longer
    return text


_hides: ContextVar[bool] = ContextVar("headway_hides_progress", default=False)


@contextmanager
def hide_progress(hides: bool) -> Iterator[None]:
    """Trains without a display inside the block, if `hides` is true."""
    token = _hides.set(hides)
    try:
        yield
    finally:
        _hides.reset(token)


def build_display(console: Console | None = None, ranks: Ranks | None = None) -> Display:
    """Builds the display that suits the output; on several ranks only the lead shows it."""
    if _hides.get():
        return SilentDisplay()
    console = console or Console(stderr=True)
    display: Display = ProgressBar(console) if console.is_terminal else LogLines()
    return display if ranks is None else LeadRankDisplay(ranks, display)


@final
class SilentDisplay(Display):
    """Shows nothing."""

    def step(self, trainer: Trainer) -> None:
        pass

    def record(self, record: dict[str, Any]) -> None:
        pass


@final
class LeadRankDisplay(Display):
    """Shows the progress on the lead of several ranks. If that is lost, the next lead shows it."""

    def __init__(self, ranks: Ranks, display: Display) -> None:
        self._ranks, self._display = ranks, display

    def step(self, trainer: Trainer) -> None:
        if self._ranks.is_lead:
            self._display.step(trainer)

    def record(self, record: dict[str, Any]) -> None:
        if self._ranks.is_lead:
            self._display.record(record)

    def stop(self) -> None:
        self._display.stop()


@final
class ProgressBar(Display):
    """A bar with epoch, evaluation and time to go, redrawn in place; and as much more as the terminal has room for."""

    def __init__(self, console: Console) -> None:
        self._next = 0.0
        self._last: dict[str, Any] = {}
        self._evaluated: dict[str, Any] = {}
        self._rate: tuple[float, int] | None = None
        self._console, self._bar = console, BarColumn(bar_width=WIDEST_BAR)
        self._progress = Progress(
            TextColumn("[bold]epoch {task.fields[epoch]}"),
            self._bar,
            # Metrics have names of the user's own, which may look like markup.
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            # A refresh thread would take the interpreter's lock from the training loop.
            auto_refresh=False,
        )
        self._task = self._progress.add_task("train", epoch="0", text="", total=1)

    def step(self, trainer: Trainer) -> None:
        now = perf_counter()
        # The last step is always drawn, so that the bar ends at 100 %.
        if now < self._next and trainer.step < trainer.setup.steps and not trainer.finished:
            return
        # images/s and time to go count from the first refresh, after compilation and the first batch.
        if self._rate is None:
            self._progress.start()
            self._rate = (now, trainer.position)
        self._next = now + REFRESH_S
        setup = trainer.setup
        last_epoch = setup.plan.find_position(setup.steps) / setup.epoch
        epoch = f"{trainer.position / setup.epoch:.2f}/{last_epoch:.4g}"
        # One column lies between the bar and each of its neighbours.
        room = self._console.width - len(f"epoch {epoch}") - 2
        text = fit_parts(self._list_parts(trainer, now - self._rate[0], self._rate[1]), room - NARROWEST_BAR)
        self._bar.bar_width = max(NARROWEST_BAR, min(WIDEST_BAR, room - len(text)))
        self._progress.update(
            self._task, completed=trainer.step, total=setup.steps, epoch=epoch, text=text, refresh=True
        )
        if trainer.step >= setup.steps or trainer.finished:
            self._progress.stop()

    def _list_parts(self, trainer: Trainer, since_s: float, from_position: int) -> list[str]:
        """Lists what the bar can show, the most important first."""
        setup, done, parts = trainer.setup, trainer.position - from_position, []
        name = setup.task.primary
        if name in self._evaluated:
            parts.append(f"{name} {self._evaluated[name]:.4f}")
        has_rate = bool(done) and since_s > 0
        if has_rate:
            left = setup.plan.find_position(setup.steps) - trainer.position
            parts.append(f"{format_duration(left * since_s / done)} to go")
        # There is no loss before the first record.
        if "loss" in self._last:
            parts.append(f"loss {self._last['loss']:.4f}")
        if has_rate:
            parts.append(f"{done / since_s:,.0f} images/s")
        if "loss" in self._last:
            parts.append(f"waiting {self._last['wait_share']:.1%}")
        parts.append(f"step {trainer.step}/{setup.steps}")
        loader = setup.inputs.loader
        if loader is not None:
            stats = loader.stats()
            parts.append(f"{stats.occupancy:.1f} of {stats.prefetch_batches} batches ready")
        return parts

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "train":
            self._last = record
        elif record["kind"] == "evaluate":
            self._evaluated = record

    def stop(self) -> None:
        self._progress.stop()


@final
class LogLines(Display):
    """Prints a line per evaluation, and one every few seconds of training."""

    def __init__(self) -> None:
        self._next = {"train": 0.0, "callback": 0.0}

    def step(self, trainer: Trainer) -> None:
        pass

    def record(self, record: dict[str, Any]) -> None:
        now = perf_counter()
        # The Trainer itself tells the user of a divergence.
        if record["kind"] == "divergence":
            return
        if record["kind"] in self._next:
            if now < self._next[record["kind"]]:
                return
            self._next[record["kind"]] = now + LINE_S
        # The clock and the position say little in a line; damaged samples are shown once there are some.
        shown = {k: v for k, v in record.items() if k not in HIDDEN and (k != "damaged" or v)}
        numbers = "  ".join(f"{name} {_format_value(name, value)}" for name, value in shown.items())
        print(f"{record['kind']:<8}  epoch {record['epoch']:.2f}  {numbers}", file=sys.stderr, flush=True)


HIDDEN = ("kind", "epoch", "position", "seconds")


def _format_value(name: str, value: Any) -> str:
    if name == "images_s":
        return f"{value:,.0f}"
    if name in ("wait_share", "exchange_share"):
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
