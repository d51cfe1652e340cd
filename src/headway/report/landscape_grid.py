"""Sharpness beside accuracy: the runs of a landscape in a grid over two recipe keys, and rank correlations."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from headway.core.errors import UsageError, suggest_nearest
from headway.core.recipe import format_value
from headway.core.statistics import compute_rank_correlation

LOG = logging.getLogger("headway.report")

# Keys, and parts with all their keys, that are no axis of a grid unless they are asked for: runs that differ in the
# seed alone are repeats, and the others change the records of a run, not its minimum. A sweep that stops bad trials
# early sets `evaluate.at_steps`, which follows the batch.
NO_AXES = ("seed", "evaluate", "checkpoint", "observe", "log_every_steps", "sinks")
# Runs from which a rank correlation is given: of two it is 1 or -1, whatever they are.
LEAST_RUNS = 3
# Measures of sharpness, by their key in JSON, and their words.
MEASURES = {"keskar": "Keskar's sharpness, %", "eigenvalue": "largest eigenvalue", "relative": "by relative change"}


@final
@dataclass(frozen=True, kw_only=True)
class RunScore:
    """Numbers of one run in a grid: its recipe values, its metric, and its sharpness by measure."""

    name: str
    recipe: Mapping[str, Any]
    metric: float | None
    # By the keys of MEASURES; None: not measured, or not finite.
    sharpness: Mapping[str, float | None]


@final
@dataclass(frozen=True, kw_only=True)
class GridCell:
    """The runs at one pair of values; numbers are their means, None if no run has one."""

    column: Any
    row: Any
    runs: list[str]
    metric: float | None
    sharpness: dict[str, float | None]


@final
@dataclass(frozen=True, kw_only=True)
class RunGrid:
    """Runs over the values of two recipe keys: `keys` are those of the columns and of the rows."""

    keys: tuple[str, str]
    columns: list[Any]
    rows: list[Any]
    # Pairs of values without a run have no cell.
    cells: list[GridCell]

    def find(self, column: Any, row: Any) -> GridCell | None:
        """Returns the cell at a pair of values."""
        return next((cell for cell in self.cells if (cell.column, cell.row) == (column, row)), None)


@final
@dataclass(frozen=True, kw_only=True)
class SharpnessCorrelation:
    """Spearman's rank correlation of one measure of sharpness with the metric, over the runs that have both."""

    measure: str
    runs: int
    # None: fewer than LEAST_RUNS runs, or one side is constant.
    rank_correlation: float | None

    def describe(self) -> str:
        """Returns the correlation and its count in words, such as `-0.83 (12 runs)`."""
        value = "unknown" if self.rank_correlation is None else f"{self.rank_correlation:+.2f}"
        return f"{value} ({self.runs} runs)"


@final
@dataclass(frozen=True, kw_only=True)
class SharpnessComparison:
    """Sharpness beside a metric, over the runs of a landscape.

    Attributes:
        metric: name of the metric: that of the task, or the loss.
        which: data set of the metric.
        grid: the runs over two keys; None: no two keys were chosen.
        correlations: one for each measure of sharpness; empty if none was measured.
    """

    metric: str
    which: str
    scores: list[RunScore]
    grid: RunGrid | None
    correlations: list[SharpnessCorrelation]


def parse_keys(over: str | None) -> tuple[str, str] | None:
    """Reads two recipe keys from `batch,optimizer.weight_decay`; None stays None.

    Raises:
        UsageError: there are not two different keys.
    """
    if over is None:
        return None
    keys = [key.strip() for key in over.split(",")]
    if len(keys) != 2 or not all(keys) or keys[0] == keys[1]:
        fix = "Name two recipe keys with a comma between them, for example --over batch,optimizer.weight_decay."
        raise UsageError(f"--over {over!r} is not two keys", fix=fix)
    return keys[0], keys[1]


def list_differing_keys(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lists the keys that have several values over the recipes, in the order of the first recipe."""
    every = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [key for key in every if len({format_value(recipe.get(key)) for recipe in recipes}) > 1]


def choose_keys(recipes: Sequence[Mapping[str, Any]], over: tuple[str, str] | None) -> tuple[str, str] | None:
    """Chooses the keys of a grid: those of `over`, or the two that differ if there are exactly two beside NO_AXES.

    None: fewer than two differ, or more, which a message then lists.

    Raises:
        UsageError: a key of `over` does not differ between the recipes.
    """
    differing = list_differing_keys(recipes)
    if over is not None:
        for key in over:
            if key not in differing:
                known = f"Keys that differ: {', '.join(differing)}." if differing else "Their recipes are the same."
                hint = suggest_nearest(key, differing, only_close=True) if differing else ""
                raise UsageError(f"{key} has the same value in all runs", where="--over", fix=f"{hint} {known}".strip())
        return over
    axes = [key for key in differing if key.partition(".")[0] not in NO_AXES]
    if len(axes) > 2:
        LOG.info(
            f"The runs differ in {len(axes)} keys ({', '.join(axes)}), so no grid is drawn. Name two of them, for "
            f"example --over {axes[0]},{axes[1]}."
        )
    return (axes[0], axes[1]) if len(axes) == 2 else None


def build_grid(scores: Sequence[RunScore], keys: tuple[str, str]) -> RunGrid:
    """Arranges runs in a grid: numbers in their order, other values as texts. Runs of one cell are averaged."""
    columns, rows = (_list_values([score.recipe.get(key) for score in scores]) for key in keys)
    cells = []
    for row in rows:
        for column in columns:
            place = tuple(map(format_value, (column, row)))
            here = [one for one in scores if tuple(format_value(one.recipe.get(key)) for key in keys) == place]
            if here:
                cells.append(_build_cell(column, row, here))
    return RunGrid(keys=keys, columns=columns, rows=rows, cells=cells)


def _build_cell(column: Any, row: Any, here: Sequence[RunScore]) -> GridCell:
    sharpness = {measure: _average([one.sharpness.get(measure) for one in here]) for measure in MEASURES}
    names, metric = [one.name for one in here], _average([one.metric for one in here])
    return GridCell(column=column, row=row, runs=names, metric=metric, sharpness=sharpness)


def _list_values(values: Sequence[Any]) -> list[Any]:
    # Lists and mappings cannot be members of a set: their texts tell values apart.
    distinct = list({format_value(value): value for value in values}.values())
    is_number = {
        key: isinstance(value, int | float) and not isinstance(value, bool) for key, value in enumerate(distinct)
    }
    order = sorted(
        range(len(distinct)),
        key=lambda place: (
            not is_number[place],
            distinct[place] if is_number[place] else 0,
            format_value(distinct[place]),
        ),
    )
    return [distinct[place] for place in order]


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def correlate_sharpness(scores: Sequence[RunScore]) -> list[SharpnessCorrelation]:
    """Correlates each measure of sharpness with the metric; empty if no run has a sharpness, or there are too few."""
    out = []
    for measure in MEASURES:
        pairs = list_pairs(scores, measure)
        if not pairs or len(scores) < LEAST_RUNS:
            continue
        found = compute_rank_correlation(*zip(*pairs, strict=True)) if len(pairs) >= LEAST_RUNS else None
        out.append(SharpnessCorrelation(measure=measure, runs=len(pairs), rank_correlation=found))
    return out


def list_pairs(scores: Sequence[RunScore], measure: str) -> list[tuple[float, float]]:
    """Lists (sharpness, metric) of the runs that have both."""
    pairs = [(one.sharpness.get(measure), one.metric) for one in scores]
    return [(sharpness, metric) for sharpness, metric in pairs if sharpness is not None and metric is not None]
