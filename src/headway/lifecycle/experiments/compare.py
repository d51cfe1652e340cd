"""Page that compares up to a thousand runs: parallel coordinates, curves and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from headway.core.errors import UsageError
from headway.core.files import write_atomically
from headway.core.text_format import format_duration, pluralise
from headway.lifecycle.experiments.listing import (
    find_folder,
    format_started,
    format_value_of,
    name_runs,
    shorten_key,
    show_path,
)
from headway.lifecycle.experiments.query import (
    FIELDS,
    KeyUse,
    ListedRun,
    Value,
    has_key,
    list_keys,
    read_column,
    read_series,
)
from headway.lifecycle.experiments.run_index import RunIndex, UpdateResult
from headway.page import panel, renderer
from headway.page.panel import Panel, Scale
from headway.page.values import PARALLEL_HELP, is_steep, round_number

SECTIONS = ("Result", "Runs", "Curves", "Table")
MOST_RUNS = 1000
# Axes of a drawing that still fits a screen.
MOST_AXES = 12
# Different texts of an axis; one with more, such as a name, is left out.
MOST_CATEGORIES = 40
# Points of one picture of curves, over all runs: a page of 1,000 runs stays below 3 MB.
MOST_POINTS = 60_000
# Points of one curve: more than a screen can tell apart.
MOST_POINTS_OF_RUN = 240
# What runs are ranked by unless the user says: the first of these that they have, and if higher is better.
SCORES = (("summary.accuracy", True), ("summary.top1", True), ("summary.loss", False))


@final
@dataclass(frozen=True, kw_only=True)
class Score:
    """The key that the page ranks runs by."""

    key: str
    higher_is_better: bool


def choose_score(index: RunIndex, sort: str, *, descending: bool) -> Score | None:
    """Returns what to rank by: the key of `--sort`, else a usual metric; None if no run has one."""
    if sort and sort not in FIELDS:
        return Score(key=sort, higher_is_better=descending)
    return next((Score(key=key, higher_is_better=higher) for key, higher in SCORES if has_key(index, key)), None)


def write_page(
    index: RunIndex,
    runs: Sequence[ListedRun],
    result: UpdateResult,
    path: Path,
    *,
    score: Score | None,
    columns: Sequence[str] = (),
    curves: Sequence[str] = (),
) -> Path:
    """Writes the page as one self-contained file and returns its path.

    Args:
        runs: at most MOST_RUNS, from `select_runs`.
        columns: keys of the axes; default: what differs between the runs.
        curves: metrics to draw; default: two usual ones.

    Raises:
        UsageError: there are too few or too many runs, or no run has a key.
    """
    if not 0 < len(runs) <= MOST_RUNS:
        if not runs:
            fix = "Change the conditions, or name a folder that has runs."
            raise UsageError("there is no run to compare on a page", fix=fix)
        what = f"a page compares at most {MOST_RUNS:,} runs, and these are {len(runs):,}"
        raise UsageError(what, fix="Choose by --where, or take the first by --limit.")
    panels = build_panels(index, runs, result, score=score, columns=columns, curves=curves)
    html = renderer.render(
        panels,
        title=f"{pluralise(len(runs), 'run')} compared",
        subtitle=f"Headway runs below {show_path(find_folder(runs))}",
        sections=SECTIONS,
    )
    write_atomically(path, html)
    return path


def build_panels(
    index: RunIndex,
    runs: Sequence[ListedRun],
    result: UpdateResult,
    *,
    score: Score | None,
    columns: Sequence[str] = (),
    curves: Sequence[str] = (),
) -> list[Panel]:
    """Builds the panels of the page; see `write_page`."""
    scores = {} if score is None else read_column(index, score.key)
    ranked = _rank_runs(runs, scores, higher_is_better=score is not None and score.higher_is_better)
    names = name_runs(runs)
    keys = list(columns) or [use.key for use in _list_differing(index, runs)]
    values = {key: read_column(index, key) for key in keys}
    shown = {key: own for key, own in values.items() if columns or _count_categories(runs, own) <= MOST_CATEGORIES}
    axes = dict(list(shown.items())[:MOST_AXES])
    return [
        _build_cards(index, runs, result, ranked, score, scores),
        _build_parallel(runs, names, ranked, axes, score, scores, left_out=len(keys) - len(axes)),
        *_build_curves(index, runs, names, ranked, curves or _choose_curves(index, score)),
        _build_table(runs, names, ranked, axes, score, scores),
        *_build_damaged(result),
    ]


def _rank_runs(runs: Sequence[ListedRun], scores: dict[int, Value], *, higher_is_better: bool) -> dict[int, int]:
    """Returns the rank of each run that has a score as a number, by the run's number."""
    known = [(scores[run.number].number, run.number) for run in runs if run.number in scores]
    numbers = [(number, run) for number, run in known if number is not None]
    ordered = sorted(numbers, key=lambda one: -one[0] if higher_is_better else one[0])
    return {run: rank for rank, (_, run) in enumerate(ordered, 1)}


def _list_differing(index: RunIndex, runs: Sequence[ListedRun]) -> list[KeyUse]:
    """Lists the keys of recipes whose values differ between these runs, by name."""
    here, found = {run.number for run in runs}, []
    for use in list_keys(index):
        # Those that are the same in all runs of the folder need no look; a filter may leave runs that are alike.
        if use.source != "recipe" or use.name == "name" or (use.different == 1 and use.runs >= len(here)):
            continue
        texts = [value.text for run, value in read_column(index, use.key).items() if run in here]
        if len(set(texts)) > 1 or 0 < len(texts) < len(here):
            found.append(use)
    return found


def _count_categories(runs: Sequence[ListedRun], values: dict[int, Value]) -> int:
    """Counts the different texts of a key; 0 if all of its values are numbers."""
    known = [values[run.number] for run in runs if run.number in values]
    return 0 if all(value.number is not None for value in known) else len({value.text for value in known})


def _build_cards(
    index: RunIndex,
    runs: Sequence[ListedRun],
    result: UpdateResult,
    ranked: dict[int, int],
    score: Score | None,
    scores: dict[int, Value],
) -> Panel:
    states = Counter(run.state for run in runs)
    note = ", ".join(f"{count:,} {state}" for state, count in states.most_common())
    cards = [("runs", f"{len(runs):,}", note)]
    if score is not None and ranked:
        best = next(run for run in runs if ranked.get(run.number) == 1)
        better = "highest" if score.higher_is_better else "lowest"
        # The best of many noisy scores looks better than it is.
        note = f"{better} of {pluralise(len(ranked), 'score')}, so biased: {best.name}"
        cards.append((shorten_key(score.key), format_value_of(score.key, scores[best.number]), note))
    if has_key(index, "summary.seconds"):
        own = read_column(index, "summary.seconds")
        seconds = [number for run in runs if run.number in own and (number := own[run.number].number) is not None]
        cards.append(("training time", format_duration(sum(seconds)), f"of {pluralise(len(seconds), 'run')}"))
    if result.damaged:
        cards.append(("left out", f"{len(result.damaged):,}", "damaged, listed below"))
    return panel.cards("result", "Result", cards, section="Result", order=100)


def _build_parallel(
    runs: Sequence[ListedRun],
    names: Sequence[str],
    ranked: dict[int, int],
    values: dict[str, dict[int, Value]],
    score: Score | None,
    scores: dict[int, Value],
    *,
    left_out: int,
) -> Panel:
    axes = [_build_axis(shorten_key(key), [own.get(run.number) for run in runs]) for key, own in values.items()]
    if score is not None and score.key not in values:
        own = [scores.get(run.number) for run in runs]
        axes.append(_build_axis(shorten_key(score.key), own, missing_is_high=not score.higher_is_better))
    note = f"A line for each run; axes are the recipe keys whose values differ. {PARALLEL_HELP}"
    if left_out:
        note += f" {pluralise(left_out, 'more key')} {'differs' if left_out == 1 else 'differ'}: --columns chooses."
    ranks = [ranked.get(run.number) for run in runs]
    title = "Runs: what differs, and the score"
    return panel.parallel("parallel", title, names, ranks, axes, section="Runs", order=200, note=note)


def _build_axis(label: str, values: Sequence[Value | None], *, missing_is_high: bool = False) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    numbers = [value.number for value in known if value.number is not None]
    if len(numbers) == len(known):
        scale: Scale = "log" if is_steep(numbers) else "linear"
        shown = [None if value is None else round_number(value.number) for value in values]
        return panel.axis(label, shown, scale=scale, missing_is_high=missing_is_high)
    # If a score is sometimes not finite, its numbers are what counts.
    if len({value.text for value in known}) > MOST_CATEGORIES or (numbers and len(numbers) >= 0.5 * len(known)):
        shown = [None if value is None else round_number(value.number) for value in values]
        scale = "log" if is_steep(numbers) else "linear"
        return panel.axis(label, shown, scale=scale, missing="no number", missing_is_high=missing_is_high)
    texts = sorted({value.text for value in known})
    places = [None if value is None else texts.index(value.text) for value in values]
    return panel.axis(label, places, scale="category", categories=texts)


def _choose_curves(index: RunIndex, score: Score | None) -> list[str]:
    """Returns the metric of the score, as it was evaluated, and the training loss; else the two commonest metrics."""
    wanted = ["metric.train/loss"]
    if score is not None:
        wanted.insert(0, f"metric.evaluate/{shorten_key(score.key)}")
    found = [key for key in wanted if has_key(index, key)]
    if not found:
        uses = [use for use in list_keys(index) if use.source == "metric"]
        found = [use.key for use in sorted(uses, key=lambda use: -use.runs)[:2]]
    return found


def _build_curves(
    index: RunIndex, runs: Sequence[ListedRun], names: Sequence[str], ranked: dict[int, int], curves: Sequence[str]
) -> list[Panel]:
    out = []
    for place, metric in enumerate(curves):
        series = read_series(index, [run.number for run in runs], metric)
        if not series:
            continue
        most = max(2, min(MOST_POINTS_OF_RUN, MOST_POINTS // len(series)))
        here = [(name, run.number) for name, run in zip(names, runs, strict=True) if run.number in series]
        thinned = {run: _thin(points, most) for run, points in series.items()}
        steps = [[step for step, _ in thinned[run]] for _, run in here]
        heights = [[round_number(value) for _, value in thinned[run]] for _, run in here]
        numbers = [value for row in heights for value in row if value is not None]
        label = shorten_key(metric)
        scale: Scale = "log" if is_steep(numbers) else "linear"
        note = f"A line for each of {pluralise(len(here), 'run')} that has it, in the colour of its rank."
        if most < max(map(len, series.values())):
            note += f" Of long curves, {most} points are drawn."
        out.append(
            panel.paths(
                f"curve-{place}",
                label,
                [name for name, _ in here],
                [ranked.get(run) for _, run in here],
                [panel.axis("step", steps)],
                panel.axis(label, heights, scale=scale, missing="not finite", missing_is_high="loss" in label),
                section="Curves",
                order=300 + place,
                note=note,
            )
        )
    return out


def _thin(points: Sequence[tuple[int, float | None]], most: int) -> list[tuple[int, float | None]]:
    """Returns at most `most` points, equally far apart, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(place * (len(points) - 1) / (most - 1))] for place in range(most)]


def _build_table(
    runs: Sequence[ListedRun],
    names: Sequence[str],
    ranked: dict[int, int],
    values: dict[str, dict[int, Value]],
    score: Score | None,
    scores: dict[int, Value],
) -> Panel:
    keys = [key for key in values if score is None or key != score.key]
    columns = ["rank", "run", "state", "started"]
    columns += [shorten_key(score.key)] if score is not None else []
    rows = []
    order = sorted(zip(runs, names, strict=True), key=lambda one: (ranked.get(one[0].number, len(runs) + 1), one[1]))
    for run, name in order:
        row = [str(ranked.get(run.number, "-")), name, run.state, format_started(run.started)]
        if score is not None:
            row.append(format_value_of(score.key, scores.get(run.number)))
        rows.append(row + [format_value_of(key, values[key].get(run.number)) for key in keys])
    columns += [shorten_key(key) for key in keys]
    return panel.table("runs", "Runs", columns, rows, section="Table", order=400, width="full")


def _build_damaged(result: UpdateResult) -> list[Panel]:
    if not result.damaged:
        return []
    rows = [(show_path(one.path), one.reason) for one in result.damaged]
    title = "Left out: runs that cannot be read"
    return [panel.table("damaged", title, ("run", "reason"), rows, section="Table", order=410, width="full")]
