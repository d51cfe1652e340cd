"""Turns what any store of MLflow has of a run into a RunRecord, and names what an export needs of one.

Params are the recipe, and tags are facts. Metrics keep their keys. What Headway's export writes becomes what it was:
metrics `summary/KEY` and tags `headway.summary.KEY` the summary, tags `headway.KEY` facts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from headway.lifecycle.experiments.record import MOST_METRICS, Point, RunReadError, RunRecord, RunState, to_finite

STATES: Mapping[str, RunState] = {
    "FINISHED": "finished",
    "FAILED": "failed",
    "KILLED": "stopped",
    "RUNNING": "unfinished",
    "SCHEDULED": "unfinished",
}
# A folder of MLflow's runs has the number of a status.
STATUS_NUMBERS = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}

SUMMARY = "summary/"
SUMMARY_TAG = "headway.summary."
FACT_TAG = "headway."
# Tags that only MLflow's own page reads; one of them grows with every model that is logged.
_SKIPPED_TAGS = frozenset({"mlflow.log-model.history", "mlflow.runName"})
# Most points of one run.
MOST_POINTS = 5_000_000


@final
@dataclass(frozen=True, kw_only=True)
class MlflowRun:
    """One run of MLflow, as its store has it.

    Attributes:
        start_ms, end_ms: Unix time; None if the store has none.
        datasets: digest of each data set that is an input, by its context or name.
        metrics: (key, step, value, time in ms) in the order in which they were logged.
    """

    run_id: str
    name: str
    status: str
    start_ms: int | None
    end_ms: int | None
    experiment: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    datasets: Mapping[str, str] = field(default_factory=dict)
    metrics: Iterable[tuple[str, int, float | None, int]]

    def to_record(self) -> RunRecord:
        """Returns the run as an index keeps it. Raises RunReadError if it has more metrics than any run has."""
        points: dict[str, dict[int, Point]] = {}
        for count, (key, step, value, time_ms) in enumerate(self.metrics, 1):
            # The value that was logged last at a step counts, as in MLflow's own charts.
            points.setdefault(key, {})[step] = Point(step, to_finite(value), time_ms)
            if len(points) > MOST_METRICS or count > MOST_POINTS:
                what = f"it has more than {MOST_METRICS:,} metrics, or {MOST_POINTS:,} values of them"
                raise RunReadError(what)
        summary: dict[str, Any] = {}
        for key in [key for key in points if key.startswith(SUMMARY) and len(key) > len(SUMMARY)]:
            series = points.pop(key)
            summary[key.removeprefix(SUMMARY)] = _restore_count(series[max(series)].value)
        for key, text in self.tags.items():
            if key.startswith(SUMMARY_TAG):
                summary.setdefault(key.removeprefix(SUMMARY_TAG), text)
        if self.start_ms is not None and self.end_ms is not None and self.end_ms >= self.start_ms:
            summary.setdefault("seconds", (self.end_ms - self.start_ms) / 1000)
        about: dict[str, Any] = {
            key.removeprefix(FACT_TAG): value
            for key, value in self.tags.items()
            if key not in _SKIPPED_TAGS and not key.startswith(SUMMARY_TAG)
        }
        about |= {"experiment": self.experiment, "run_id": self.run_id}
        about |= {f"data.{name}": digest for name, digest in self.datasets.items()}
        return RunRecord(
            kind="mlflow",
            name=self.name or self.tags.get("mlflow.runName") or self.run_id,
            state=STATES.get(self.status, "unfinished"),
            started=None if self.start_ms is None else self.start_ms / 1000,
            recipe=self.params,
            summary=summary,
            about=about,
            metrics={key: [series[step] for step in sorted(series)] for key, series in points.items()},
        )


def _restore_count(value: float | None) -> float | None:
    """Returns a whole number as an int: MLflow has floats alone, and a number of steps or parameters was an int."""
    return int(value) if value is not None and value.is_integer() and abs(value) < 1 << 53 else value
