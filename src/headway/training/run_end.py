"""RunEnd: the goals and reasons that end a run before its last step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

from headway.core.errors import CheckpointError
from headway.core.untrusted_json import is_any_number, is_whole_number
from headway.setup.task import reaches_goal
from headway.setup.train_setup import TrainSetup

LIMIT_KEYS = ("epochs", "stop_at", "early_stopping", "callbacks")
"""Keys of a recipe that decide when a run ends."""


@final
class RunEnd:
    """Ends a run that has reached `stop_at`, that no longer improves (`early_stopping`), or that a callback ends.

    All ranks have the metrics of an evaluation, so all of them decide alike, without a message.

    Attributes:
        reason: why a callback or `early_stopping` ends the run; None if they do not.
        reached_s: seconds of the clock until `stop_at` was reached.
        evaluated_step: step of the newest evaluation; -1 before the first one.
    """

    def __init__(self, setup: TrainSetup) -> None:
        self.reason: str | None = None
        self.reached_s: float | None = None
        self.evaluated_step = -1
        self._setup = setup
        options = setup.recipe.early_stopping
        if options is not None:
            self._metric = setup.task.primary if options.metric == "auto" else options.metric
            # 1 is a goal that 2 reaches if higher is better.
            self._sign = 1.0 if reaches_goal(setup.task, self._metric, 2.0, 1.0) else -1.0
        self._limits = setup.recipe.model_dump(mode="json", include=set(LIMIT_KEYS))
        # Of early stopping: the best value, and the position at which it was reached.
        self._value, self._position = math.nan, 0

    def add_evaluation(self, metrics: Mapping[str, float], step: int, position: int, seconds: float) -> bool:
        """Adds an evaluation; returns True if the run has to end.

        Args:
            position: number of samples served before it.
            seconds: seconds of the clock.
        """
        self.evaluated_step = step
        goals, task = self._setup.recipe.stop_at, self._setup.task
        if goals and all(reaches_goal(task, name, metrics[name], goal) for name, goal in goals.items()):
            self.reached_s = seconds
        stopping = self._find_early_stop(metrics, position)
        self.reason = self.reason or stopping
        return self.reached_s is not None or stopping is not None

    def _find_early_stop(self, metrics: Mapping[str, float], position: int) -> str | None:
        options, epoch = self._setup.recipe.early_stopping, self._setup.epoch
        if options is None:
            return None
        value = metrics[self._metric]
        # NaN is never an improvement, and any number is one after NaN.
        was_nan = math.isnan(self._value) and not math.isnan(value)
        if was_nan or self._sign * (value - self._value) > options.min_delta:
            self._value, self._position = value, position
        if position - self._position < options.patience_epochs * epoch:
            return None
        more = f" by more than {options.min_delta:g}" if options.min_delta else ""
        since = f"epoch {self._position / epoch:.4g} ({self._value:.4g})"
        return f"early_stopping: {self._metric} has not improved{more} since {since}"

    def state(self, *, is_final: bool) -> dict[str, Any]:
        """Returns entries for the scalars of a checkpoint. Args: is_final: the run is at its end."""
        about: dict[str, Any] = {"reason": self.reason, "is_final": is_final, "evaluated_step": self.evaluated_step}
        about["limits"] = self._limits
        state: dict[str, Any] = {"reached_s": self.reached_s, "ended": about, "early_stopping": None}
        if self._setup.recipe.early_stopping is not None:
            best = {"value": self._value, "position": self._position}
            state["early_stopping"] = {"metric": self._metric, **best}
        return state

    def load_state(self, scalars: Mapping[str, Any], where: str) -> bool:
        """Restores the entries of `state`; returns True if the run was at its end.

        Raises:
            CheckpointError: they are damaged.
        """
        # Checkpoints of older versions, and runs that began without early_stopping, lack these entries.
        about = scalars.get("ended") or {}
        limits = about.get("limits") or self._limits
        self.evaluated_step = about.get("evaluated_step", -1)
        # A run that is extended goes on past what had ended it.
        self.reached_s = scalars["reached_s"] if limits.get("stop_at") == self._limits["stop_at"] else None
        self.reason = about.get("reason") if limits == self._limits else None
        best = scalars.get("early_stopping")
        if best is not None and self._setup.recipe.early_stopping is not None:
            fields = best if isinstance(best, dict) else {}
            value, position = fields.get("value"), fields.get("position")
            if not is_any_number(value) or not is_whole_number(position) or value is None or position is None:
                raise CheckpointError("its manifest has no good scalars.early_stopping", where=where)
            # An extended run may watch another metric, which begins anew.
            if fields.get("metric") == self._metric:
                self._value, self._position = float(value), int(position)
        return self.reached_s is not None or (self.reason is not None and about["is_final"])
