"""The learning rates that were found, as a table, as JSON, and as an exponent of the batch."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.text_format import align_table
from headway.sweep.rate_curve import GRID, RateCurve

FACTORS = (1.0, 1 / 3, 3.0)
"""The rates that are tried, as factors on the proposed one. Among equal scores the first of them wins."""
RESOLUTION = math.log(3) / math.sqrt(12)
"""Standard deviation of the logarithm of a rate that is known to half of the distance between two of them."""


@final
@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A rate with which the recipe was trained.

    Attributes:
        lr: the rate.
        score: its score; None if it failed.
    """

    lr: float
    score: float | None


@final
@dataclass(frozen=True, kw_only=True)
class RateRow:
    """One optimizer at one batch.

    Attributes:
        recipe_lr: the rate that the recipe has for this batch; None: it is of another optimizer.
        curve: the range test; None if it failed at its first step.
        minimum, proposal: the rate at which its loss is lowest, and what it proposes.
        candidates: the rates that were tried; `lr` is the best of them, and `score` its score.
        work: full trainings that all this cost.
        failure: why there is no rate; empty if there is one.
    """

    optimizer: str
    batch: int
    recipe_lr: float | None = None
    curve: RateCurve | None = None
    minimum: float | None = None
    proposal: float | None = None
    candidates: tuple[Candidate, ...] = ()
    lr: float | None = None
    score: float | None = None
    work: float = 0.0
    failure: str = ""

    @property
    def is_at_edge(self) -> bool:
        """True if the best rate is the lowest or the highest one that was tried."""
        rates = [one.lr for one in self.candidates]
        return bool(rates) and self.lr in (min(rates), max(rates))

    def to_json(self) -> dict[str, Any]:
        """Returns the row as a JSON object."""
        numbers = ("recipe_lr", "minimum", "proposal", "lr", "score", "work")
        tree: dict[str, Any] = {"optimizer": self.optimizer, "batch": self.batch}
        tree |= {name: getattr(self, name) for name in numbers}
        tree["candidates"] = [vars(one) for one in self.candidates]
        if self.curve is not None:
            losses, smoothed = list(self.curve.losses), self.curve.smoothed
            tree["range_test"] = {"rates": list(self.curve.rates), "losses": losses, "smoothed": smoothed}
        return tree | ({"failure": self.failure} if self.failure else {})

    @staticmethod
    def from_json(tree: dict[str, Any]) -> RateRow:
        """Reads a row that `to_json` has written.

        Raises:
            KeyError, TypeError: it is none.
        """
        values, test = dict(tree), tree.get("range_test")
        values.pop("range_test", None)
        values["candidates"] = tuple(Candidate(**one) for one in tree["candidates"])
        if test is not None:
            values["curve"] = RateCurve(tuple(test["rates"]), tuple(test["losses"]))
        return RateRow(**values)


@final
@dataclass(frozen=True, kw_only=True)
class ScalingFit:
    """How the rate of one optimizer follows the batch: rate ~ batch ** exponent.

    Attributes:
        interval: half of the width of the exponent's 95 % interval.
    """

    optimizer: str
    exponent: float
    interval: float

    def describe(self) -> str:
        """Describes the fit, for the terminal."""
        low, high = self.exponent - self.interval, self.exponent + self.interval
        rules = {0.0: "none", 0.5: "sqrt", 1.0: "linear"}
        fitting = [name for exponent, name in rules.items() if low <= exponent <= high]
        fits = f"scale: {' or '.join(fitting)}" if fitting else "no scaling rule"
        return f"{self.optimizer}: rate ~ batch^{self.exponent:.2f} +- {self.interval:.2f} (95 %), which fits {fits}."


@final
@dataclass(frozen=True, kw_only=True)
class RatesResult:
    """The learning rates of a recipe.

    Attributes:
        folder: where all of it lies.
        objective: the metric by which rates were compared.
        rule: scaling rule of the recipe, and its exponent.
        recipe: the recipe with the found rate; `chosen` is the row that it has it from. None: no row has a rate.
        seconds: wall time.
    """

    folder: Path
    objective: str
    rows: tuple[RateRow, ...]
    fits: tuple[ScalingFit, ...]
    rule: tuple[str, float]
    recipe: Path | None
    chosen: RateRow | None
    seconds: float

    @property
    def has_failed(self) -> bool:
        """True if a row has no rate."""
        return any(row.failure for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        chosen = self.chosen
        return {
            "folder": str(self.folder),
            "objective": self.objective,
            "rows": [row.to_json() for row in self.rows],
            "fits": [vars(fit) for fit in self.fits],
            "rule": {"scale": self.rule[0], "exponent": self.rule[1]},
            "chosen": None
            if chosen is None
            else {name: getattr(chosen, name) for name in ("optimizer", "batch", "lr")},
            "recipe": None if self.recipe is None else str(self.recipe),
            "work": sum(row.work for row in self.rows),
            "seconds": self.seconds,
        }

    def describe(self) -> str:
        """Describes the result, for the terminal."""
        heading = ["optimizer", "batch", "lowest loss at", "proposed", "confirmed", self.objective, "recipe's lr"]
        cells = [[row.optimizer, f"{row.batch:,}", *map(_format, _list_numbers(row))] for row in self.rows]
        lines = align_table([heading, *cells])
        lines += [f"{row.optimizer} at {row.batch:,}: {row.failure}" for row in self.rows if row.failure]
        for row in self.rows:
            if row.is_at_edge and row.lr is not None:
                side = "lower" if row.lr == min(one.lr for one in row.candidates) else "higher"
                lines.append(
                    f"{row.optimizer} at {row.batch:,}: {row.lr:.3g} is the {side[:-2]}est rate tried; one {side} still"
                    " may be better."
                )
        lines += [fit.describe() for fit in self.fits]
        if self.fits:
            lines.append(f"The recipe's rule is {self.rule[0]}, exponent {self.rule[1]:g}.")
        work = sum(row.work for row in self.rows)
        grid = GRID * len(self.rows)
        lines.append(f"Cost: {work:.3g} full trainings; a grid of {GRID} rates takes {grid}.")
        if self.chosen is None:
            again = f"headway sweep --lr --resume {shlex.quote(str(self.folder))}"
            lines.append(f"No rate was found, so no recipe was written. To try the same recipe again: {again}")
        else:
            lines.append(f"Recipe with lr {_format(self.chosen.lr)}: {self.recipe}")
        return "\n".join(lines)


def _list_numbers(row: RateRow) -> list[float | None]:
    return [row.minimum, row.proposal, row.lr, row.score, row.recipe_lr]


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def fit_exponent(optimizer: str, batches: Sequence[int], rates: Sequence[float]) -> ScalingFit:
    """Fits rate ~ batch ** exponent by least squares of the logarithms.

    The interval takes each rate as known within a factor of 1.7, half of the distance between two that were tried. If
    the rates scatter more than that around the line, it is wider in proportion.

    Args:
        batches: at least two different ones.
    """
    x, y = [math.log(batch) for batch in batches], [math.log(rate) for rate in rates]
    line = statistics.linear_regression(x, y)
    residuals = [b - line.slope * a - line.intercept for a, b in zip(x, y, strict=True)]
    scatter = math.sqrt(sum(one * one for one in residuals) / (len(x) - 2)) if len(x) > 2 else 0.0
    mean = statistics.fmean(x)
    width = math.sqrt(sum((one - mean) ** 2 for one in x))
    return ScalingFit(optimizer=optimizer, exponent=line.slope, interval=1.96 * max(RESOLUTION, scatter) / width)
