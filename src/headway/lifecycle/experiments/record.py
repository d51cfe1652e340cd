"""RunRecord: what an index keeps of one run, whoever wrote it, and RunStore: where runs are read."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

from headway.core.errors import HeadwayError

RunKind = Literal["run", "ensemble", "mlflow"]
RunState = Literal["finished", "stopped", "failed", "unfinished"]
"""`unfinished`: the run has no summary yet. It trains, or was killed."""

Source = Literal["recipe", "summary", "metric", "about"]
"""The part of a run that a value comes from. A key alone stands for the first of them, in this order, that has it."""

SOURCES: tuple[Source, ...] = ("recipe", "summary", "metric", "about")

# Longest text of a value; longer ones (lists of class names) are cut.
MOST_TEXT = 2000
# Most metrics of one run: more are the sign of a file of something else.
MOST_METRICS = 10_000

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class Point(NamedTuple):
    """Value of a metric after a step; None: not finite. `time_ms` is Unix time, or 0 if unknown."""

    step: int
    value: float | None
    time_ms: int


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run.

    Attributes:
        kind: a run of Headway, an ensemble, or a run that MLflow's store has.
        name: name for people; several runs may have the same.
        started: Unix time in seconds.
        recipe: values by dotted key; of MLflow its params.
        summary: values of summary.json by dotted key.
        about: facts about machine, versions and data by dotted key; of MLflow its tags.
        metrics: points of each metric in the order of their steps, each step once. `train/loss` is a key.
    """

    kind: RunKind
    name: str
    state: RunState
    started: float | None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    summary: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Sequence[Point]] = field(default_factory=dict)

    def list_values(self) -> Iterator[tuple[Source, str, Any]]:
        """Yields (source, key, value), with the last value of each metric."""
        for key, value in self.recipe.items():
            yield "recipe", key, value
        for key, value in self.summary.items():
            yield "summary", key, value
        for key, points in self.metrics.items():
            yield "metric", key, points[-1].value
        for key, value in self.about.items():
            yield "about", key, value

    def count_points(self) -> int:
        """Returns the number of values of all metrics."""
        return sum(map(len, self.metrics.values()))


class RunReadError(HeadwayError):
    """A run cannot be read. An index lists it with the reason, and leaves it out."""


class RunStore(ABC):
    """A place that runs are read from: folders of Headway, or a store of MLflow."""

    @abstractmethod
    def list_runs(self) -> dict[Path, str]:
        """Returns a signature for each run by its path. It changes whenever the files of the run do."""

    @abstractmethod
    def read_runs(self, paths: Collection[Path]) -> Iterator[tuple[Path, RunRecord | RunReadError]]:
        """Yields each of these runs, or why it cannot be read."""


def encode_value(value: Any) -> tuple[float | None, str]:
    """Returns a value as a number, if it is one, and as text. Both can be stored and compared."""
    number: float | None = None
    try:
        if isinstance(value, str):
            text = value
            # MLflow stores params as texts, and `lr: 1e-3` may be one in a recipe's args.
            number = float(value) if len(value) < 64 and _NUMBER.fullmatch(value) else None
        elif value is None or isinstance(value, bool):
            text = json.dumps(value)
        elif isinstance(value, int | float):
            text, number = repr(value), to_finite(value)
        else:
            text = json.dumps(value, ensure_ascii=False, default=str)
    # YAML reads 0xfff... into a whole number of any length, and Python prints none of more than 4,300 digits.
    except ValueError:
        text = "a number of more than 4,300 digits"
    return to_finite(number), clean_text(text)


def clean_text(text: str) -> str:
    """Returns a text that SQLite and UTF-8 take: unpaired surrogates and NUL become `?`; cut at MOST_TEXT."""
    whole = text
    # JSON may hold unpaired surrogates, and a file name in another encoding does. Most texts are plain.
    if not text.isascii() or "\0" in text:
        whole = text.encode("utf-8", "replace").decode("utf-8").replace("\0", "?")
    return whole if len(whole) <= MOST_TEXT else whole[: MOST_TEXT - 1] + "…"


def fold_text(text: str | bytes | None) -> str | None:
    """Returns a text, or a path as bytes, in the form that is the same for capitals and small letters."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    return None if text is None else text.encode("utf-8", "replace").decode("utf-8").casefold()


def name_path(path: Path) -> str:
    """Returns the last part of a path as text for people."""
    return path.name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") or str(path)


def to_finite(value: float | None) -> float | None:
    """Returns a number as a float; None if it is not finite, or larger than a float holds."""
    try:
        return None if value is None or not math.isfinite(number := float(value)) else number
    # JSON and YAML have whole numbers of any length.
    except OverflowError:
        return None
