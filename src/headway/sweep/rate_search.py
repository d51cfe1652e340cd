"""The search of `headway sweep --lr`: row by row a range test, and three trainings around its proposal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import final

import torch

from headway.core.errors import HeadwayError
from headway.core.recipe import LoadedRecipe
from headway.core.text_format import pluralise
from headway.setup.recipe import TrainRecipe
from headway.sweep.parameter import ParameterRecipe
from headway.sweep.range_test import RangeTest, measure_ranges
from headway.sweep.rate_curve import count_test_steps, propose_rate
from headway.sweep.rate_table import FACTORS, Candidate, RateRow
from headway.sweep.rates_folder import RatesFolder
from headway.sweep.space_recipe import SpaceRecipe
from headway.sweep.sweep import SweepOptions, SweepResult, SweepStoppedError, resume_sweep, start_sweep
from headway.sweep.sweep_folder import SweepFolder
from headway.sweep.trials import Probe, count_steps

LOG = logging.getLogger("headway.sweep")

MEASURED_STEPS = 1000
"""Steps of a training from which its costs are measured before the three: some 20 steps, and two evaluations."""


@final
class RateSearch:
    """Finds the rate of each row, and keeps in the folder what an earlier call has found.

    A row that fails does not end the search: it has its reason.

    Args:
        rates: the folder.
        probe: facts about the recipe.
        slots: processes that train at once; see `SweepOptions`.

    Attributes:
        rows: the rows that are done.
        errors: why some of them have failed.
    """

    def __init__(self, rates: RatesFolder, probe: Probe, slots: int | None) -> None:
        self._rates, self._probe, self._slots = rates, probe, slots
        self.rows, self.errors = list[RateRow](), list[HeadwayError]()

    def add_batch(self, variants: Sequence[LoadedRecipe[TrainRecipe]]) -> None:
        """Adds the rows of one batch.

        Args:
            variants: the recipe with each of the optimizers.

        Raises:
            HeadwayError: a signal has stopped the search.
        """
        begun = [self._begin_row(variant) for variant in variants]
        waiting = [
            (place, variants[place], self._count_steps(variants[place]))
            for place, row in enumerate(begun)
            if row.proposal is None and not row.failure
        ]
        for _, variant, steps in waiting:
            what = f"range test of {pluralise(count_test_steps(steps), 'step')}"
            LOG.info(f"{variant.recipe.optimizer.name} at batch {variant.recipe.global_batch:,}: {what}.")
        # Together, so that each batch is decoded once.
        tests = measure_ranges(
            [variant for _, variant, _ in waiting], [count_test_steps(steps) for _, _, steps in waiting]
        )
        # The processes of the sweep need the memory of a GPU that this one no longer uses.
        torch.cuda.empty_cache()
        for (place, variant, steps), test in zip(waiting, tests, strict=True):
            begun[place] = self._propose(begun[place], variant, test, steps)
        for row, variant in zip(begun, variants, strict=True):
            self.rows.append(row if row.failure or row.lr is not None else self._confirm(row, variant))

    def _begin_row(self, variant: LoadedRecipe[TrainRecipe]) -> RateRow:
        """Returns a row as an earlier call has left it, or a new one."""
        optimizer, own = variant.recipe.optimizer, self._probe.loaded.recipe.optimizer
        lr = optimizer.lr if optimizer.name == own.name and isinstance(optimizer.lr, float) else None
        row = RateRow(optimizer=optimizer.name, batch=variant.recipe.global_batch, recipe_lr=lr)
        if (kept := self._rates.read_row(row.optimizer, row.batch)) is not None:
            return kept
        try:
            count_test_steps(self._count_steps(variant))
        except HeadwayError as error:
            return self._fail(row, error)
        return row

    def _propose(
        self, row: RateRow, variant: LoadedRecipe[TrainRecipe], test: RangeTest | HeadwayError, steps: int
    ) -> RateRow:
        """Returns the row with what its range test has shown."""
        if isinstance(test, HeadwayError):
            return self._fail(row, test)
        row = replace(row, curve=test.curve, work=test.steps / steps)
        try:
            proposal = propose_rate(test.curve, is_layer_wise=variant.recipe.optimizer.is_layer_wise)
        except HeadwayError as error:
            return self._fail(row, error)
        row = replace(row, minimum=proposal.minimum, proposal=proposal.rate)
        self._rates.write_row(row)
        what = f"the loss is lowest at {proposal.minimum:.3g}, so {proposal.rate:.3g} is proposed"
        LOG.info(f"{row.optimizer} at batch {row.batch:,}: {what}.")
        return row

    def _confirm(self, row: RateRow, variant: LoadedRecipe[TrainRecipe]) -> RateRow:
        """Trains the proposed rate and its neighbours, and returns the row with the best one."""
        try:
            result = self._train(row, variant)
        except SweepStoppedError:
            raise self._rates.search.explain_stop() from None
        except HeadwayError as error:
            return self._fail(row, error)
        row = replace(
            row,
            candidates=tuple(
                Candidate(lr=trial.values["optimizer.lr"], score=trial.scores[-1]) for trial in result.state.trials
            ),
            lr=result.values["optimizer.lr"],
            score=result.score,
            work=row.work + len(FACTORS),
        )
        self._rates.write_row(row)
        return row

    def _train(self, row: RateRow, variant: LoadedRecipe[TrainRecipe]) -> SweepResult:
        assert row.proposal is not None
        folder = self._rates.find_sweep(row)
        if SweepFolder(folder).settings_path.exists():
            return resume_sweep(folder)
        tried = tuple(float(f"{row.proposal * factor:.3g}") for factor in FACTORS)
        space = SpaceRecipe(method="grid", parameters={"optimizer.lr": ParameterRecipe(choice=tried)})
        # A measurement would cost more than it tells about a short training.
        measures = self._count_steps(variant) >= MEASURED_STEPS
        budget = Fraction(len(tried))
        options = SweepOptions(budget=budget, method="random", slots=self._slots, seeds=0, measures=measures)
        return start_sweep(variant, space, options, folder, replace(self._probe, loaded=variant))

    def _count_steps(self, variant: LoadedRecipe[TrainRecipe]) -> int:
        return count_steps(variant, self._probe.samples)

    def _fail(self, row: RateRow, error: HeadwayError) -> RateRow:
        self.errors.append(error)
        LOG.warning(f"{row.optimizer} at batch {row.batch:,}: {error}")
        return replace(row, failure=str(error))
