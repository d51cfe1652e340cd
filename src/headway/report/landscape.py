"""Loss landscapes: the loss around trained networks, between them, and along the training path of one of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from headway.checkpoint.checkpoints import Checkpoints
from headway.checkpoint.checkpoints import read as read_checkpoint
from headway.checkpoint.locations import hold
from headway.core.errors import UsageError, suggest_nearest
from headway.core.run_folder import RunFolder
from headway.observe import directions
from headway.observe.directions import PlaneAxes, WeightVector
from headway.observe.sharpness import EpsilonSharpness, HessianEigenvalue
from headway.report.landscape_grid import (
    MEASURES,
    RunScore,
    SharpnessComparison,
    build_grid,
    choose_keys,
    correlate_sharpness,
)
from headway.report.landscape_runs import expand_folders
from headway.report.solution import EVALUATION, TRAINING, MetricCurves, Solution, open_solution
from headway.training import runs

STATISTICS = ("auto", "keep", "recompute")
SETS = ("both", "train", "eval")
Progress = Callable[[int, int], object]

# Extension of a line beyond its two solutions, as a share of their distance (as Li et al. draw it).
LINE_MARGIN = 0.5
# Extension of a plane beyond its marks, as a share of their range.
PLANE_MARGIN = 0.2
# Recipe keys that are always shown with each run, and those that do not matter for its minimum.
ALWAYS_SHOWN, NEVER_SHOWN = ("batch", "optimizer.lr", "optimizer.weight_decay"), ("name", "data.train", "data.eval")


@final
@dataclass(frozen=True, kw_only=True)
class LandscapeOptions:
    """Lines and planes to draw, and the data to measure them on."""

    # Add the plane of two random directions around each solution.
    plane: bool = False
    # Add straight lines from the first run to the others, and the plane through three runs.
    between: bool = False
    # Add each run's checkpoints, in the plane nearest to them.
    path: bool = False
    # Points on a line. The solutions themselves are added if they lie between two points.
    points: int = 31
    # Points on each side of a plane.
    grid: int = 13
    # Length of a random direction, in filter norms.
    radius: float = 1.0
    # Samples of each data set, drawn by `seed`.
    samples: int = 512
    seed: int = 0
    # Add Keskar's measure and the largest eigenvalues of the Hessian.
    sharpness: bool = True
    # Size of Keskar's box.
    epsilon: float = 1e-3
    # Data sets to use: both, train or eval.
    sets: str = "both"
    # Statistics of batch norm at each place. `keep`: those of the solution, moved along with the weights on a line to
    # another solution. `recompute`: measured again on the training sample. `auto`: kept around a solution; recomputed
    # between solutions and along a path, because those of neither end fit there.
    statistics: str = "auto"
    # Recipe keys of the grid's columns and rows. None: the two that differ, if exactly two of those that matter do.
    over: tuple[str, str] | None = None

    def check(self) -> None:
        """Raises UsageError if a number is out of range or two options contradict each other."""
        at_least = (("points", self.points, 3), ("grid", self.grid, 3), ("samples", self.samples, 1))
        for name, value, least in at_least:
            if value < least:
                raise UsageError(f"--{name} {value} is too few", fix=f"Give {least} or more.")
        for name, number in (("radius", self.radius), ("epsilon", self.epsilon)):
            if not 0 < number < math.inf:
                raise UsageError(f"--{name} {number:g} is not a distance", fix="Give a number above 0.")
        for name, word, known in (("sets", self.sets, SETS), ("statistics", self.statistics, STATISTICS)):
            if word not in known:
                raise UsageError(f"there is no --{name} {word!r}", fix=suggest_nearest(word, known))
        if self.sets == "eval" and self.sharpness:
            fix = "Add --no-sharpness, or leave --sets out."
            raise UsageError("sharpness needs the training set", where="--sets eval", fix=fix)
        if self.sets == "eval" and self.statistics == "recompute":
            fix = "Set --statistics keep, or leave --sets out."
            raise UsageError("batch norm statistics need the training set", where="--sets eval", fix=fix)


@final
@dataclass(frozen=True, kw_only=True)
class LossLine:
    """Loss and metrics along one direction."""

    kind: Literal["around", "between"]
    name: str
    # Name and position of each solution on the line.
    places: list[tuple[str, float]]
    x: list[float]
    curves: MetricCurves
    # Treatment of the batch norm statistics: kept, recomputed or none.
    statistics: str
    distance: float | None = None
    # By data set: rise of the loss above the straight line between the losses of both solutions (Frankle et al. 2020,
    # arXiv 1912.05671). Empty for a line around one solution.
    barrier: dict[str, float | None] = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True)
class LossPlane:
    """Loss and metrics over two directions, with rows of constant y."""

    kind: Literal["around", "between", "path"]
    name: str
    # Name and position of each solution; on a `path` in the order of training.
    marks: list[tuple[str, float, float]]
    x: list[float]
    y: list[float]
    surfaces: dict[str, dict[str, list[list[float | None]]]]
    statistics: str
    # Share of the squared distances of all marks from the last one that each axis shows.
    shares: tuple[float, float] = (1.0, 1.0)


@final
@dataclass(frozen=True, kw_only=True)
class RunSharpness:
    """Sharpness of the minimum that a run ended in, on the sample of its training set."""

    # None if the loss is not finite there.
    keskar: EpsilonSharpness | None
    # Largest eigenvalue of the Hessian; None if the network has no second derivative.
    eigenvalue: HessianEigenvalue | None
    # The same by relative change: each weight in units of its filter norm.
    relative: HessianEigenvalue | None

    def list_measures(self) -> dict[str, float | None]:
        """Lists the number of each measure, by the keys of MEASURES."""
        numbers = (
            self.keskar and self.keskar.percent,
            *(one and one.value for one in (self.eigenvalue, self.relative)),
        )
        return dict(zip(MEASURES, numbers, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class LandscapeRun:
    """Numbers of one run at its solution, recipe values to compare by, and sharpness."""

    name: str
    folder: str
    numbers: dict[str, dict[str, float | None]]
    samples: dict[str, int]
    recipe: dict[str, Any]
    sharpness: RunSharpness | None


@final
@dataclass(frozen=True, kw_only=True)
class Landscape:
    """All lines, planes and numbers of a landscape."""

    options: LandscapeOptions
    runs: list[LandscapeRun]
    lines: list[LossLine]
    planes: list[LossPlane]
    # None for a single run.
    comparison: SharpnessComparison | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compute_landscape(
    folders: Sequence[Path], options: LandscapeOptions, progress: Progress | None = None
) -> Landscape:
    """Measures the loss landscape of runs, along filter-normalised directions (Li et al. 2018, arXiv 1712.09913).

    A folder of runs, such as that of a sweep, stands for the finished ones in it. The network is in evaluation mode and
    in float32. The loss is the task's, without weight decay. The same call gives the same numbers on the same machine.

    Raises:
        UsageError: A folder is not a run, a run has no weights, or the runs do not fit the options.
        HeadwayError: The data of a run cannot be opened.
    """
    options.check()
    folders = expand_folders(folders)
    if not folders:
        raise UsageError("no run was given", fix="headway landscape RUN [RUN2 ...].")
    if options.between and len(folders) < 2:
        raise UsageError("a line between solutions needs two runs", where="--between", fix="Name another run.")
    names = _choose_names(folders)
    with ExitStack() as stack:
        solutions = []
        for name, folder in zip(names, folders, strict=True):
            solution = open_solution(name, RunFolder.open(folder), options.sets, options.samples, options.seed)
            solutions.append(stack.enter_context(closing(solution)))
        paths = [_load_path(solution) if options.path else [] for solution in solutions]
        if options.between:
            for other in solutions[1:]:
                check_comparable(solutions[0], other)
        recipes = _select_recipe_values(solutions)
        # Keys that do not differ are refused before anything is measured.
        keys = choose_keys(recipes, options.over)
        landscape = _measure_solutions(solutions, paths, recipes, options, progress)
        if len(solutions) < 2:
            return landscape
        return replace(landscape, comparison=_compare_sharpness(landscape.runs, solutions[0].setup.task.primary, keys))


def _compare_sharpness(
    drawn: Sequence[LandscapeRun], primary: str, keys: tuple[str, str] | None
) -> SharpnessComparison:
    """Puts the sharpness of runs beside their metric: that of the task, of the evaluation sets if all have one."""
    which = EVALUATION if all(EVALUATION in one.numbers for one in drawn) else TRAINING
    metric = primary if all(primary in one.numbers.get(which, {}) for one in drawn) else "loss"
    scores = [
        RunScore(
            name=one.name,
            recipe=one.recipe,
            metric=one.numbers.get(which, {}).get(metric),
            sharpness=one.sharpness.list_measures() if one.sharpness else {},
        )
        for one in drawn
    ]
    grid = build_grid(scores, keys) if keys is not None else None
    correlations = correlate_sharpness(scores)
    return SharpnessComparison(metric=metric, which=which, scores=scores, grid=grid, correlations=correlations)


def _measure_solutions(
    solutions: list[Solution],
    paths: list[list[tuple[str, WeightVector]]],
    recipes: list[dict[str, Any]],
    options: LandscapeOptions,
    progress: Progress | None,
) -> Landscape:
    # The number of ticks is known before the first measurement, for the progress bar.
    first, others = solutions[0], solutions[1:]
    places = len(solutions) * (len(_choose_points_around(options)) + (options.grid**2 if options.plane else 0) + 1)
    places += sum(options.grid**2 for path in paths if path)
    if options.between:
        places += len(others) * len(_choose_points_between(options)) + (options.grid**2 if len(others) == 2 else 0)
    done, total = 0, places + (sum(one.sharpness_steps for one in solutions) if options.sharpness else 0)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, total), total)

    for one in solutions:
        one.tick = tick
    drawn, lines, planes = [], [], []
    for one, path, recipe in zip(solutions, paths, recipes, strict=True):
        numbers = one.measure(recompute=False)
        how = _measure_sharpness(one, options) if options.sharpness else None
        samples = {name: sample.count for name, sample in one.samples.items()}
        folder = str(one.run.folder)
        drawn.append(
            LandscapeRun(name=one.name, folder=folder, numbers=numbers, samples=samples, recipe=recipe, sharpness=how)
        )
        lines.append(_measure_line_around(one, options))
        if options.plane:
            planes.append(_measure_plane_around(one, options))
        if path:
            planes.append(_measure_path_plane(one, path, options))
    # States are copied at the end: all measurements put the weights back.
    if options.between:
        states = [directions.copy_state(one.setup.model) for one in solutions]
        for other, state in zip(others, states[1:], strict=True):
            lines.append(_measure_line_between(first, states[0], other.name, state, options))
        if len(others) == 2:
            planes.append(_measure_plane_between(first, [one.name for one in solutions], states, options))
    return Landscape(options=options, runs=drawn, lines=lines, planes=planes, comparison=None)


def _measure_sharpness(one: Solution, options: LandscapeOptions) -> RunSharpness:
    keskar, eigenvalue, relative = one.measure_sharpness(options.epsilon, options.seed)
    return RunSharpness(keskar=keskar, eigenvalue=eigenvalue, relative=relative)


def _measure_line_around(one: Solution, options: LandscapeOptions) -> LossLine:
    direction = directions.draw_direction(one.setup.model, options.seed)
    recompute = one.should_recompute(options.statistics == "recompute")
    x = _choose_points_around(options)
    curves = one.measure_line([[(at, direction)] for at in x], recompute=recompute)
    how = one.describe_statistics(recompute)
    return LossLine(kind="around", name=one.name, places=[(one.name, 0.0)], x=x, curves=curves, statistics=how)


def _measure_line_between(
    one: Solution, start: WeightVector, other: str, end: WeightVector, options: LandscapeOptions
) -> LossLine:
    recompute = one.should_recompute(options.statistics != "keep" and options.sets != "eval")
    x, away = _choose_points_between(options), directions.compute_difference(start, end)
    curves = one.measure_line([[(at, away)] for at in x], recompute=recompute)
    apart = directions.compute_distance(start, end, list(directions.get_trained_parameters(one.setup.model)))
    barrier = {name: _compute_barrier(x, curve["loss"]) for name, curve in curves.items()}
    return LossLine(
        kind="between",
        name=f"{one.name} to {other}",
        places=[(one.name, 0.0), (other, 1.0)],
        x=x,
        curves=curves,
        statistics=one.describe_statistics(recompute),
        distance=apart,
        barrier=barrier,
    )


def _compute_barrier(x: Sequence[float], losses: Sequence[float | None]) -> float | None:
    # Only places between the solutions count: beyond them the loss rises anyway.
    inside = [(at, loss) for at, loss in zip(x, losses, strict=True) if 0 <= at <= 1]
    if any(loss is None for _, loss in inside):
        return None
    known = [(at, loss) for at, loss in inside if loss is not None]
    start, end = known[0][1], known[-1][1]
    return max(loss - (start + at * (end - start)) for at, loss in known)


def _measure_plane_around(one: Solution, options: LandscapeOptions) -> LossPlane:
    model, side = one.setup.model, _space_evenly(-options.radius, options.radius, options.grid)
    u, v = (directions.draw_direction(model, options.seed + place) for place in range(2))
    recompute = one.should_recompute(options.statistics == "recompute")
    surfaces = one.measure_plane(side, side, u, v, {}, recompute=recompute)
    how, marks = one.describe_statistics(recompute), [(one.name, 0.0, 0.0)]
    return LossPlane(kind="around", name=one.name, marks=marks, x=side, y=side, surfaces=surfaces, statistics=how)


def _measure_plane_between(
    one: Solution, names: list[str], states: Sequence[WeightVector], options: LandscapeOptions
) -> LossPlane:
    first, second, third = states
    axes = directions.span_plane(first, second, third, list(directions.get_trained_parameters(one.setup.model)))
    return _measure_plane("between", ", ".join(names), one, names, axes, first, options)


def _measure_path_plane(one: Solution, path: list[tuple[str, WeightVector]], options: LandscapeOptions) -> LossPlane:
    names, states = [name for name, _ in path], [state for _, state in path]
    axes = directions.fit_plane(states[-1], states, list(directions.get_trained_parameters(one.setup.model)))
    return _measure_plane("path", one.name, one, names, axes, states[-1], options)


def _measure_plane(
    kind: Literal["between", "path"],
    name: str,
    one: Solution,
    names: list[str],
    axes: PlaneAxes,
    origin: WeightVector,
    options: LandscapeOptions,
) -> LossPlane:
    recompute = one.should_recompute(options.statistics != "keep" and options.sets != "eval")
    sides = []
    for values in zip(*axes.coordinates, strict=True):
        beyond = PLANE_MARGIN * (max(values) - min(values))
        sides.append(_space_evenly(min(values) - beyond, max(values) + beyond, options.grid))
    x, y = sides
    surfaces = one.measure_plane(x, y, axes.first, axes.second, origin, recompute=recompute)
    marks = [(mark, *place) for mark, place in zip(names, axes.coordinates, strict=True)]
    how = one.describe_statistics(recompute)
    return LossPlane(kind=kind, name=name, marks=marks, x=x, y=y, surfaces=surfaces, statistics=how, shares=axes.shares)


def _space_evenly(low: float, high: float, count: int) -> list[float]:
    return [float(value) for value in np.linspace(low, high, count)]


def _choose_points_around(options: LandscapeOptions) -> list[float]:
    return _insert_points(_space_evenly(-options.radius, options.radius, options.points), 0.0)


def _choose_points_between(options: LandscapeOptions) -> list[float]:
    return _insert_points(_space_evenly(-LINE_MARGIN, 1 + LINE_MARGIN, options.points), 0.0, 1.0)


def _insert_points(values: list[float], *places: float) -> list[float]:
    """Adds places to sorted values; a value that equals a place up to rounding is replaced by it."""
    near = 1e-6 * (values[-1] - values[0])
    return sorted([*(one for one in values if all(abs(one - place) > near for place in places)), *places])


def _load_path(solution: Solution) -> list[tuple[str, WeightVector]]:
    """Loads name and weights of each checkpoint of a run, the oldest first.

    Raises:
        UsageError: The run kept fewer than three checkpoints.
    """
    recipe, base = solution.setup.recipe, solution.setup.loaded.base
    checkpoints = Checkpoints.locate(solution.run.folder, recipe.checkpoint.keep, recipe.checkpoint.folder, base)
    locations = list(reversed(checkpoints.paths()))
    if len(locations) < 3:
        what = f"a path needs at least three checkpoints, and this run kept {len(locations)}"
        fix = "Train with checkpoint.keep=20, for example, or leave --path out."
        raise UsageError(what, where=str(solution.run.folder), fix=fix)
    wanted = directions.get_tensors(solution.setup.model)
    out: list[tuple[str, WeightVector]] = []
    for location in locations:
        # Checkpoints can be remote: the hold keeps this process from removing the local copy.
        with hold(location):
            read = read_checkpoint(location)
        tensors = {name.removeprefix("model/"): one for name, one in read.tensors.items() if name.startswith("model/")}
        state = {name: tensors[name].to(one) for name, one in wanted.items() if name in tensors}
        out.append((f"step {read.step:,}", state))
    return out


def check_comparable(one: Solution, other: Solution) -> None:
    """Raises UsageError if no line can join two runs: their weights, classes, images or normalisation differ."""
    here, there = (directions.get_tensors(each.setup.model) for each in (one, other))
    unlike = [name for name in (*here, *there) if name not in here or name not in there]
    unlike += [name for name in here if name in there and here[name].shape != there[name].shape]
    where, fix = str(other.run.folder), "Leave --between out: the runs are then drawn side by side."
    if unlike:
        what = f"this run has another network than {one.run.folder} ({unlike[0]} differs), so no line joins them"
        raise UsageError(what, where=where, fix=fix)
    if one.setup.target != other.setup.target:
        raise UsageError(f"this run has other classes than {one.run.folder}", where=where, fix=fix)
    for key, words in (("size", "size"), ("channels", "number of channels")):
        mine, theirs = getattr(one.setup.inputs, key), getattr(other.setup.inputs, key)
        if mine != theirs:
            what = f"the images of this run have another {words} than those of {one.run.folder}: {theirs}, not {mine}"
            raise UsageError(what, where=where, fix=fix)
    for key in ("normalise", "mean", "std"):
        if getattr(one.setup.recipe.augment, key) != getattr(other.setup.recipe.augment, key):
            what = f"this run normalises its images differently from {one.run.folder} (augment.{key})"
            raise UsageError(what, where=where, fix=fix)


def _choose_names(folders: Sequence[Path]) -> list[str]:
    """Chooses the shortest ends of the paths that tell all runs apart."""
    resolved = [folder.resolve() for folder in folders]
    if len(set(resolved)) < len(resolved):
        twice = next(one for one in resolved if resolved.count(one) > 1)
        raise UsageError("this run is named twice", where=str(twice), fix="Name each run once.")
    most = max(len(one.parts) for one in resolved)
    ways = (["/".join(one.parts[-depth:]) for one in resolved] for depth in range(1, most + 1))
    return next(names for names in ways if len(set(names)) == len(names))


def _select_recipe_values(solutions: Sequence[Solution]) -> list[dict[str, Any]]:
    """Selects batch, learning rate, weight decay, and all other recipe values that differ between the runs."""
    # The recipes as trained: the solutions have changed some values for the measurement.
    recipes = [dict(runs.reload_recipe(one.run).list_leaves()) for one in solutions]
    keys = [key for key in recipes[0] if key in ALWAYS_SHOWN]
    every = dict.fromkeys(key for recipe in recipes for key in recipe)
    keys += [k for k in every if k not in (*keys, *NEVER_SHOWN) and len({str(recipe.get(k)) for recipe in recipes}) > 1]
    return [{key: recipe.get(key) for key in keys} for recipe in recipes]
