"""Comparison of two finished runs: speed, metrics, and the differences between their recipes and machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.run_folder import RunFolder
from headway.core.statistics import compute_median_interval
from headway.report.run_report import describe_machine, flatten_recipe, format_metric
from headway.setup.run_log import NON_METRIC_KEYS

# Images/s that differ by less count as equal, and so do rates that vary as much within each run.
SAME_RATE = 0.03
# Share of the change that one stage must explain to be named as the cause.
CAUSE_SHARE = 0.5
# Most recipe keys that the sentence lists.
MAX_NAMED_KEYS = 5
# Stages that images/s leave out.
OUTSIDE_STAGES = ("evaluate", "checkpoint", "first batch")


@final
@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """One of the two runs, with its records."""

    run: RunFolder
    # Shortest part of its path that differs from the other run's.
    name: str
    summary: Mapping[str, Any]
    about: Mapping[str, Any]
    # Training records.
    train: Sequence[Mapping[str, Any]]
    # Evaluation records.
    evaluated: Sequence[Mapping[str, Any]]

    @staticmethod
    def load(run: RunFolder, name: str) -> ComparedRun:
        """Loads a run. Raises UsageError if it has not ended or has made no step."""
        summary, records = run.read_summary(), list(run.read_metrics())
        if not summary:
            fix = f"Wait until it ends, or resume it: {run.resume_command}"
            raise UsageError("this run has not ended, so it has no summary to compare", where=str(run.folder), fix=fix)
        if not summary["step"]:
            raise UsageError("this run made no step, so it cannot be compared", where=str(run.folder))
        train, evaluated = ([one for one in records if one["kind"] == kind] for kind in ("train", "evaluate"))
        about = run.read_provenance(samples=int)
        return ComparedRun(run=run, name=name, summary=summary, about=about, train=train, evaluated=evaluated)

    @cached_property
    def images(self) -> float:
        """Number of images that the run trained on."""
        images: float = self.summary["epochs"] * self.about["samples"]
        return images

    @property
    def images_per_step(self) -> float:
        """Number of images in a step, on average."""
        images: float = self.images / self.summary["step"]
        return images

    @cached_property
    def recipe_values(self) -> dict[str, str]:
        """Recipe values by dotted key."""
        return flatten_recipe(self.run.read_recipe_text())

    def list_metrics(self) -> dict[str, float | None]:
        """Lists the metrics of the last evaluation, the loss last."""
        last = self.evaluated[-1].items() if self.evaluated else ()
        metrics = {name: value for name, value in last if name not in NON_METRIC_KEYS}
        return dict(sorted(metrics.items(), key=lambda item: item[0] == "loss"))


@final
@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """A value that differs between the two runs."""

    what: str
    run: str
    against: str


@final
@dataclass(frozen=True)
class Comparison:
    """Two runs. Ratios are those of `run` over `against`, the reference."""

    run: ComparedRun
    against: ComparedRun

    @property
    def sides(self) -> tuple[ComparedRun, ComparedRun]:
        """Both runs, the reference last."""
        return self.run, self.against

    def list_numbers(self) -> dict[str, tuple[float | None, float | None]]:
        """Lists numbers of both runs: images/s, seconds, waiting share, seconds to a common goal, common metrics."""
        numbers: dict[str, tuple[float | None, float | None]]
        numbers = {name: _read_both(self.sides, name) for name in ("images_s", "seconds", "wait_share")}
        goals = [side.summary.get("stop_at") for side in self.sides]
        # Times to different goals are not comparable.
        if goals[0] and goals[1] and goals[0]["goal"] == goals[1]["goal"]:
            numbers["seconds_to_reach"] = (goals[0]["seconds_to_reach"], goals[1]["seconds_to_reach"])
        mine, theirs = (side.list_metrics() for side in self.sides)
        return numbers | {name: (value, theirs[name]) for name, value in mine.items() if name in theirs}

    @property
    def is_per_step(self) -> bool:
        """True if steps have the same number of images in both runs; if not, stages are compared per 1,000 images."""
        mine, theirs = (side.images_per_step for side in self.sides)
        return abs(mine - theirs) < 1e-6 * theirs

    @property
    def unit(self) -> str:
        """Unit of the stage times."""
        return "ms per step" if self.is_per_step else "ms per 1,000 images"

    def list_stages(self) -> dict[str, tuple[float, float]]:
        """Lists the seconds of each stage in both runs, per step or per 1,000 images."""
        mine, theirs = (self._scale_seconds(side) for side in self.sides)
        return {stage: (mine.get(stage, 0.0), theirs.get(stage, 0.0)) for stage in mine | theirs}

    def _scale_seconds(self, side: ComparedRun) -> dict[str, float]:
        count = side.summary["step"] if self.is_per_step else side.images / 1000
        return {stage: seconds / count for stage, seconds in side.summary["seconds_by_stage"].items()}

    def list_recipe_differences(self) -> list[ValueDifference]:
        """Lists the recipe keys whose values differ."""
        return _find_differences(self.run.recipe_values, self.against.recipe_values)

    def list_machine_differences(self) -> list[ValueDifference]:
        """Lists the differences between machines, versions and data."""
        return _find_differences(*(dict(describe_machine(dict(side.about))) for side in self.sides))

    def is_distinguishable(self) -> bool:
        """Returns True if images/s differ by more than SAME_RATE, and by more than they vary within each run."""
        mine, theirs = _read_both(self.sides, "images_s")
        if abs(mine / theirs - 1) < SAME_RATE:
            return False
        rates = [[one["images_s"] for one in side.train] for side in self.sides]
        # Without records there is no spread to compare with.
        if not all(rates):
            return True
        (_, low, high), (_, other_low, other_high) = map(compute_median_interval, rates)
        return high < other_low or other_high < low

    def describe(self) -> str:
        """Describes the change of speed and its cause, and the differences between the runs, in one sentence."""
        mine, theirs = _read_both(self.sides, "images_s")
        rates = f"({mine:,.0f} against {theirs:,.0f})"
        text = f"About the same images/s {rates}"
        if abs(mine / theirs - 1) >= SAME_RATE:
            text = f"{mine:,.0f} images/s against {theirs:,.0f}, a difference within the spread of each run"
        if self.is_distinguishable():
            text = f"{mine / theirs:.2f} times the images/s {rates}: {self._describe_cause(faster=mine > theirs)}"
        keys = [one.what for one in self.list_recipe_differences()]
        named = ", ".join(keys[:MAX_NAMED_KEYS])
        more = f" and {len(keys) - MAX_NAMED_KEYS} more" if len(keys) > MAX_NAMED_KEYS else ""
        text += f"; the recipe differs in {named}{more}" if keys else "; the recipes are the same"
        if others := [one.what for one in self.list_machine_differences()]:
            text += f"; also different: {', '.join(others)}"
        for name, (value, other) in self.list_numbers().items():
            if name in self.run.list_metrics() and name != "loss":
                text += f"; {name.replace('_', ' ')} {format_metric(name, value)} against {format_metric(name, other)}"
        for side in self.sides:
            if not side.summary["finished"]:
                text += f"; {side.name} was stopped at step {side.summary['step']} of {side.summary['steps']}"
        return f"{text}."

    def _describe_cause(self, *, faster: bool) -> str:
        """Names the stage that explains most of the change, and its time in both runs."""
        # Positive for a stage that moved with the whole: one that fell in a faster run, or rose in a slower one.
        changes = {
            stage: (theirs - mine) * (1 if faster else -1)
            for stage, (mine, theirs) in self.list_stages().items()
            if stage not in OUTSIDE_STAGES
        }
        stage = max(changes, key=lambda one: changes[one])
        if changes[stage] < CAUSE_SHARE * sum(changes.values()):
            return "several stages together"
        went = "fell" if faster else "rose"
        # The share of waiting is clearer than milliseconds, if it moved in the same direction.
        mine, theirs = _read_both(self.sides, "wait_share")
        if stage == "wait" and (mine < theirs) == faster:
            return f"waiting {went} from {theirs:.0%} to {mine:.0%}"
        here, there = self.list_stages()[stage]
        return f"{stage} {went} from {there * 1e3:.3g} to {here * 1e3:.3g} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        """Returns all numbers as a JSON tree."""
        numbers = {
            name: {"run": mine, "against": theirs, "ratio": compute_ratio(mine, theirs)}
            for name, (mine, theirs) in self.list_numbers().items()
        }
        return {
            "run": str(self.run.run.folder),
            "against": str(self.against.run.folder),
            "sentence": self.describe(),
            "numbers": numbers,
            "told_apart": self.is_distinguishable(),
            "unit": self.unit,
            "stages": {
                stage: {"run": mine * 1e3, "against": theirs * 1e3}
                for stage, (mine, theirs) in self.list_stages().items()
            },
            "recipe": [asdict(one) for one in self.list_recipe_differences()],
            "machine": [asdict(one) for one in self.list_machine_differences()],
        }


def compare_runs(folder: Path, against: Path) -> Comparison:
    """Compares a run with another one.

    Raises:
        UsageError: A folder is not a run folder, its run has not ended or has made no step, or both are the same run.
    """
    one, other = RunFolder.open(folder), RunFolder.open(against)
    if folder.resolve() == against.resolve():
        fix = "Name another run to compare with."
        raise UsageError("both folders are the same run", where=str(folder), fix=fix)
    return Comparison(
        *(ComparedRun.load(run, name) for run, name in zip((one, other), _choose_names(folder, against), strict=True))
    )


def compute_ratio(mine: float | None, theirs: float | None) -> float | None:
    """Divides the first number by the second; None if one is unknown or the second is 0."""
    return None if mine is None or not theirs else mine / theirs


def _read_both(sides: tuple[ComparedRun, ComparedRun], name: str) -> tuple[float, float]:
    """Reads a number from both summaries."""
    return sides[0].summary[name], sides[1].summary[name]


def _find_differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[ValueDifference]:
    both = [(what, mine.get(what, "absent"), theirs.get(what, "absent")) for what in {**mine, **theirs}]
    return [ValueDifference(what=what, run=one, against=other) for what, one, other in both if one != other]


def _choose_names(one: Path, other: Path) -> tuple[str, str]:
    """Returns the shortest ends of two paths that differ."""
    for length in range(1, 1 + max(len(one.resolve().parts), len(other.resolve().parts))):
        names = tuple("/".join(path.resolve().parts[-length:]) for path in (one, other))
        if names[0] != names[1]:
            return names[0], names[1]
    return str(one), str(other)
