"""Page of a sweep: its result, its trials, what mattered, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from headway.core.files import write_atomically
from headway.core.text_format import format_duration, pluralise
from headway.page import panel, renderer
from headway.page.panel import Panel, Scale
from headway.page.values import PARALLEL_HELP, format_value, round_number
from headway.report.run_report import format_metric
from headway.sweep.parameter import is_same
from headway.sweep.sweep_summary import SweepSummary, TrialSummary

NAME = "sweep.html"
SECTIONS = ("Result", "Trials", "Parameters", "Costs")

SAME_BATCHES = (
    "All trials saw the same samples in the same order with the same augmentation (common random numbers), so the "
    "differences between trials have less variance than with draws of their own."
)


def write_page(summary: SweepSummary) -> Path:
    """Writes sweep.html in the folder of a sweep and returns its path."""
    path = summary.folder / NAME
    settings = summary.settings
    state = "finished" if summary.result else "not finished"
    html = renderer.render(
        build_panels(summary),
        title=f"{summary.folder.resolve().name}",
        subtitle=f"Headway sweep by {settings.method}, {state}; {pluralise(len(summary.trials), 'trial')}, "
        f"compared by {settings.objective} ({'higher' if settings.higher_is_better else 'lower'} is better)",
        sections=SECTIONS,
    )
    write_atomically(path, html)
    return path


def build_panels(summary: SweepSummary) -> list[Panel]:
    """Builds the panels of the page."""
    return [
        _build_cards(summary),
        *_build_winner_table(summary),
        *([_build_progress(summary)] if summary.winner is not None else []),
        _build_parallel(summary),
        *([_build_rungs(summary)] if summary.winner is not None else []),
        *_build_importance(summary),
        *_build_slices(summary),
        _build_rung_table(summary),
        *_build_failure_table(summary),
        _build_trial_table(summary),
    ]


def _build_cards(summary: SweepSummary) -> Panel:
    objective, cards = summary.settings.objective, list[tuple[str, str, str]]()
    words = objective.replace("_", " ")
    if (winner := summary.winner) is not None:
        note = f"trial {winner.trial}, the best of {len(summary.trials):,} noisy scores, so biased"
        if len(summary.trials) == 1:
            note = "the only trial"
        if winner.state != "winner":
            note = f"trial {winner.trial}, trained to {_format_level(winner.level)} so far"
        cards.append((f"{words} of the winner", format_metric(objective, winner.score), note))
    retrained = summary.result.get("retrained", {})
    if "mean" in retrained:
        note = f"± {format_metric(objective, retrained['interval'])} (95 %), {len(retrained['scores'])} new seeds"
        cards.append((f"{words}, trained again", format_metric(objective, retrained["mean"]), note))
    elif retrained.get("scores"):
        cards.append((f"{words}, trained again", format_metric(objective, retrained["scores"][0]), "one new seed"))
    failed = sum(trial.state == "failed" for trial in summary.trials)
    cards.append(("trials", f"{len(summary.trials):,}", f"{failed:,} failed" if failed else "none failed"))
    work = sum((trial.work for trial in summary.trials), Fraction(0))
    note = f"of a budget of {_format_number(float(summary.settings.budget))}"
    cards.append(("full trainings", _format_number(float(work)), note))
    if (seconds := _sum_seconds(summary.trials)) is not None:
        cards.append(("training time", format_duration(seconds), "of all trials, each in its own turns"))
    cards += _list_core_cards(summary.result)
    note = SAME_BATCHES if len(summary.trials) > 1 else ""
    if summary.differing:
        note = (
            f"Trials differ in {' and '.join(summary.differing)}, which changes the batches: only trials that are "
            "equal in that saw the same samples in the same order with the same augmentation."
        )
    return panel.cards("result", "Result", cards, section="Result", order=100, note=note)


def _list_core_cards(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    predicted = result.get("predicted")
    if "core_s" in result:
        note = f"in {format_duration(result['seconds'])} since the last start"
        if predicted is not None:
            ours = f"{format_duration(predicted['core_s'])} in {format_duration(predicted['wall_s'])}"
            note += f"; predicted: {ours}"
        yield "time of cores", format_duration(result["core_s"]), note
    if predicted is not None:
        gain = predicted["own_loaders_s"] / predicted["core_s"]
        yield "shared input", f"{gain:.2f} x", "predicted cost with a loader for each trial, over that with shared ones"


def _build_winner_table(summary: SweepSummary) -> list[Panel]:
    if (winner := summary.winner) is None:
        return []
    rows = [(key, format_value(value)) for key, value in winner.values.items()]
    scores = [f"{format_metric('', score)} after {_describe_level(level)}" for level, score in winner.points]
    note = f"{'Scores' if len(scores) > 1 else 'Score'}: {', '.join(scores)}."
    retrained = summary.result.get("retrained", {}).get("scores", [])
    if retrained:
        note += f" Trained again with new seeds: {', '.join(format_metric('', score) for score in retrained)}."
    if summary.result:
        note += " Its recipe is winner/recipe.yaml."
    title = f"Winner: trial {winner.trial}"
    return [panel.table("winner", title, ("parameter", "value"), rows, section="Result", order=110, note=note)]


def _build_progress(summary: SweepSummary) -> Panel:
    progress, settings = summary.progress, summary.settings
    # Steps: between two improvements the best stays what it was.
    steps = [point for before, after in pairwise(progress.best)
             for point in (before, (after[0], before[1]))] + list(progress.best[-1:])  # fmt: skip
    series = [("this sweep", *_split(steps))]
    if progress.random:
        series.append(("random search, expected", *_split(progress.random)))
    if progress.is_estimated:
        series.append(("random search, scores as stopped", *_split(progress.random_low)))
    mean = summary.result.get("retrained", {}).get("mean")
    if mean is not None and progress.best:
        ends = [progress.best[0][0], max(x for _, xs, _ in series for x in xs)]
        series.append(("the winner with new seeds, mean", ends, [round_number(mean)] * 2))
    note = (
        "Best score of any trial so far, at whatever rung. Random search: the expected best of as many full trainings "
        "of this sweep's trials. "
    )
    if progress.is_estimated:
        note += (
            "What stopped trials would have reached is a rough estimate from those that went on; the other line takes "
            "the scores at which they stopped. "
        )
    label = "full trainings of work"
    if progress.unit == "seconds":
        note += "A full training takes as long as the trials took for as much work."
        label = "seconds of training, all trials added up"
    return panel.lines(
        "best-so-far",
        "Best so far, against random search",
        series,
        x_label=label,
        y_label=settings.objective.replace("_", " "),
        log_y=summary.has_log_scores,
        section="Result",
        order=120,
        note=note,
    )


def _split(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [round_number(x) for x, _ in points], [round_number(y) for _, y in points]


def _build_parallel(summary: SweepSummary) -> Panel:
    trials = summary.trials
    axes = [_build_parameter_axis(summary, key, trials) for key in summary.settings.space.parameters]
    if len({trial.level for trial in trials}) > 1:
        levels = [float(trial.level) or None for trial in trials]
        axes.append(panel.axis("trained", levels, scale="log", ticks=_list_level_ticks(summary), missing="failed"))
    axes.append(_build_score_axis(summary, [round_number(trial.score) for trial in trials]))
    names, ranks = _name_trials(trials)
    note = (
        f"A line for each trial, the best on top. {PARALLEL_HELP} Scores are the newest of each trial; the table of "
        "trials has all numbers."
    )
    title = "Trials: parameters and score"
    return panel.parallel("parallel", title, names, ranks, axes, section="Trials", order=200, note=note)


def _build_rungs(summary: SweepSummary) -> Panel:
    # A line begins at its first rung, and a fork at the rung of its parent.
    x = [[float(level) for level, _ in trial.points] for trial in summary.trials]
    y = [[round_number(score) for _, score in trial.points] for trial in summary.trials]
    axis = panel.axis("fraction of a full training", x, scale="log", ticks=_list_level_ticks(summary))
    names, ranks = _name_trials(summary.trials)
    note = "A line for each trial, from rung to rung. It ends where the trial was stopped; the best went on."
    return panel.paths(
        "rungs",
        "Rungs: score over training",
        names,
        ranks,
        [axis],
        _build_score_axis(summary, y),
        section="Trials",
        order=210,
        note=note,
    )


def _build_importance(summary: SweepSummary) -> list[Panel]:
    found = summary.importance
    given: dict[str, Any] = {"section": "Parameters", "order": 300}
    if summary.common_level is None:
        return []
    title = f"Importance of parameters, after {_describe_level(summary.common_level)}"
    if found is None:
        text = "There are too few scores to tell parameters that matter from those that do not."
        return [panel.text("importance", title, text, **given)]
    r2 = found.found.r2
    if r2 <= 0:
        text = (
            f"No parameter explains the scores of {pluralise(found.found.scores, 'trial')}: a random forest predicts "
            f"those that it has not seen no better than their mean does (R² = {r2:.2f}). More trials may tell."
        )
        return [panel.text("importance", title, text, **given)]
    note = (
        f"Share of what a random forest explains of the {'logarithms of the ' if found.log else ''}scores of "
        f"{pluralise(found.found.scores, 'trial')}, by each parameter: permutation importance on trials that a tree "
        f"has not seen. Out of bag, the forest predicts R² = {r2:.2f} of the variance"
    )
    note += ". " if r2 > 0.3 else ": with so little the shares say hardly anything. "
    note += "Failed trials are left out; a narrow range makes a parameter look unimportant."
    ranked = sorted(zip(found.parameters, found.found.shares, strict=True), key=lambda one: -one[1])
    values = [round(100 * share, 1) for _, share in ranked]
    label = "share, %"
    return [
        panel.bars(
            "importance", title, [key for key, _ in ranked], [("share", values)], x_label=label, note=note, **given
        )
    ]


def _build_slices(summary: SweepSummary) -> list[Panel]:
    level = summary.common_level
    if level is None:
        return []
    # Scores at one level: those of trials that went on are higher because they trained longer.
    trials = [one for one in summary.trials if one.get_score(level) is not None or one.state == "failed"]
    axes = [_build_parameter_axis(summary, key, trials, in_lists=True) for key in summary.settings.space.parameters]
    scores = [[round_number(trial.get_score(level))] for trial in trials]
    names, ranks = _name_trials(trials)
    note = (
        "The rung that most trials reached; on a higher one there are only trials that did well. Colours: final ranks."
    )
    return [
        panel.paths(
            "slices",
            f"Slices: score after {_describe_level(level)} over each parameter",
            names,
            ranks,
            axes,
            _build_score_axis(summary, scores),
            section="Parameters",
            order=310,
            note=note,
        )
    ]


def _build_rung_table(summary: SweepSummary) -> Panel:
    columns = ("trained to", "trials", "failed", "full trainings", "best score")
    rows = [
        (
            _format_level(rung.level),
            f"{rung.trials:,}",
            f"{rung.failed:,}",
            _format_number(float(rung.work)),
            "-" if rung.best is None else format_metric("", rung.best),
        )
        for rung in summary.rungs
    ]
    note = "A trial that goes on pays only for what it trains more. A rung on which a trial failed counts as a whole."
    return panel.table("rung-costs", "Work by rung", columns, rows, section="Costs", order=400, note=note)


def _build_failure_table(summary: SweepSummary) -> list[Panel]:
    if not (reasons := summary.reasons):
        return []
    rows = []
    for reason, count in reasons:
        numbers = [trial.trial for trial in summary.trials if trial.state == "failed" and trial.reason == reason]
        shown = ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
        rows.append((reason, f"{count:,}", shown))
    return [panel.table("failures", "Failures", ("reason", "trials", "numbers"), rows, section="Costs", order=410)]


def _build_trial_table(summary: SweepSummary) -> Panel:
    keys = list(summary.settings.space.parameters)
    has_seconds = any(trial.seconds is not None for trial in summary.trials)
    has_parents = any(trial.parent is not None for trial in summary.trials)
    columns = ["rank", "trial", summary.settings.objective, "trained", "trainings"]
    columns += ["seconds"] * has_seconds + ["fork of"] * has_parents + ["state", *keys]
    rows = []
    for trial in sorted(summary.trials, key=lambda one: (one.rank is None, one.rank, one.trial)):
        score = "-" if trial.score is None else format_metric("", trial.score)
        row = ["-" if trial.rank is None else str(trial.rank), str(trial.trial), score, _format_level(trial.level)]
        row.append(_format_number(float(trial.work)))
        if has_seconds:
            row.append("-" if trial.seconds is None else f"{trial.seconds:.3g}")
        if has_parents:
            row.append("-" if trial.parent is None else str(trial.parent))
        row.append(f"failed: {trial.reason}" if trial.state == "failed" else trial.state)
        rows.append(row + [format_value(trial.values[key]) if key in trial.values else "" for key in keys])
    note = "Trainings: what the trial cost, in full trainings. Seconds: of training, in its own turns."
    return panel.table(
        "trials", "Trials", columns, rows, section="Costs", order=420, width="full", note=note if has_seconds else ""
    )


def _build_parameter_axis(
    summary: SweepSummary, key: str, trials: Sequence[TrialSummary], *, in_lists: bool = False
) -> dict[str, Any]:
    parameter = summary.settings.space.parameters[key]
    raw = [trial.values.get(key, _Missing) for trial in trials]
    numbers: list[Any]
    categories = list[str]()
    if parameter.choice is None:
        numbers = [None if value is _Missing else round_number(value) for value in raw]
    else:
        # A fork may have a value that is not in the list.
        choices = list(parameter.choice)
        choices += [value for value in raw if value is not _Missing and not any(is_same(value, one) for one in choices)]
        categories = [format_value(value) for value in choices]
        numbers = [
            None if value is _Missing else next(at for at, one in enumerate(choices) if is_same(value, one))
            for value in raw
        ]
    return panel.axis(
        key,
        [[number] for number in numbers] if in_lists else numbers,
        scale="category" if categories else "log" if parameter.kind.startswith("log") else "linear",
        categories=categories,
    )


class _Missing:
    """Stands for the value of a parameter that a trial lacks; None is a value."""


def _build_score_axis(summary: SweepSummary, values: Sequence[Any]) -> dict[str, Any]:
    label = summary.settings.objective.replace("_", " ")
    is_high = not summary.settings.higher_is_better
    scale: Scale = "log" if summary.has_log_scores else "linear"
    return panel.axis(label, values, scale=scale, missing="failed", missing_is_high=is_high)


def _list_level_ticks(summary: SweepSummary) -> list[tuple[float, str]]:
    levels = {level for trial in summary.trials for level, _ in trial.points}
    return [(float(level), str(level)) for level in sorted(levels)]


def _name_trials(trials: Sequence[TrialSummary]) -> tuple[list[str], list[int | None]]:
    return [f"trial {trial.trial}" for trial in trials], [trial.rank for trial in trials]


def _sum_seconds(trials: Sequence[TrialSummary]) -> float | None:
    known = [trial.seconds for trial in trials if trial.seconds is not None]
    return sum(known) if known else None


def _format_level(level: Fraction) -> str:
    return "all" if level == 1 else str(level)


def _describe_level(level: Fraction) -> str:
    return "a full training" if level == 1 else f"{level} of a training"


def _format_number(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
