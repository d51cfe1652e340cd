"""All numbers of a sweep's page: what each trial reached and cost, the best so far, and what mattered."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.run_folder import RunFolder
from headway.page.values import is_steep
from headway.setup.shared_inputs import SHARED_KEYS
from headway.sweep.expectation import compute_expected_best, extrapolate_scores
from headway.sweep.halving import is_over
from headway.sweep.importance import Importance, measure_importance
from headway.sweep.journal import read_history
from headway.sweep.parameter import ParameterRecipe, is_same
from headway.sweep.records import Record, Result
from headway.sweep.space import RANDOM_TRIALS
from headway.sweep.state import State, Trial, list_scores, rank_trials
from headway.sweep.sweep_folder import SweepFolder, SweepRecipe

# Random search is drawn up to this multiple of the sweep's own work.
MOST_RANDOM = 3
# Plausible scores of stopped trials, of which the mean is taken.
IMPUTATIONS = 20


@final
@dataclass(frozen=True, kw_only=True)
class TrialSummary:
    """One trial of a sweep.

    Attributes:
        parent: the trial that it is a fork of.
        rank: 1 is the best of those that trained longest; None if it reached no rung.
        state: `winner`, `finished`, `stopped`, `training`, `waiting` or `failed`.
        points: (fraction of a training, score) at each rung, from that of the parent on for a fork.
        work: full trainings; a rung on which it failed counts as a whole.
        seconds: training time of its run folder; None if nothing is recorded there.
    """

    trial: int
    values: Mapping[str, Any]
    parent: int | None
    rank: int | None
    state: str
    points: tuple[tuple[Fraction, float], ...]
    work: Fraction
    seconds: float | None
    reason: str

    @property
    def level(self) -> Fraction:
        """Fraction of a training at its newest score; 0 if it has none."""
        return self.points[-1][0] if self.points else Fraction(0)

    @property
    def score(self) -> float | None:
        """Its newest score."""
        return self.points[-1][1] if self.points else None

    def get_score(self, level: Fraction) -> float | None:
        """Returns its own score at a fraction of a training; None if it has none there."""
        own = self.points if self.parent is None else self.points[1:]
        return dict(own).get(level)


@final
@dataclass(frozen=True, kw_only=True)
class RungSummary:
    """The cost of all trainings that end at one level.

    Attributes:
        trials: trainings that reached it.
        failed: trainings that failed on the way.
        best: best score there; None if none reached it.
    """

    level: Fraction
    trials: int
    failed: int
    work: Fraction
    best: float | None


@final
@dataclass(frozen=True, kw_only=True)
class Progress:
    """The best score so far, beside what random search can expect.

    Attributes:
        unit: of all x: `seconds` of training, if every result has some recorded, else `trainings`.
        best: (x, best score of any trial so far) at each improvement, and at the end.
        random: (x, expected best) after 1, 2, ... full trainings.
        random_low: the same, with the scores at which trials stopped.
        is_estimated: True if trials stopped, so that `random` depends on extrapolated scores.
    """

    unit: str
    is_estimated: bool
    best: tuple[tuple[float, float], ...]
    random: tuple[tuple[float, float], ...]
    random_low: tuple[tuple[float, float], ...]


@final
@dataclass(frozen=True, kw_only=True)
class ImportanceSummary:
    """Which parameters the differences between scores come from.

    Attributes:
        log: True if the logarithms of the scores were explained.
    """

    log: bool
    parameters: tuple[str, ...]
    found: Importance


@final
@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """All numbers of a sweep.

    Attributes:
        trials: by number.
        common_level: fraction of a training that most trials reached, where their scores can be compared with each
            other; None if there is no score.
        importance: of the scores at `common_level`; None if there are too few.
        differing: parameters that change the batches; where there is none, all trials have seen the same ones.
        result: result.json; empty before the sweep has ended.
    """

    folder: Path
    settings: SweepRecipe
    trials: tuple[TrialSummary, ...]
    rungs: tuple[RungSummary, ...]
    progress: Progress
    common_level: Fraction | None
    importance: ImportanceSummary | None
    differing: tuple[str, ...]
    result: Mapping[str, Any]

    @property
    def winner(self) -> TrialSummary | None:
        """The best trial; None if none reached a rung."""
        return next((trial for trial in self.trials if trial.rank == 1), None)

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Why trials failed, and how many, the most frequent reason first."""
        return Counter(trial.reason for trial in self.trials if trial.state == "failed").most_common()

    @property
    def has_log_scores(self) -> bool:
        """True if scores span so much that they are drawn by their logarithms."""
        return is_steep([score for trial in self.trials for _, score in trial.points])

    def to_json(self) -> dict[str, Any]:
        """Returns all numbers as a JSON object; fractions of a training are numbers there."""
        found = self.importance
        return {
            "sweep": str(self.folder),
            "objective": self.settings.objective,
            "higher_is_better": self.settings.higher_is_better,
            "result": dict(self.result),
            "trials": [_encode(asdict(trial)) for trial in self.trials],
            "rungs": [_encode(asdict(rung)) for rung in self.rungs],
            "progress": asdict(self.progress),
            "common_level": _encode(self.common_level),
            "importance": None
            if found is None
            else {
                "log": found.log,
                "trials": found.found.scores,
                "r2": found.found.r2,
                "shares": dict(zip(found.parameters, found.found.shares, strict=True)),
            },
            "differing": list(self.differing),
        }


def _encode(value: Any) -> Any:
    if isinstance(value, Fraction):
        return float(value)
    if isinstance(value, Mapping):
        return {key: _encode(one) for key, one in value.items()}
    return [_encode(one) for one in value] if isinstance(value, list | tuple) else value


def encode_value(parameter: ParameterRecipe, value: Any) -> float:
    """Returns a value of a parameter as a number: that of a choice is its place in the list."""
    if parameter.choice is None:
        return float(value)
    places = [place for place, one in enumerate(parameter.choice) if is_same(one, value)]
    # A fork of `pbt` may have a value that is none of the list.
    return float(places[0]) if places else math.nan


def summarise_sweep(folder: Path) -> SweepSummary:
    """Reads all numbers of a sweep from its folder, also while it runs.

    Raises:
        HeadwayError: this is not the folder of a sweep, it has no decision yet, or its files are damaged.
    """
    sweep = SweepFolder.open(folder)
    settings, _ = sweep.read_settings()
    state, records = read_history(folder)
    clocks: dict[int, _Clock] = {}
    for trial in state.trials:
        clocks[trial.number] = _read_clock(sweep, trial, settings.objective, clocks)
    ranks = {number: rank for rank, number in enumerate(rank_trials(state), 1)}
    # What waits to be promoted at the end of an asha sweep never will be.
    waits = "stopped" if is_over(state) else "waiting"
    trials = tuple(_summarise_trial(state, trial, ranks.get(trial.number), clocks, waits) for trial in state.trials)
    level = _find_common_level(trials)
    return SweepSummary(
        folder=folder,
        settings=settings,
        trials=trials,
        rungs=tuple(_summarise_rungs(state)),
        progress=_trace_progress(settings, state, records, clocks),
        common_level=level,
        importance=None if level is None else _explain_scores(settings, trials, level),
        differing=tuple(key for key in settings.space.parameters if key.partition(".")[0] in SHARED_KEYS),
        result=_read_result(folder),
    )


def _read_result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise HeadwayError(f"result.json cannot be read ({error})", where=str(folder)) from None
    return result


@final
@dataclass(frozen=True)
class _Clock:
    """The clock of a trial's run, in seconds of training; None where nothing is recorded.

    Attributes:
        start: at its first step; that of a fork goes on from its parent's.
        rungs: at each rung.
        last: at its end.
    """

    start: float | None
    rungs: Mapping[int, float | None]
    last: float | None

    @property
    def total(self) -> float | None:
        return None if self.last is None or self.start is None else self.last - self.start


def _read_clock(sweep: SweepFolder, trial: Trial, objective: str, earlier: Mapping[int, _Clock]) -> _Clock:
    run = RunFolder(sweep.find_trial(trial.number))
    records = list(run.read_metrics()) if run.metrics_path.exists() else []
    evaluated = iter([record for record in records if record.get("kind") == "evaluate"])
    rungs: dict[int, float | None] = {}
    for rung, score in enumerate(trial.scores, trial.first_rung):
        # The journal has the score of the evaluation unchanged.
        found = next((one for one in evaluated if score is not None and one.get(objective) == score), None)
        rungs[rung] = None if found is None else found.get("seconds")
    last = records[-1].get("seconds") if records else None
    start = 0.0 if trial.parent is None else earlier[trial.parent].rungs.get(trial.first_rung - 1)
    return _Clock(start, rungs, last)


def _summarise_trial(
    state: State, trial: Trial, rank: int | None, clocks: Mapping[int, _Clock], waits: str
) -> TrialSummary:
    levels = state.plan.find_bracket(trial.number).levels
    last = len(levels) - 1
    points = list_scores(state, trial)
    if trial.parent is not None and (start := state.trials[trial.parent].get_score(trial.first_rung - 1)) is not None:
        points = [(levels[trial.first_rung - 1], start), *points]
    if trial.has_failed:
        what = "failed"
    elif trial.is_training:
        what = "training"
    elif trial.is_stopped:
        what = "stopped"
    else:
        what = "finished" if trial.rung == last else waits
    return TrialSummary(
        trial=trial.number,
        values=trial.values,
        parent=trial.parent,
        rank=rank,
        state="winner" if rank == 1 and what == "finished" else what,
        points=tuple(points),
        work=sum((_get_work(levels, rung) for rung, _ in enumerate(trial.scores, trial.first_rung)), Fraction(0)),
        seconds=clocks[trial.number].total,
        reason=trial.reason,
    )


def _get_work(levels: tuple[Fraction, ...], rung: int) -> Fraction:
    return levels[rung] - (levels[rung - 1] if rung else 0)


def _summarise_rungs(state: State) -> Iterator[RungSummary]:
    scores: dict[Fraction, list[float | None]] = defaultdict(list)
    work: dict[Fraction, Fraction] = defaultdict(Fraction)
    for trial in state.trials:
        levels = state.plan.find_bracket(trial.number).levels
        for rung, score in enumerate(trial.scores, trial.first_rung):
            scores[levels[rung]].append(score)
            work[levels[rung]] += _get_work(levels, rung)
    choose = max if state.plan.higher_is_better else min
    for level in sorted(scores):
        known = [score for score in scores[level] if score is not None]
        yield RungSummary(
            level=level,
            trials=len(known),
            failed=len(scores[level]) - len(known),
            work=work[level],
            best=choose(known, default=None),
        )


def _trace_progress(
    settings: SweepRecipe, state: State, records: Sequence[Record], clocks: Mapping[int, _Clock]
) -> Progress:
    results = [record for record in records if isinstance(record, Result)]
    # A failure has no evaluation of its own: the time until it is not known.
    timed = all(clocks[one.trial].rungs[one.rung] is not None for one in results if one.score is not None)
    choose = max if state.plan.higher_is_better else min
    spent, work, best, points = 0.0, Fraction(0), None, list[tuple[float, float]]()
    before: dict[int, float] = {}
    for one in results:
        work += _get_work(state.plan.find_bracket(one.trial).levels, one.rung)
        if timed:
            clock = clocks[one.trial]
            until = clock.last if one.score is None else clock.rungs[one.rung]
            if until is not None:
                spent += max(0.0, until - before.get(one.trial, clock.start or 0.0))
                before[one.trial] = until
        if one.score is None:
            continue
        x = spent if timed else float(work)
        if best is None or choose(best, one.score) != best:
            best = one.score
            points.append((x, best))
    if best is not None:
        points.append((spent if timed else float(work), best))
    # One full training takes as long as the trials took for each unit of work.
    unit = (spent / float(work) if work else 0.0) if timed else 1.0
    is_estimated, full, low = _expect_random(settings, state, math.ceil(MOST_RANDOM * work))
    return Progress(
        is_estimated=is_estimated,
        unit="seconds" if timed else "trainings",
        best=tuple(points),
        random=tuple((unit * count, score) for count, score in enumerate(full, 1)),
        random_low=tuple((unit * count, score) for count, score in enumerate(low, 1)),
    )


def _expect_random(settings: SweepRecipe, state: State, most: int) -> tuple[bool, list[float], list[float]]:
    """Returns `is_estimated` of `Progress`, and `random` and `random_low` without x."""
    # Those of forks, and what tpe suggests, are no random draws.
    drawn = [trial for trial in state.trials if trial.parent is None]
    if settings.space.method == "tpe":
        drawn = drawn[:RANDOM_TRIALS]
    own = [list_scores(state, trial) for trial in drawn]
    is_estimated = any(scores and scores[-1][0] < 1 for scores in own)
    possible = [extrapolate_scores(state, seed) for seed in range(IMPUTATIONS if is_estimated else 1)]
    if not possible[0]:
        return False, [], []
    low = [scores[-1][1] if scores else possible[0][one.number] for one, scores in zip(drawn, own, strict=True)]
    most, higher = min(len(drawn), most), state.plan.higher_is_better
    each = [
        compute_expected_best([full[one.number] for one in drawn], most, higher_is_better=higher) for full in possible
    ]
    return is_estimated, np.mean(each, axis=0).tolist(), compute_expected_best(low, most, higher_is_better=higher)


def _find_common_level(trials: Sequence[TrialSummary]) -> Fraction | None:
    own = [trial.points if trial.parent is None else trial.points[1:] for trial in trials]
    counts = Counter(level for points in own for level, _ in points)
    # The lowest of equals: on higher ones there are only trials that were good on it.
    return min(counts, key=lambda level: (-counts[level], level), default=None)


def _explain_scores(settings: SweepRecipe, trials: Sequence[TrialSummary], level: Fraction) -> ImportanceSummary | None:
    scores = [(trial, score) for trial in trials if (score := trial.get_score(level)) is not None]
    targets = [score for _, score in scores]
    log, keys = is_steep(targets), tuple(settings.space.parameters)
    columns = [
        [
            encode_value(settings.space.parameters[key], trial.values[key]) if key in trial.values else math.nan
            for key in keys
        ]
        for trial, _ in scores
    ]
    found = measure_importance(columns, np.log(targets) if log else targets)
    return None if found is None else ImportanceSummary(log=log, parameters=keys, found=found)
