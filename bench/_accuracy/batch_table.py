"""Evaluates the kept runs of `bench.large_batch`: missing runs, sweeps, tables and claims."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable
from typing import Any, final

from bench._accuracy.batch_arms import (
    ALIKE_ARMS,
    CELLS,
    EPOCHS,
    LARGE,
    LARGEST,
    LONGER,
    MATRIX_ARMS,
    NAMES,
    SEEDS,
    SMALL,
    TUNING_SEED,
    Cell,
    Job,
    first_grid,
    settings,
)
from bench._accuracy.results import made_by
from bench._common import Claim
from headway.sweep.steps_curve import extend_grid, is_at_edge

BASELINE, LINEAR, LAST = Cell(SMALL, "sgd"), Cell(LARGEST, "linear"), Cell(LARGEST, "ghost")
LAST_LARGE, ALIKE = Cell(LARGE, "ghost"), Cell(SMALL, "alike")
DECKS = (
    ("LARS, all parameters decayed (the deck's Table 6)", "linear", "lars"),
    ("LARS, weights decayed alone (Table 1)", "linear_no_decay", "no_decay"),
    ("no decay of b, beta, gamma, under SGD (Table 2)", "linear", "linear_no_decay"),
    ("no decay of b, beta, gamma, under LARS (Table 7)", "lars", "no_decay"),
)
SIDE_BY_SIDE = ("linear", "nag", "lbsgd")


@final
class Tables:
    """The kept runs, by cell.

    Args:
        records: of the results file; those of other benches or other settings are left out.
    """

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self._runs: dict[Cell, dict[tuple[float, int], float]] = {}
        self._commits: dict[Cell, list[str]] = {}
        for one in records:
            if one.get("bench") != "table" or one["arm"] not in NAMES:
                continue
            cell = Cell(one["batch"], one["arm"], one["longer"])
            if one["settings"] == settings(cell):
                self._runs.setdefault(cell, {})[one["lr"], one["seed"]] = one["accuracy"]
                self._commits.setdefault(cell, []).append(one.get("commit", ""))

    def tuned(self, cell: Cell) -> dict[float, float]:
        """Returns the accuracy by learning rate, of the seed that tunes."""
        runs = self._runs.get(Cell(cell.batch, cell.arm), {})
        return {lr: accuracy for (lr, seed), accuracy in sorted(runs.items()) if seed == TUNING_SEED}

    def best(self, cell: Cell) -> float | None:
        """Returns the learning rate that was chosen; None while the sweep is not done."""
        return extend_grid(self.tuned(cell), first_grid(cell))[1]

    def at_edge(self, cell: Cell) -> bool:
        """Returns True if the learning rate that was chosen is the lowest or highest tried."""
        return self.best(cell) is not None and is_at_edge(self.tuned(cell))

    def accuracies(self, cell: Cell) -> list[float]:
        """Returns the accuracies of the table's seeds, at the learning rate that was chosen."""
        runs, best = self._runs.get(cell, {}), self.best(cell)
        return [runs[best, seed] for seed in SEEDS if best is not None and (best, seed) in runs]

    def mean(self, cell: Cell) -> float | None:
        """Returns the mean accuracy of the table's seeds; None until all are there."""
        found = self.accuracies(cell)
        return statistics.fmean(found) if len(found) == len(SEEDS) else None

    def missing(self) -> list[Job]:
        """Lists the runs to be done as things stand; a sweep's end, and what is longer, follow from them."""
        out = []
        for cell in CELLS:
            lrs, best = extend_grid(self.tuned(cell), first_grid(cell))
            out += [Job(cell, lr, TUNING_SEED) for lr in lrs]
            out += self._seeds(cell, best)
        for last in (LAST_LARGE, LAST):
            if self.mean(BASELINE) is None or self.mean(last) is None:
                continue
            for longer in (1.0, *LONGER):
                cell = Cell(last.batch, last.arm, longer)
                mean = self.mean(cell)
                if mean is None:
                    out += self._seeds(cell, self.best(cell))
                    break
                if self._equal(mean):
                    break
        return out

    def _seeds(self, cell: Cell, best: float | None) -> list[Job]:
        kept = self._runs.get(cell, {})
        return [Job(cell, best, seed) for seed in SEEDS if best is not None and (best, seed) not in kept]

    def _equal(self, mean: float) -> bool:
        baseline = self.mean(BASELINE)
        return baseline is not None and mean >= baseline

    def sweeps(self) -> list[tuple[str, ...]]:
        """Lists every run of the seed that tunes."""
        rows: list[tuple[str, ...]] = [("batch", "arm", "accuracy by learning rate", "chosen")]
        for cell in CELLS:
            tried = "  ".join(f"{lr:g}: {1e2 * accuracy:.2f}" for lr, accuracy in self.tuned(cell).items())
            best = self.best(cell)
            chosen = "" if best is None else f"{best:g}{' (at the edge)' if self.at_edge(cell) else ''}"
            rows.append((str(cell.batch), NAMES[cell.arm], tried or "none yet", chosen or "not yet"))
        return rows

    def rows(self) -> list[tuple[str, ...]]:
        """The table: accuracy in % of three seeds, mean and spread, and the distance from the small batch."""
        rows: list[tuple[str, ...]] = [("batch", "arm", "lr", "accuracy %", "seeds", "points from 256", "commit")]
        baseline = self.mean(BASELINE)
        longer = [cell for cell in sorted(self._runs) if cell.longer != 1]
        for cell in [*sorted(CELLS, key=lambda cell: (cell.batch, list(NAMES).index(cell.arm))), *longer]:
            found, best, mean = self.accuracies(cell), self.best(cell), self.mean(cell)
            away = "" if mean is None or baseline is None else f"{1e2 * (mean - baseline):+.2f}"
            seeds = " ".join(f"{1e2 * one:.2f}" for one in found) or "missing"
            name = NAMES[cell.arm] + ("" if cell.longer == 1 else f", {cell.longer * EPOCHS:g} epochs")
            lr = "" if best is None else f"{best:g}{' (at the edge)' if self.at_edge(cell) else ''}"
            made = " ".join(sorted(set(self._commits.get(cell, []))))
            rows.append((str(cell.batch), name, lr, _spread(found), seeds, away, made))
        return rows

    def made_by(self) -> str:
        """The commits of all these runs."""
        return made_by(one for commits in self._commits.values() for one in commits)

    def decks(self) -> list[tuple[str, ...]]:
        """The same questions as the tables of the deck on large batches ask, at the largest batch."""
        rows: list[tuple[str, ...]] = [(f"batch {LARGEST}", "without %", "with %", "points")]
        for name, without, with_it in DECKS:
            before, after = (self.mean(Cell(LARGEST, arm)) for arm in (without, with_it))
            gain = "missing" if before is None or after is None else f"{1e2 * (after - before):+.2f}"
            spreads = (_spread(self.accuracies(Cell(LARGEST, arm))) for arm in (without, with_it))
            rows.append((name, *spreads, gain))
        for batch in (LARGE, LARGEST):
            for arm in SIDE_BY_SIDE:
                rows.append((f"{NAMES[arm]}, batch {batch}", "", _spread(self.accuracies(Cell(batch, arm))), ""))
        return rows

    def claims(self) -> tuple[list[Claim], list[str]]:
        """Returns what can be claimed yet, and what each other one lacks."""
        baseline, large, last, linear = (self.mean(cell) for cell in (BASELINE, LAST_LARGE, LAST, LINEAR))
        claims, lacking = [], list[str]()

        def void(name: str, *cells: Cell) -> bool:
            edges = [f"{NAMES[cell.arm]} at {cell.batch}" for cell in cells if self.at_edge(cell)]
            if edges:
                lacking.append(
                    f"{name}: void, the best learning rate lies at the edge of its sweep: {'; '.join(edges)}"
                )
            return bool(edges)

        how = f"means of {len(SEEDS)} seeds, {EPOCHS:g} epochs each"
        self._claim_best(claims, lacking, void, how)
        if baseline is None or large is None:
            lacking.append("gap_2048_lars: runs are missing")
        elif not void("gap_2048_lars", BASELINE, LAST_LARGE):
            text = f"batch 256 over LARS with all switches; {how}"
            claims.append(Claim("gap_2048_lars", 1e2 * (baseline - large), "points", text))
        if baseline is None or last is None or linear is None:
            lacking.append("recovered_8192: runs are missing")
        elif void("recovered_8192", BASELINE, LINEAR, LAST):
            pass
        elif baseline <= linear:
            lacking.append("recovered_8192: void, as linear scaling alone loses nothing")
        else:
            share = (last - linear) / (baseline - linear)
            text = f"of the {1e2 * (baseline - linear):.2f} points that linear scaling loses; {how}"
            claims.append(Claim("recovered_8192", share, "", text))
        for cell in (LAST_LARGE, LAST):
            epochs = self.epochs_to_equal(cell)
            name = f"epochs_to_equal_{cell.batch}"
            if isinstance(epochs, str):
                lacking.append(f"{name}: {epochs}")
            elif not void(name, BASELINE, cell):
                claims.append(Claim(name, epochs, "epochs", f"where batch {SMALL} takes {EPOCHS:g}; all switches"))
        return claims, lacking

    def _claim_best(self, claims: list[Claim], lacking: list[str], void: Callable[..., bool], how: str) -> None:
        """Adds what can be claimed of the most accurate arm at each large batch."""
        baseline, best = self.mean(BASELINE), self.find_best(LARGE)
        if baseline is None or best is None:
            lacking.append("gap_2048: runs are missing")
        elif not void("gap_2048", BASELINE, best[0]):
            text = f"SGD at {SMALL} over {NAMES[best[0].arm]}; {how}"
            claims.append(Claim("gap_2048", 1e2 * (baseline - best[1]), "points", text))
        alike, likewise = self.mean(ALIKE), self.find_best(LARGE, (*MATRIX_ARMS, *ALIKE_ARMS))
        if alike is None or likewise is None:
            lacking.append("gap_2048_alike: runs are missing")
        elif not void("gap_2048_alike", ALIKE, likewise[0]):
            text = f"{NAMES[ALIKE.arm]}, at {SMALL} over {NAMES[likewise[0].arm]}; {how}"
            claims.append(Claim("gap_2048_alike", 1e2 * (alike - likewise[1]), "points", text))
        same = None if best is None else Cell(SMALL, best[0].arm)
        small = self.mean(same) if same is not None and same in CELLS else None
        if best is not None and same not in CELLS:
            lacking.append(f"gap_2048_same: the best arm, {NAMES[best[0].arm]}, has no runs at {SMALL}")
        elif best is None or same is None or small is None:
            lacking.append("gap_2048_same: runs are missing")
        elif not void("gap_2048_same", same, best[0]):
            text = f"{NAMES[same.arm]} at both batches; {how}"
            claims.append(Claim("gap_2048_same", 1e2 * (small - best[1]), "points", text))
        largest = self.find_best(LARGEST)
        if largest is None:
            lacking.append("accuracy_8192: runs are missing")
        elif not void("accuracy_8192", largest[0]):
            claims.append(Claim("accuracy_8192", largest[1], "", f"{NAMES[largest[0].arm]}; {how}"))

    def find_best(self, batch: int, arms: Collection[str] = NAMES) -> tuple[Cell, float] | None:
        """Returns the most accurate of these arms at a batch, and its mean; None until all are there."""
        means = [(cell, self.mean(cell)) for cell in CELLS if cell.batch == batch and cell.arm in arms]
        known = [(cell, mean) for cell, mean in means if mean is not None]
        return max(known, key=lambda pair: pair[1]) if len(known) == len(means) else None

    def epochs_to_equal(self, cell: Cell) -> float | str:
        """Returns the shortest training tried whose mean is no less than the small batch's; or why there is none."""
        if self.mean(BASELINE) is None:
            return "runs are missing"
        for longer in (1.0, *LONGER):
            mean = self.mean(Cell(cell.batch, cell.arm, longer))
            if mean is None:
                return "runs are missing"
            if self._equal(mean):
                return longer * EPOCHS
        return f"more than {LONGER[-1] * EPOCHS:g}"


def _spread(accuracies: list[float]) -> str:
    if not accuracies:
        return "missing"
    mean = f"{1e2 * statistics.fmean(accuracies):.2f}"
    return mean if len(accuracies) < 2 else f"{mean} +- {1e2 * statistics.stdev(accuracies):.2f}"
