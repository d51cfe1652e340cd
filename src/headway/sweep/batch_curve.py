"""`headway curve`: the steps that a recipe needs to a target, by batch, each at its own best learning rate."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

from pydantic import Field

from headway.core.errors import HeadwayError, UsageError
from headway.core.files import write_atomically
from headway.core.recipe import LoadedRecipe
from headway.core.recipe_override import collect_given_values, override_values
from headway.core.run_folder import RunFolder
from headway.core.signals import handle_signals
from headway.core.text_format import align_table, pluralise
from headway.data.set_warnings import describe_large_batch
from headway.optim.batch_scaling import require_number
from headway.page.renderer import render
from headway.setup.checks import explain_share
from headway.setup.rates import resolve_batch
from headway.setup.recipe import TrainRecipe
from headway.sweep.cohort import Assignment, Outcome
from headway.sweep.curve_panels import build_panels, list_rows
from headway.sweep.learning_rate import build_variant, check_batches
from headway.sweep.run_crew import train_missing
from headway.sweep.search_folder import SearchFolder, SearchRecipe
from headway.sweep.steps_curve import GRID, STEP, CurveRun, StepsCurve, compute_steps_to
from headway.sweep.sweep_folder import CURVE_SETTINGS, SEARCHES
from headway.sweep.trials import count_steps, probe_recipe
from headway.training.run_steps import separate_checkpoints
from headway.training.runs import load_recipe

LOG = logging.getLogger("headway.sweep")

ORIGIN = SEARCHES[CURVE_SETTINGS]
EVALUATED_EPOCHS = 0.2
"""Epochs between two evaluations, unless the recipe evaluates more often. The steps to the target are read between two
of them, so rare ones would hide the curve."""


@final
@dataclass(frozen=True, kw_only=True)
class CurveOptions:
    """The curve that is wanted.

    Attributes:
        batches: batches of a step, two or more.
        target: value that the recipe's metric has to reach. None: that of the recipe's `stop_at`.
        seeds: runs of each batch with the learning rate that was found.
        slots: processes that train at once; None: one for each GPU, else one for each core.
    """

    batches: tuple[int, ...]
    target: float | None = None
    seeds: int = 3
    slots: int | None = None


class CurveRecipe(SearchRecipe):
    """The settings of `headway curve`, as `settings/curve.yaml` in its folder has them."""

    objective: str
    """The metric that has to reach the target."""
    higher_is_better: bool
    """Direction of the metric."""
    target: float
    """The value to reach."""
    samples: int = Field(ge=1)
    """Size of the training set."""
    seeds: int = Field(ge=1)
    """Runs of each batch with the learning rate that was found."""


@final
@dataclass(frozen=True, kw_only=True)
class CurveResult:
    """A curve of steps to a target by batch.

    Attributes:
        folder: where all of it lies.
        curve: the runs, and what follows from them.
    """

    folder: Path
    settings: CurveRecipe
    curve: StepsCurve
    page: Path

    @property
    def no_gain_from(self) -> int | None:
        """The smallest batch after which a larger one saves next to no steps; None if no batch of the curve is."""
        points = self.curve.list_points()
        first = next((place for place, point in enumerate(points) if point.regime == "none"), None)
        return None if first is None else points[first - 1].batch

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        curve, settings = self.curve, self.settings
        perfect = curve.find_perfect_scaling()
        regimes = {point.batch: point.regime for point in curve.list_points()}
        rows = []
        for batch in curve.batches:
            steps, tried = curve.compute_steps(batch), curve.list_tuned(batch)
            rows.append(
                {
                    "batch": batch,
                    "lr": curve.search(batch)[1],
                    "is_at_edge": curve.is_at_edge(batch),
                    "steps": steps,
                    "steps_by_seed": curve.list_seed_steps(batch),
                    "epochs": None if steps is None else steps * batch / settings.samples,
                    "regime": regimes.get(batch),
                    # JSON has no infinity: a rate that does not reach the target, or was given up, has null.
                    "steps_by_lr": [[lr, one if one < math.inf else None] for lr, one in tried.items()],
                }
            )
        return {
            "folder": str(self.folder),
            "objective": settings.objective,
            "target": settings.target,
            "seeds": list(curve.seeds),
            "batches": rows,
            "perfect_scaling_to": perfect.batch,
            "perfect_scaling": perfect.how,
            "no_gain_from": self.no_gain_from,
            "page": str(self.page),
        }

    def describe(self) -> str:
        """Describes the result, for the terminal."""
        rows = align_table(list_rows(self.curve, self.settings.samples))
        return "\n".join([*rows, *self.list_findings(), f"Page: {self.page}"])

    def list_findings(self) -> list[str]:
        """Lists what the curve says, in sentences."""
        perfect, points, lines = self.curve.find_perfect_scaling(), self.curve.list_points(), list[str]()
        if all(self.curve.search(batch)[1] is None for batch in self.curve.batches):
            easier = "lower" if self.settings.higher_is_better else "raise"
            lines.append(
                f"No batch reaches the target: {easier} it (--target), or give the runs more epochs (epochs=N)."
            )
        if perfect.batch is None:
            lines.append(f"The end of perfect scaling is not known: {perfect.how}.")
        elif perfect.batch == points[0].batch and len(points) > 1:
            small, large = points[:2]
            lines.append(
                f"No perfect scaling: a batch of {large.batch:,} takes {large.steps / small.steps:.2f} of the steps of"
                f" {small.batch:,}. Try smaller batches."
            )
        else:
            lines.append(f"Perfect scaling to a batch of {perfect.batch:,}: {perfect.how}.")
        if (batch := self.no_gain_from) is not None:
            lines.append(f"Beyond a batch of {batch:,}, a larger one saves next to no steps.")
        for before, after in pairwise(points):
            if after.steps > before.steps and after.regime != "none":
                lines.append(
                    f"A batch of {after.batch:,} takes more steps than {before.batch:,}: seeds differ, or its learning"
                    " rate suits one seed alone. More --seeds would tell."
                )
        return lines


def draw_curve(
    recipe: Path, overrides: Sequence[str], options: CurveOptions, folder: Path | None = None
) -> CurveResult:
    """Measures the steps to a target at several batches, in a new folder (default: sweeps/NAME-curve).

    Each batch has a search of its learning rate with one seed: four rates by factors of two around the recipe's, which
    follows the square root of the batch, and more if the best one lies at the edge. Other seeds then train with the
    best one. A run ends once it reaches the target, at the end of the recipe, or if its rate can no longer be the best.

    Raises:
        UsageError: the folder exists, there are fewer than two batches, or there is no target.
        RecipeError: the recipe has no evaluation set, or refuses a batch.
        HeadwayError: a signal has stopped it, or a run cannot train.
    """
    loaded = load_recipe(recipe, overrides)
    batches = check_batches(options.batches)
    if len(batches) < 2:
        raise UsageError("a curve needs two batches or more", fix="Name them: --batches 64,128,256.")
    if options.target is None and loaded.recipe.stop_at is None:
        raise UsageError("there is no target to reach", fix="Give --target 0.95, or set stop_at in the recipe.")
    # Every batch, before anything trains.
    for batch in batches:
        build_variant(loaded, loaded.recipe.optimizer.name, batch, ORIGIN)
    search = _open_search(folder or RunFolder.find_free_name(Path("sweeps"), f"{loaded.recipe.name}-curve"))
    search.expect_new()
    probe = probe_recipe(loaded, None, {"optimizer.lr": None, "batch": None})
    target = options.target if options.target is not None else (loaded.recipe.stop_at or {}).get(probe.objective)
    if target is None:
        what = f"stop_at does not name {probe.objective}, the metric of this recipe's task"
        raise UsageError(what, fix=f"Give --target, a value of {probe.objective}.")
    if probe.is_share and target > 1:
        what, fix = explain_share(probe.objective, target)
        raise UsageError(what, where="--target", fix=fix)
    if batches[-1] > probe.samples:
        LOG.warning(describe_large_batch(batches[-1], probe.samples))
    settings = CurveRecipe(
        recipe=collect_given_values(probe.loaded),
        batches=batches,
        slots=options.slots,
        objective=probe.objective,
        higher_is_better=probe.higher_is_better,
        target=target,
        samples=probe.samples,
        seeds=options.seeds,
    )
    search.create(settings, probe.loaded)
    return _run(search)


def resume_curve(folder: Path) -> CurveResult:
    """Continues a curve that was stopped or killed. Runs that have ended are kept, and others go on.

    Raises:
        UsageError: there is none in this folder, or another process works in it. HeadwayError: see `draw_curve`.
    """
    search = _open_search(folder)
    search.expect_begun()
    kept = len(list((folder / "results").glob("*.json")))
    LOG.info(f"{pluralise(kept, 'run')} kept; the others go on from their checkpoints.")
    return _run(search)


def _open_search(folder: Path) -> SearchFolder[CurveRecipe]:
    parts = ("runs", "results", "logs")
    return SearchFolder(folder=folder, kind=CurveRecipe, place=CURVE_SETTINGS, parts=parts)


@final
class _StopError(BaseException):
    """A signal asks the search to stop. Not an Exception, which code on the way might take for a failed run."""


def _run(search: SearchFolder[CurveRecipe]) -> CurveResult:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StopError

    settings, loaded = search.read_settings()
    runs = _CurveRuns(search.folder, settings, loaded)
    try:
        with search.lock(), handle_signals(stop, signal.SIGTERM, signal.SIGINT):
            train_missing(search.folder, settings.slots, runs.list_missing, runs.assign, runs.keep)
    except _StopError:
        raise search.explain_stop() from None
    result = CurveResult(
        folder=search.folder, settings=settings, curve=runs.build_curve(), page=search.folder / "curve.html"
    )
    title = f"{loaded.recipe.name}: steps to {settings.objective} {settings.target:g}"
    subtitle = " ".join([f"{title}.", *result.list_findings()])
    panels = build_panels(result.curve, "steps", title, list_rows(result.curve, settings.samples))
    write_atomically(result.page, render(panels, title="Steps and batch", subtitle=subtitle))
    write_atomically(search.folder / "curve.json", json.dumps(result.to_json(), indent=1) + "\n")
    return result


@final
class _CurveRuns:
    """The runs of a curve: a run folder in `runs` and, once it has ended, a file in `results` for each."""

    def __init__(self, folder: Path, settings: CurveRecipe, loaded: LoadedRecipe[TrainRecipe]) -> None:
        self._folder, self._settings, self._loaded = folder, settings, loaded
        self._own_batch = resolve_batch(loaded, 1).recipe.global_batch
        name, seed = loaded.recipe.optimizer.name, loaded.recipe.seed
        self._variants = {batch: build_variant(loaded, name, batch, ORIGIN) for batch in settings.batches}
        own = build_variant(loaded, name, self._own_batch, ORIGIN).recipe.optimizer
        self._lr = require_number(own.lr, "optimizer.lr")
        self._tuning_seed, self._seeds = seed, [seed + number for number in range(1, settings.seeds + 1)]
        self._steps = dict(map(self._read, sorted((folder / "results").glob("*.json"))))

    def build_curve(self) -> StepsCurve:
        """Builds the curve of the runs that have ended so far."""
        grids = {batch: self._list_rates(batch) for batch in self._settings.batches}
        return StepsCurve(grids, tuning_seed=self._tuning_seed, seeds=self._seeds, steps=self._steps)

    def list_missing(self) -> list[CurveRun]:
        """Lists the runs that are missing as things stand."""
        return self.build_curve().list_missing()

    def assign(self, number: int, run: CurveRun) -> Assignment:
        """Returns the training of a run."""
        settings, variant, name = self._settings, self._variants[run.batch], _name_run(run)
        values = {
            "optimizer.lr": run.lr,
            "seed": run.seed,
            "stop_at": {settings.objective: settings.target},
            "evaluate.every_epochs": min(EVALUATED_EPOCHS, variant.recipe.evaluate.every_epochs),
        }
        own = separate_checkpoints(override_values(variant, values, ORIGIN), name, "each run has its own")
        steps = min(count_steps(own, settings.samples), self.build_curve().limit_steps(run))
        return Assignment(trial=number, folder=self._folder / "runs" / name, loaded=own, until=math.ceil(steps))

    def keep(self, run: CurveRun, outcome: Outcome) -> None:
        """Writes the result of a run that has ended or diverged."""
        settings, is_diverged = self._settings, outcome.kind == "diverged"
        records = RunFolder(self._folder / "runs" / _name_run(run)).read_metrics()
        evaluations = [(one["step"], one[settings.objective]) for one in records if one.get("kind") == "evaluate"]
        reach = partial(compute_steps_to, higher_is_better=settings.higher_is_better)
        steps = None if is_diverged else reach(evaluations, settings.target)
        result = {**vars(run), "steps": steps, "diverged": is_diverged, "evaluations": evaluations}
        write_atomically(self._folder / "results" / f"{_name_run(run)}.json", json.dumps(result) + "\n")
        self._steps[run] = math.inf if steps is None else steps
        said = (
            "diverged"
            if is_diverged
            else f"not reached in {outcome.step:,}"
            if steps is None
            else f"{steps:,.0f} steps"
        )
        left = pluralise(len(self.list_missing()), "run")
        LOG.info(f"Batch {run.batch:,}, lr {run.lr:g}, seed {run.seed}: {said}; {left} to go at least.")

    def _read(self, path: Path) -> tuple[CurveRun, float]:
        try:
            result = json.loads(path.read_text())
            run = CurveRun(int(result["batch"]), float(result["lr"]), int(result["seed"]))
            return run, math.inf if result["steps"] is None else float(result["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"this result cannot be read ({error})"
            raise HeadwayError(what, where=str(path), fix="Remove it: its run is then read again.") from None

    def _list_rates(self, batch: int) -> list[float]:
        """Lists the learning rates that the search of a batch begins with."""
        # Whole steps of the factor, so that all batches have rates in common; halves are always rounded down.
        scale = math.floor(math.log(batch / self._own_batch, STEP) / 2 + 1e-9)
        return [float(f"{self._lr * STEP ** (scale + place - 1):.6g}") for place in range(GRID)]


def _name_run(run: CurveRun) -> str:
    return f"{run.batch}-{run.lr:g}-{run.seed}"
