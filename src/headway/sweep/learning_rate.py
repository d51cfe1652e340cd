"""Finds the learning rate of a recipe: a range test proposes it, and three trainings confirm it."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from headway.core.errors import UsageError, UserCodeError, suggest_nearest
from headway.core.files import write_atomically
from headway.core.recipe import LoadedRecipe
from headway.core.recipe_override import collect_given_values, override_values
from headway.core.recipe_types import find_tagged_members
from headway.core.run_folder import RunFolder
from headway.optim.batch_scaling import BatchScaledRecipe
from headway.optim.optimizer_recipe import AnyOptimizerRecipe
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.sweep.rate_search import RateSearch
from headway.sweep.rate_table import RateRow, RatesResult, ScalingFit, fit_exponent
from headway.sweep.rates_folder import RatesFolder, RatesRecipe
from headway.sweep.sweep_folder import RATES_SETTINGS, SEARCHES, write_found_recipe
from headway.sweep.trials import Probe, probe_recipe
from headway.training.runs import load_recipe

LOG = logging.getLogger("headway.sweep")

ORIGIN = SEARCHES[RATES_SETTINGS]

EXPONENTS = {"linear": 1.0, "sqrt": 0.5, "none": 0.0}
"""Exponent of the batch in each scaling rule of a recipe."""


@final
@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """The optimizers and batches whose rates are wanted.

    Attributes:
        batches: batches of a step; empty: the recipe's.
        optimizers: names of optimizers; empty: the recipe's.
        slots: processes that train at once; None: one for each GPU, else one for each core.
    """

    batches: tuple[int, ...] = ()
    optimizers: tuple[str, ...] = ()
    slots: int | None = None


def find_rates(recipe: Path, overrides: Sequence[str], options: RateOptions, folder: Path | None = None) -> RatesResult:
    """Finds the learning rate for each optimizer and batch, in a new folder (default: sweeps/NAME).

    A range test of 100 steps or fewer proposes a rate; see `measure_ranges`. Then the recipe is trained with three
    rates, the proposed one and those a factor of 3 below and above it, and the best of them is found. Together that is
    at most four full trainings for each optimizer and batch, a quarter of what a grid of 16 rates takes.

    All three train to their end. Compared after a third of the training, before the schedule has fallen, the lowest
    rate won in 3 of 10 cases on digits, and its loss at the end was the higher one in 2 of them.

    Raises:
        UsageError: the folder exists, or an optimizer or a batch is none.
        RecipeError: the recipe has no evaluation set, or an optimizer refuses its values.
        HeadwayError: a signal has stopped the search. UserCodeError: the user's own code fails in all rows.
    """
    loaded = load_recipe(recipe, overrides)
    optimizers = _check_optimizers(options.optimizers, loaded.recipe.optimizer.name)
    batches = check_batches(options.batches) or (resolve_batch(loaded, 1).recipe.global_batch,)
    # Every combination, before anything trains.
    for batch in batches:
        for name in optimizers:
            build_variant(loaded, name, batch)
    folder = folder or RunFolder.find_free_name(Path("sweeps"), f"{loaded.recipe.name}-lr")
    rates = RatesFolder(folder)
    rates.search.expect_new()
    probe = probe_recipe(loaded, None, {"optimizer.lr": None})
    settings = RatesRecipe(
        recipe=collect_given_values(loaded), batches=batches, optimizers=optimizers, slots=options.slots
    )
    rates.search.create(settings, loaded)
    return _run(rates, settings, loaded, probe)


def resume_rates(folder: Path) -> RatesResult:
    """Continues a search that was stopped or killed, and tries again what had failed.

    Rows that are finished, range tests and trainings are not repeated, but for the range tests of a batch that were
    under way.

    Raises:
        UsageError: there is none in this folder, or another process works in it. HeadwayError: see `find_rates`.
    """
    rates = RatesFolder(folder)
    rates.search.expect_begun()
    settings, loaded = rates.search.read_settings()
    return _run(rates, settings, loaded, probe_recipe(loaded, None, {"optimizer.lr": None}))


def _run(rates: RatesFolder, settings: RatesRecipe, loaded: LoadedRecipe[TrainRecipe], probe: Probe) -> RatesResult:
    """Finds the rates that are missing, and writes the result."""
    began = time.monotonic()
    with rates.search.lock():
        search = RateSearch(rates, probe, settings.slots)
        try:
            for batch in settings.batches:
                # What the machine decides for the recipe holds for all of them.
                search.add_batch([build_variant(probe.loaded, name, batch) for name in settings.optimizers])
        except KeyboardInterrupt:
            raise rates.search.explain_stop() from None
        found = [row for row in search.rows if not row.failure]
        chosen, path = None, None
        if found:
            own_batch = resolve_batch(loaded, 1).recipe.global_batch
            chosen = _choose(found, own_batch, higher_is_better=probe.higher_is_better)
            variant = build_variant(loaded, chosen.optimizer, chosen.batch)
            path = _write_recipe(rates.folder, variant, chosen, probe.objective)
        lr = loaded.recipe.optimizer.lr
        rule = lr.scale if isinstance(lr, BatchScaledRecipe) else "none"
        result = RatesResult(
            folder=rates.folder,
            objective=probe.objective,
            rows=tuple(search.rows),
            fits=tuple(_fit_rates(found)),
            rule=(rule, EXPONENTS[rule]),
            recipe=path,
            chosen=chosen,
            seconds=time.monotonic() - began,
        )
        write_atomically(rates.folder / "lr.json", json.dumps(result.to_json(), indent=1) + "\n")
        # The user needs the traceback of their own code.
        if not found and isinstance(search.errors[0], UserCodeError):
            raise search.errors[0]
    return result


def build_variant(
    loaded: LoadedRecipe[TrainRecipe], optimizer: str, batch: int, origin: str = ORIGIN
) -> LoadedRecipe[TrainRecipe]:
    """Returns the recipe with another optimizer and batch, and a number as its learning rate.

    Args:
        origin: the origin of these values.

    Raises:
        RecipeError: the recipe refuses them.
    """
    recipe = loaded.recipe
    lr = recipe.optimizer.lr
    values: dict[str, object] = {"optimizer.lr": lr.compute_value(batch) if isinstance(lr, BatchScaledRecipe) else lr}
    if optimizer != recipe.optimizer.name:
        values["optimizer.name"] = optimizer
    if recipe.batch != batch:
        values["batch"] = batch
    # A warm-up from the rate of the small batch needs the rule; its factor stays.
    if isinstance(lr, BatchScaledRecipe) and recipe.schedule.warmup.start == "base":
        values["schedule.warmup_start"] = min(1.0, 1 / lr.compute_factor(batch))
    return override_values(loaded, values, origin)


def _check_optimizers(names: Sequence[str], own: str) -> tuple[str, ...]:
    known = {name for name in find_tagged_members(AnyOptimizerRecipe) if name != "own"} | {own}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no optimizer {name!r}", fix=suggest_nearest(name, known))
    return tuple(dict.fromkeys(names)) or (own,)


def check_batches(batches: Sequence[int]) -> tuple[int, ...]:
    for batch in batches:
        if batch < 1:
            raise UsageError(f"a batch of {batch} has no sample", fix="Name batches of 1 or more.")
    return tuple(sorted(set(batches)))


def _choose(rows: Sequence[RateRow], own_batch: int, *, higher_is_better: bool) -> RateRow:
    """Returns the row with the best score, among those of the recipe's own batch if there are any."""
    among = [row for row in rows if row.batch == own_batch] or rows
    sign = 1 if higher_is_better else -1
    return max(among, key=lambda row: sign * (row.score or 0.0))


def _fit_rates(rows: Sequence[RateRow]) -> list[ScalingFit]:
    """Returns the fit of each optimizer that has rates at two batches or more."""
    fits = []
    for name in dict.fromkeys(row.optimizer for row in rows):
        points = [(row.batch, row.lr) for row in rows if row.optimizer == name and row.lr is not None]
        if len(points) > 1:
            fits.append(fit_exponent(name, *zip(*points, strict=True)))
    return fits


def _write_recipe(folder: Path, variant: LoadedRecipe[TrainRecipe], row: RateRow, objective: str) -> Path:
    """Writes the recipe with the found rate, with its evidence above it."""
    comments = [
        f"optimizer.lr {row.lr:.3g} was found by headway sweep --lr for {row.optimizer} at batch {row.batch:,}.",
        f"Range test: the loss is lowest at {row.minimum:.3g}; it proposes {row.proposal:.3g}.",
        *(
            f"  lr {one.lr:.3g}: " + ("it failed" if one.score is None else f"{objective} {one.score:.4f}")
            for one in sorted(row.candidates, key=lambda one: one.lr)
        ),
        "Each score is that of one training.",
    ]
    found = override_values(variant, {"optimizer.lr": row.lr}, ORIGIN)
    return write_found_recipe(folder, found, comments)
