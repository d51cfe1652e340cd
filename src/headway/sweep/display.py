"""The live view of a sweep: a table on a terminal, a line for each finished rung elsewhere."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from types import TracebackType
from typing import final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headway.core.recipe_yaml import dump_in_line
from headway.core.text_format import format_duration, pluralise
from headway.sweep.plan_text import name_level
from headway.sweep.state import State, Trial, list_scores, rank_trials, select_best

LOG = logging.getLogger("headway.sweep")

MOST_ROWS = 10
REFRESH_S = 0.5
LEAST_TRIALS = 4
"""Trials of a rung from which ties are worth a word."""
TIED_OF = 9
"""Trials of asha from which its first rung is looked at for ties."""


@final
class SweepDisplay:
    """Shows how far a sweep is, for the duration of a block.

    Args:
        objective: the metric by which trials are compared.
        predicted_s: predicted wall seconds; None: unknown.
        console: where it is shown.
    """

    def __init__(self, objective: str, predicted_s: float | None, console: Console | None = None) -> None:
        self._objective, self._predicted_s = objective, predicted_s
        console = console or Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._began = self._shown = time.monotonic()
        self._told = set[tuple[int, int]]()
        # The best trial of each rung of asha.
        self._best = dict[int, int]()
        self._has_warned = False
        self._newest: State | None = None

    def __enter__(self) -> SweepDisplay:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: State, steps: int) -> None:
        """Shows the newest state, a few times a second at most. Args: steps: made by all trials so far."""
        if state is not self._newest:
            self._newest = state
            self._tell_rungs(state)
        now = time.monotonic()
        if self._live is not None and now - self._shown > REFRESH_S:
            self._live.update(self._build_table(state, steps), refresh=True)
            self._shown = now

    def _tell_rungs(self, state: State) -> None:
        """Writes a line for each rung that has just ended; for `asha`, for each new best trial of the highest rung."""
        for number, bracket in enumerate(state.plan.brackets):
            trials = [trial for trial in state.trials if state.plan.find_bracket(trial.number) is bracket]
            for rung, level in enumerate(bracket.levels):
                there = [trial for trial in trials if trial.rung >= rung and trial.first_rung <= rung]
                ended = [trial for trial in there if trial.has_result(rung)]
                if state.plan.method == "asha":
                    self._tell_best(state, rung, ended)
                    # Its rungs end with the sweep, so ties are looked for in the first trials.
                    if rung == 0 and len(ended) >= TIED_OF:
                        self._tell_ties(ended, level)
                    continue
                if (number, rung) in self._told or len(ended) < max(1, bracket.sizes[rung]):
                    continue
                scored = select_best(ended, rung, len(ended), state.plan)
                self._told.add((number, rung))
                best = "all failed"
                if scored:
                    best = f"best {self._objective} {scored[0].get_score(rung):.4f} (trial {scored[0].number})"
                failed = f", {len(ended) - len(scored)} failed" if len(scored) < len(ended) else ""
                LOG.info(
                    f"{pluralise(len(ended), 'trial')} trained to {name_level(level, len(ended))}: {best}{failed}."
                )
                if rung == 0 and len(ended) >= LEAST_TRIALS:
                    self._tell_ties(ended, level)

    def _tell_best(self, state: State, rung: int, ended: Sequence[Trial]) -> None:
        """Writes a line if there is a new best trial of a rung, and no trial has reached a higher one."""
        best = next(iter(select_best(ended, rung, 1, state.plan)), None)
        if best is None or self._best.get(rung) == best.number:
            return
        self._best[rung] = best.number
        if any(trial.has_result(rung + 1) for trial in state.trials):
            return
        how = "the first one" if len(ended) == 1 else "the best so far"
        where = name_level(state.plan.brackets[0].levels[rung], 1)
        LOG.info(f"Trial {best.number} trained to {where}, {how}: {self._objective} {best.get_score(rung):.4f}.")

    def _tell_ties(self, ended: Sequence[Trial], level: Fraction) -> None:
        """Warns once if scores at a first rung say little."""
        scores = Counter(score for trial in ended if (score := trial.get_score(0)) is not None)
        tied = max(scores.values(), default=0)
        if 2 * tied < len(ended) or level == 1 or self._has_warned:
            return
        self._has_warned = True
        what = f"{tied} of {pluralise(len(ended), 'trial')} are tied at {name_level(level, tied)}"
        LOG.warning(f"{what}: raise --smallest.")

    def _build_table(self, state: State, steps: int) -> Group:
        seconds = time.monotonic() - self._began
        left = "" if self._predicted_s is None else f" of about {format_duration(self._predicted_s)}"
        training = sum(trial.is_training for trial in state.trials)
        trials = f"{pluralise(len(state.trials), 'trial')}, {training} to train"
        title = f"{trials}; {pluralise(steps, 'step')}; {format_duration(seconds)}{left}"
        table = Table(box=None)
        for name in ("trial", self._objective, "trained", "values"):
            table.add_column(name, justify="left" if name == "values" else "right", no_wrap=name == "values")
        for number in rank_trials(state)[:MOST_ROWS]:
            trial = state.trials[number]
            level, score = list_scores(state, trial)[-1]
            values = ", ".join(f"{key}={dump_in_line(value)}" for key, value in trial.values.items())
            table.add_row(str(number), f"{score:.4f}", str(level), values)
        # A title of the table itself would be no wider than its columns.
        return Group(Text(title), table)
