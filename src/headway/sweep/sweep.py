"""Sweeps: many trainings of one recipe with other values, of which the best one is trained again with new seeds."""

from __future__ import annotations

import json
import logging
import signal
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

from headway.core.cpu_count import count_usable_cores
from headway.core.errors import HeadwayError, RecipeError, UsageError
from headway.core.files import write_atomically
from headway.core.recipe import LoadedRecipe
from headway.core.recipe_override import collect_given_values, override_values
from headway.core.recipe_yaml import dump_in_line
from headway.core.run_folder import RunFolder
from headway.core.signals import handle_signals
from headway.core.statistics import compute_interval
from headway.core.text_format import format_duration, pluralise
from headway.optim.batch_scaling import require_number
from headway.setup.rates import resolve_rates
from headway.setup.recipe import TrainRecipe
from headway.sweep.budget import Method, Plan, plan_brackets
from headway.sweep.cohort import Assignment
from headway.sweep.coordinator import Coordinator
from headway.sweep.coordinator_address import expect_no_coordinator
from headway.sweep.display import SweepDisplay
from headway.sweep.feeders import can_be_fed
from headway.sweep.halving import is_over
from headway.sweep.journal import open_journal
from headway.sweep.lease import revoke_old_leases
from headway.sweep.machines import count_own_slots
from headway.sweep.page import write_page
from headway.sweep.plan_text import describe_plan, describe_raised_smallest
from headway.sweep.prediction import SweepPrediction, TrialShape, choose_feeding, predict_sweep
from headway.sweep.slots import list_gpus
from headway.sweep.space import Space, read_space
from headway.sweep.space_recipe import SpaceRecipe
from headway.sweep.state import State, list_scores, rank_trials
from headway.sweep.sweep_folder import FuseMode, SweepFolder, SweepRecipe, describe_sweep_resume, write_found_recipe
from headway.sweep.sweep_summary import summarise_sweep
from headway.sweep.trial_recipe import build_trial_recipe, check_space
from headway.sweep.trials import Probe, build_assignment, count_steps, probe_recipe
from headway.sweep.typical_trials import choose_typical_trials
from headway.training.fork import check_forkable
from headway.training.run_steps import separate_checkpoints
from headway.training.runs import load_recipe

LOG = logging.getLogger("headway.sweep")

LEAST_GAIN = 1.02
"""Gain of a shared loader from which it is worth a word."""


@final
@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """The budget of a sweep, and how it is spent.

    Attributes:
        budget: most work, in full trainings.
        method: which trials go on.
        eta: one trial of `eta` goes on from a rung.
        smallest: least fraction of a training after which trials are compared.
        max_trials: most trials.
        seed: seed of the trials' values.
        slots: processes that train at once here; None: those of `hosts`, else one for each GPU, else one for each core.
        hosts: machines with their numbers of processes, such as a:4,b:4.
        joinable: workers on other machines can join.
        lease_s: silence after which a worker on another machine is lost.
        together: most trials that take turns in one process.
        seeds: trainings of the winner with new seeds.
        measures: costs are measured before the first trial, to predict the time and to choose how slots are fed.
        fuse: `auto`: trials take forward and backward together, where a measurement says that it pays.
    """

    budget: Fraction
    method: Method = "halving"
    eta: int = 3
    smallest: Fraction = Fraction(1, 27)
    max_trials: int | None = None
    seed: int = 0
    slots: int | None = None
    hosts: str | None = None
    joinable: bool = False
    lease_s: float = 30.0
    together: int = 16
    seeds: int = 3
    measures: bool = True
    fuse: FuseMode = "off"


@final
@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """The result of a sweep.

    Attributes:
        folder: its folder.
        state: all trials.
        objective: the metric by which they were compared.
        winner: number of the best trial.
        score: its score, which is biased: it is the best of many noisy ones.
        values: its values.
        recipe: recipe of the winner.
        retrained: scores of the winner with new seeds.
        seconds: wall time of this call.
        core_s: core seconds of all processes in this call, without the measurement before the first trial.
        prediction: the predicted time; None if it could not be predicted, or the sweep was continued.
    """

    folder: Path
    state: State
    objective: str
    winner: int
    score: float
    values: dict[str, Any]
    recipe: Path
    retrained: tuple[float, ...]
    seconds: float
    core_s: float
    prediction: SweepPrediction | None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        retrained: dict[str, Any] = {"scores": list(self.retrained)}
        if len(self.retrained) > 1:
            mean, half = compute_interval(self.retrained)
            retrained |= {"mean": mean, "interval": half}
        return {
            "sweep": str(self.folder),
            "objective": self.objective,
            "trials": len(self.state.trials),
            "winner": {"trial": self.winner, "score": self.score, "values": self.values, "recipe": str(self.recipe)},
            "retrained": retrained,
            "seconds": self.seconds,
            "core_s": self.core_s,
            "predicted": None if self.prediction is None else vars(self.prediction),
        }

    def describe(self) -> str:
        """Describes the result, for the terminal."""
        failed = sum(trial.has_failed for trial in self.state.trials)
        lines = [
            f"{pluralise(len(self.state.trials), 'trial')} in {self.folder}"
            + (f", {failed} of which failed" if failed else "")
            + ".",
            f"Best: trial {self.winner}, {self.objective} {self.score:.4f}, the best of many noisy scores: "
            + ", ".join(f"{key}={dump_in_line(value)}" for key, value in self.values.items()),
        ]
        if len(self.retrained) > 1:
            mean, half = compute_interval(self.retrained)
            lines.append(
                f"Trained again with {len(self.retrained)} new seeds: {self.objective} {mean:.4f} +- {half:.2g} (95 %)."
            )
        elif self.retrained:
            lines.append(f"Trained again with a new seed: {self.objective} {self.retrained[0]:.4f}.")
        lines.append(f"Its recipe: {self.recipe}")
        if self.prediction is not None:
            measured = f"{format_duration(self.core_s)} of cores in {format_duration(self.seconds)}"
            lines.append(f"Time: {measured}; predicted were {describe_prediction(self.prediction)}.")
        return "\n".join(lines)


def run_sweep(
    recipe: Path, overrides: Sequence[str], space: Path, options: SweepOptions, folder: Path | None = None
) -> SweepResult:
    """Runs a sweep in a new folder (default: sweeps/NAME).

    Raises:
        HeadwayError: recipe, space or options are wrong, or trials crash one after another.
    """
    loaded = load_recipe(recipe, overrides)
    space_file = read_space(space)
    space_recipe = space_file.recipe
    check_space(Space(space_recipe), loaded, space_file.origins)
    if space_recipe.method == "tpe" and options.method != "asha":
        what = f"tpe learns from trials that have ended, and {options.method} starts them together"
        raise UsageError(what, where=str(space), fix="Add --method asha, or set method to random in the space.")
    if options.method == "pbt":
        check_forkable(space_recipe.parameters)
    return start_sweep(loaded, space_recipe, options, folder, origins=space_file.origins)


def start_sweep(
    loaded: LoadedRecipe[TrainRecipe],
    space_recipe: SpaceRecipe,
    options: SweepOptions,
    folder: Path | None = None,
    probe: Probe | None = None,
    origins: Mapping[str, str] | None = None,
) -> SweepResult:
    """Runs a sweep of a recipe and a space that are read and checked already; see `run_sweep`.

    Args:
        probe: facts that are known of the recipe; None: it is built to find them.
        origins: file and line of the keys of the space, for messages; see `LoadedRecipe`.
    """
    folder = folder or RunFolder.find_free_name(Path("sweeps"), loaded.recipe.name)
    bounds = [bound for bound in (Space(space_recipe).size, options.max_trials) if bound is not None]
    max_trials = min(bounds, default=None)
    # Before any data are read: a folder that is taken, and a budget that is too small, are refused.
    SweepFolder.expect_free(folder)
    plan_brackets(
        Fraction(options.budget), options.eta, Fraction(options.smallest), options.method, max_trials=max_trials
    )
    probe = probe or probe_recipe(loaded, space_recipe.objective, space_recipe.parameters, origins)
    settings = SweepRecipe(
        recipe=collect_given_values(probe.loaded),
        space=space_recipe,
        objective=probe.objective,
        higher_is_better=probe.higher_is_better,
        samples=probe.samples,
        **vars(options) | {"slots": _count_slots(options), "max_trials": max_trials},
    )
    sweep = SweepFolder.create(folder)
    sweep.write_settings(settings, probe.loaded)
    return _run(sweep)


def resume_sweep(folder: Path) -> SweepResult:
    """Continues a sweep that was stopped or killed, with the same decisions.

    Raises:
        UsageError: there is no such sweep, or another process runs it.
    """
    return _run(SweepFolder.open(folder))


def build_plan(settings: SweepRecipe) -> Plan:
    """Returns how many trials start, and where they are compared."""
    return plan_brackets(
        settings.budget,
        settings.eta,
        settings.smallest,
        settings.method,
        max_trials=settings.max_trials,
        higher_is_better=settings.higher_is_better,
        seed=settings.seed,
    )


def _count_slots(options: SweepOptions) -> int:
    """Returns the number of slots on this machine."""
    if options.slots is not None:
        return options.slots
    if options.hosts is not None:
        return count_own_slots(options.hosts)
    return len(list_gpus()) or count_usable_cores()


def _run(sweep: SweepFolder) -> SweepResult:
    """Runs a sweep; SIGTERM and Ctrl-C make every trial save its state."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _StopError

    try:
        with handle_signals(stop, signal.SIGTERM, signal.SIGINT):
            return _run_trials(sweep)
    except _StopError:
        fix = f"Continue: {describe_sweep_resume(sweep.folder)}"
        raise SweepStoppedError("the sweep was stopped, and its trials are saved", fix=fix) from None


@final
class SweepStoppedError(HeadwayError):
    """A signal has stopped the sweep, which can be continued."""


@final
class _StopError(BaseException):
    """A signal asks the sweep to stop. Not an Exception, which code on the way might take for a failed trial."""


def _run_trials(sweep: SweepFolder) -> SweepResult:
    began = time.monotonic()
    settings, loaded = sweep.read_settings()
    plan = build_plan(settings)
    with open_journal(sweep.folder, plan, is_shared=settings.is_shared) as journal:
        # Before the leases of its workers are ended.
        expect_no_coordinator(sweep.folder)
        sweep.wait_for_workers(LOG.info)
        revoke_old_leases(sweep.folder, settings.lease_s, LOG.info)
        if (finished := _read_finished(sweep, settings, journal.state)) is not None:
            LOG.info("This sweep is finished: nothing is left to train.")
            LOG.info(f"Page: {write_page(summarise_sweep(sweep.folder))}")
            return finished
        LOG.info(describe_plan(plan))
        if raised := describe_raised_smallest(plan, settings.smallest, settings.max_trials):
            LOG.info(raised)
        with Coordinator(sweep, settings, loaded, list_gpus()) as coordinator:
            if settings.seeds or not is_over(journal.state):
                coordinator.wait_for_slot()
            prediction, start_s = None, 0.0
            if settings.measures and not journal.state.trials:
                # Processes that measured go on as those of the sweep, so their starts are a part of it.
                prediction, start_s = _predict(sweep, settings, loaded, plan, coordinator)
                sweep.write_feeding(prediction is not None and prediction.feeds)
            coordinator.feeds = sweep.read_feeding()
            measured_s, began = coordinator.core_s - start_s, time.monotonic()
            with SweepDisplay(settings.objective, None if prediction is None else prediction.wall_s) as display:
                state = coordinator.run(journal, display.update)
            recipe = _write_winner(sweep, settings, loaded, state, find_winner(state)[0])
            retrained = _retrain(sweep, settings, coordinator, recipe)
            core_s = coordinator.core_s - measured_s
    seconds = time.monotonic() - began
    result = _build_result(sweep, settings, state, recipe, retrained, seconds, core_s, prediction)
    write_atomically(sweep.folder / "result.json", json.dumps(result.to_json(), indent=1) + "\n")
    LOG.info(f"Page: {write_page(summarise_sweep(sweep.folder))}")
    return result


def _read_finished(sweep: SweepFolder, settings: SweepRecipe, state: State) -> SweepResult | None:
    """Returns the result of a sweep whose trials and new seeds have all been trained; None: there is more to do."""
    if not is_over(state):
        return None
    winner, recipe = find_winner(state)[0], sweep.folder / "winner" / "recipe.yaml"
    try:
        before = json.loads((sweep.folder / "result.json").read_text())
        retrained = tuple(map(float, before["retrained"]["scores"]))
        is_whole = before["winner"]["trial"] == winner and len(retrained) == settings.seeds and recipe.is_file()
        seconds, core_s, predicted = float(before["seconds"]), float(before["core_s"]), before["predicted"]
        prediction = None if predicted is None else SweepPrediction(**predicted)
    except (OSError, ValueError, LookupError, TypeError):
        # It is written again by what its trials have left.
        return None
    if not is_whole:
        return None
    return _build_result(sweep, settings, state, recipe, retrained, seconds, core_s, prediction)


def _build_result(
    sweep: SweepFolder,
    settings: SweepRecipe,
    state: State,
    recipe: Path,
    retrained: tuple[float, ...],
    seconds: float,
    core_s: float,
    prediction: SweepPrediction | None,
) -> SweepResult:
    """Returns the result of a sweep that has a winner."""
    winner, score = find_winner(state)
    return SweepResult(
        folder=sweep.folder,
        state=state,
        objective=settings.objective,
        winner=winner,
        score=score,
        values=dict(state.trials[winner].values),
        recipe=recipe,
        retrained=retrained,
        seconds=seconds,
        core_s=core_s,
        prediction=prediction,
    )


def _predict(
    sweep: SweepFolder, settings: SweepRecipe, loaded: LoadedRecipe[TrainRecipe], plan: Plan, coordinator: Coordinator
) -> tuple[SweepPrediction | None, float]:
    """Measures some trials, and predicts the sweep. Returns also the core seconds in which its processes started."""
    space = Space(settings.space)
    alike, assignments = choose_typical_trials(space, settings.seed, plan.trials), []
    for trial in alike:
        values = space.suggest(settings.seed, trial)
        folder = sweep.find_trial(trial)
        with suppress(RecipeError):
            assignments.append(build_assignment(settings, loaded, trial, values, (Fraction(1),), folder))
    LOG.info(f"Measuring {pluralise(len(assignments), 'trial')}.")
    # No more processes start than there are trials, or new seeds.
    most = max(plan.trials, settings.seeds)
    starts, found = coordinator.measure(assignments, max(1, min(coordinator.slots, most)))
    if not found:
        LOG.warning("No trial could be measured, so the time of the sweep is not predicted.")
        return None, sum(starts)
    times = Counter(assignment.trial for assignment, _ in found)
    shapes = [
        TrialShape(
            costs=one,
            steps=assignment.until,
            evaluations=_count_epochs(assignment) / assignment.loaded.recipe.evaluate.every_epochs,
            checkpoints=_count_checkpoints(assignment),
            weight=alike[assignment.trial] / times[assignment.trial],
        )
        for assignment, one in found
    ]
    # Slots of several machines are not fed. Those that may join later are not known.
    slots = min(coordinator.slots, most)
    predict = choose_feeding if can_be_fed(loaded.recipe) and slots <= settings.slots else predict_sweep
    start_s = statistics.fmean(starts)
    prediction = predict(plan, shapes, slots=slots, together=settings.together, seeds=settings.seeds, start_s=start_s)
    if slots > settings.slots:
        LOG.info(f"The prediction is for {pluralise(slots, 'slot')} of equal speed.")
    LOG.info(f"Predicted: {describe_prediction(prediction)}.")
    return prediction, sum(starts)


def _count_checkpoints(assignment: Assignment) -> float:
    options = assignment.loaded.recipe.checkpoint
    if options.every_steps is not None:
        return assignment.until / options.every_steps
    return _count_epochs(assignment) / options.every_epochs


def _count_epochs(assignment: Assignment) -> float:
    return require_number(resolve_rates(assignment.loaded).recipe.epochs, "epochs")


def describe_prediction(prediction: SweepPrediction) -> str:
    """Describes a prediction in words."""
    gain = ""
    if prediction.share_gain >= LEAST_GAIN:
        gain = f" (with a loader for each trial {prediction.share_gain:.2f} times as much)"
    fed = "; one more process decodes for all slots" if prediction.feeds else ""
    return f"{format_duration(prediction.core_s)} of cores in {format_duration(prediction.wall_s)}{gain}{fed}"


def find_winner(state: State) -> tuple[int, float]:
    """Returns the number and the score of the best trial.

    Raises:
        HeadwayError: every trial failed.
    """
    ranked = rank_trials(state)
    if not ranked:
        reasons = {trial.reason for trial in state.trials}
        raise HeadwayError(
            f"every trial failed: {'; '.join(sorted(reasons)[:3])}", fix="Change the space or the recipe."
        )
    _, score = list_scores(state, state.trials[ranked[0]])[-1]
    return ranked[0], score


def _write_winner(
    sweep: SweepFolder, settings: SweepRecipe, loaded: LoadedRecipe[TrainRecipe], state: State, winner: int
) -> Path:
    """Writes the winner as a recipe, with its evidence above it."""
    own = build_trial_recipe(loaded, winner, state.trials[winner].values)
    comments = [
        f"Trial {winner} of {len(state.trials)}: {settings.objective} {find_winner(state)[1]:.4f}.",
        "The best of many noisy scores is biased: see `retrained` in result.json for a fair one.",
        *(f"  {key}: {dump_in_line(value)}" for key, value in state.trials[winner].values.items()),
    ]
    return write_found_recipe(sweep.folder / "winner", own, comments)


def _retrain(sweep: SweepFolder, settings: SweepRecipe, coordinator: Coordinator, recipe: Path) -> tuple[float, ...]:
    """Trains the winner with new seeds; returns the scores."""
    loaded = load_recipe(recipe, ())
    seeds = [loaded.recipe.seed + number for number in range(1, settings.seeds + 1)]
    if seeds:
        LOG.info(f"Training the winner again with {pluralise(len(seeds), 'new seed')}.")
    assignments = [
        Assignment(
            trial=-seed - 1,
            folder=sweep.find_retrained(seed),
            loaded=separate_checkpoints(
                override_values(loaded, {"seed": seed}, "another seed of the winner"), f"seed-{seed}", "its own"
            ),
            until=count_steps(loaded, settings.samples),
        )
        for seed in seeds
    ]
    scores = dict[int, float]()
    for outcome in coordinator.train(assignments):
        if outcome.kind != "done" or outcome.metrics is None:
            why = outcome.failure or "its metrics.jsonl lacks the last evaluation"
            fix = f"Mend the cause, and continue: {describe_sweep_resume(sweep.folder)}"
            raise HeadwayError(f"the winner failed with another seed: {why}", where=str(sweep.retrained), fix=fix)
        scores[outcome.trial] = outcome.metrics[settings.objective]
    return tuple(scores[one.trial] for one in assignments)
