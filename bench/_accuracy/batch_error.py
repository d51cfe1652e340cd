"""Error against the batch by linear scaling alone: one learning rate, found at 256, and no sweep at any other batch.

This is the question of figure 1 of Goyal et al. 2017, "Accurate, Large Minibatch SGD" (arXiv 1706.02677): the rate
grows as the batch does, from the small batch's rate over two epochs. Batches up to 256 need no warm-up. Runs of the
table of `bench.large_batch` that are the same count here too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, final

from bench._accuracy import batch_arms
from bench._accuracy.batch_arms import BEST_SGD, LARGE, LARGEST, SEEDS, SMALL, Cell, Job
from bench._accuracy.results import Results
from bench._drawing import FOLDER, LEFT, Axis, draw

BATCHES = tuple(64 * 2**power for power in range(9))
"""Up to 16,384, which is a third of the 50,000 images: a batch of 64 k would need more than all of them."""
BASE_LR = BEST_SGD[SMALL]
FIRST = (SMALL, LARGE, LARGEST)
"""Batches that get all seeds first."""


def build_job(batch: int, seed: int) -> Job:
    """Builds a run by linear scaling."""
    if batch <= SMALL:
        return Job(Cell(batch, "sgd"), BASE_LR * batch / SMALL, seed)
    # This arm multiplies the rate by batch / SMALL itself.
    return Job(Cell(batch, "linear"), BASE_LR, seed)


@final
class ErrorCurve:
    """The kept runs, by batch.

    Args:
        records: of the results file; all others are left out.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        kept = {(one["settings"], one["batch"], one["lr"], one["seed"]): one for one in records if _is_of_table(one)}
        self._errors: dict[tuple[int, int], float] = {}
        for batch in BATCHES:
            for seed in SEEDS:
                job = build_job(batch, seed)
                found = kept.get((batch_arms.settings(job.cell), batch, job.lr, seed))
                if found is not None:
                    self._errors[batch, seed] = 100 * (1 - found["accuracy"])

    def list_errors(self, batch: int) -> list[float]:
        """Lists the errors at a batch by seed, in percent."""
        return [self._errors[batch, seed] for seed in SEEDS if (batch, seed) in self._errors]

    def list_missing(self) -> list[Job]:
        """Lists the runs to be done: one seed of every batch, then the others of FIRST, then all others."""
        missing = [(batch, seed) for seed in SEEDS for batch in BATCHES if (batch, seed) not in self._errors]
        missing.sort(key=lambda pair: (pair[1] != SEEDS[0], pair[0] not in FIRST))
        return [build_job(batch, seed) for batch, seed in missing]

    def list_rows(self) -> list[tuple[str, ...]]:
        """Lists the table: batch, learning rate, error of the mean with its spread, seeds."""
        rows: list[tuple[str, ...]] = [("batch", "learning rate", "error %", "seeds")]
        for batch in BATCHES:
            errors = self.list_errors(batch)
            rows.append((f"{batch:,}", f"{BASE_LR * batch / SMALL:g}", format_errors(errors), str(len(errors))))
        return rows


def _is_of_table(record: dict[str, Any]) -> bool:
    return record.get("bench") == "table" and record["longer"] == 1.0


def format_errors(errors: list[float]) -> str:
    """Formats the mean of seeds, with the standard deviation if there are several."""
    if not errors:
        return "missing"
    mean = f"{statistics.fmean(errors):.1f}"
    return mean if len(errors) == 1 else f"{mean} +- {statistics.stdev(errors):.1f}"


def draw_errors(curve: ErrorCurve) -> str:
    """Draws the errors of `bench.large_batch --error`: each seed, and the means as a line."""
    found = {batch: errors for batch in BATCHES if (errors := curve.list_errors(batch))}
    points = [(batch, error) for batch, errors in found.items() for error in errors]
    means = [(batch, statistics.fmean(errors)) for batch, errors in found.items()]
    axes = Axis("batch", BATCHES), Axis("evaluation error, %", range(20, 101, 20), linear=True)
    return draw(*axes, points, means, ("one seed", "mean of the seeds"), legend_x=LEFT + 16)


def write_errors(results: Results) -> None:
    """Writes the picture of the error by batch into docs/images."""
    (FOLDER / "error-by-batch.svg").write_text(draw_errors(ErrorCurve(results.all())), encoding="utf-8")
