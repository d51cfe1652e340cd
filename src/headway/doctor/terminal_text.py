"""Formats a profile for a terminal: at most 60 lines of 100 columns."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from headway.core.profile import Knob, PipelineSide, Profile, ShortRun
from headway.core.text_format import pluralise

COLUMNS = 100
# Each character is an eighth of a column wider.
BLOCKS = " \u258f\u258e\u258d\u258c\u258b\u258a\u2589\u2588"
# For terminals without block characters.
PLAIN = " #"
# Columns of the longest bar.
BAR = 42
# Columns of the longest name in a table, and of the name of a run.
NAME = 30
SHORT = 12

# Share of the run's time from which stalls are mentioned.
WORTH_SAYING = 0.02

# Lines of each part with its heading. Six empty lines and the last line make 60.
HEAD, RUNS, STAGES, KNOBS, ENVIRONMENT, NOT_MEASURED = 9, 6, 16, 10, 7, 5
# Lines of one sentence on a cost or a fault. Ours are shorter: whole sentences in a shorter list, not halves of all.
SENTENCE = 3

# Sides that work at the same time. The stages of one side share its time: their seconds add up.
SIDES: dict[PipelineSide, str] = {"input": "loader", "loop": "training loop", "stall": "stalls"}


@final
@dataclass(frozen=True)
class StageRate:
    """Rate of a stage, or of a whole side, if a sample took nothing else."""

    name: str
    side: PipelineSide
    # Of all ranks together.
    images_s: float
    # True: it stands for all stages of its side.
    several: bool


def compute_stage_rates(profile: Profile) -> list[StageRate]:
    """Returns the stages that take time, in order; a side with several stages is followed by all of them together."""
    rates = []
    for side, name in SIDES.items():
        stages = [one for one in profile.ceilings if one.side == side and one.seconds > 0]
        rates += [StageRate(one.stage, side, profile.ranks / one.seconds, False) for one in stages]
        if len(stages) > 1:
            seconds = sum(one.seconds for one in stages)
            rates.append(StageRate(f"{name} together", side, profile.ranks / seconds, True))
    return rates


def format_number(value: float) -> str:
    """Formats `3,120`, `12.3` or `0.0451`: at least three digits, and all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{float(f'{value:.3g}'):,.10g}"


def format_signed(share: float) -> str:
    """Formats `+4.7 %`."""
    return f"{100 * share:+.1f} %"


def format_percent(share: float) -> str:
    """Formats `31 %`; below one percent with one digit more."""
    return f"{100 * share:.{0 if share >= 0.01 or share == 0 else 1}f} %"


def describe_prediction(profile: Profile) -> str:
    """Returns `Predicted 3,120 images/s, measured 2,980 (+4.7 %).`

    Short runs contain no evaluations and checkpoints: the time of these was measured separately and is part of both
    numbers.
    """
    prediction = f"Predicted {format_number(profile.predicted)} images/s"
    if profile.measured is None:
        return f"{prediction}; no run was measured to confirm it."
    error = format_signed(profile.predicted / profile.measured - 1)
    doubt = "" if profile.verdict.confirmed else ": not confirmed"
    stalls = sum(one.seconds for one in profile.ceilings if one.side == "stall") * profile.predicted / profile.ranks
    computed = ", both with computed stalls" if stalls > WORTH_SAYING else ""
    return f"{prediction}, measured {format_number(profile.measured)} ({error}){computed}{doubt}."


def describe_limit(profile: Profile) -> str:
    """Returns the limit and the next one, by their names in the table."""
    verdict = profile.verdict
    following = f", then {verdict.next_stage}" if verdict.next_stage not in ("", verdict.stage) else ""
    return f"Limit: {verdict.stage}{following}."


def describe_contention(profile: Profile) -> str:
    """Describes how loader and loop slow each other down; empty: not measured."""
    timing = profile.together
    if timing is None:
        return ""
    loader, loop = timing.input_beside / timing.input_alone, timing.loop_beside / timing.loop_alone
    cores = "one core" if timing.cores == 1 else f"{timing.cores} cores"
    return f"While both run on {cores}, the loader takes {loader:.2f} and the loop {loop:.2f} times as long as alone."


def format_profile(profile: Profile, *, blocks: bool = True) -> str:
    """Formats verdict, short runs, stages, knobs, environment, and what was not measured.

    Args:
        blocks: the terminal can show the characters of `BLOCKS`.
    """
    lines = []
    for part in (
        _format_head(profile),
        _format_runs(profile),
        _format_stages(profile, BLOCKS if blocks else PLAIN),
        _format_knobs(profile),
        _format_environment(profile),
        _format_not_measured(profile),
    ):
        lines += [*part, ""] if part else []
    quick = ", with --quick" if profile.quick else ""
    return "\n".join([*lines, f"The examination took {format_number(profile.seconds)} s{quick}."])


def _format_head(profile: Profile) -> list[str]:
    verdict = profile.verdict
    ranks = f" on each of {profile.ranks} ranks" if profile.ranks > 1 else ""
    about = f"{profile.regime}, batch {profile.batch:,}{ranks}: {verdict.kind}"
    lines = [f"{_clip(profile.name, COLUMNS - len(about) - 2)}, {about}"]
    # Two lines are left to what is not explained.
    lines += _wrap(verdict.sentence, most=HEAD - 5)
    for sentence in (describe_limit(profile), describe_prediction(profile)):
        lines += _wrap(sentence, most=1)
    return lines + _wrap(verdict.unexplained, most=HEAD - len(lines))


def _format_runs(profile: Profile) -> list[str]:
    last = _wrap(describe_contention(profile), most=1)
    if not profile.runs:
        return last
    heading = _format_columns("Short runs", ("predicted", "measured", "error", "waiting"), SHORT)
    rows = [[_format_run(run)] for run in profile.runs]
    return [f"{heading}  in images/s", *_fit_items(rows, RUNS - 1 - len(last)), *last]


def _format_run(run: ShortRun) -> str:
    if run.images_s is None:
        return _clip(f"  {run.name:<{SHORT - 2}} not run: {run.note}", COLUMNS)
    cells = (
        "-" if run.predicted is None else format_number(run.predicted),
        format_number(run.images_s.value),
        "-" if run.error is None else format_signed(run.error),
        "-" if run.wait_share is None else format_percent(run.wait_share),
    )
    return _clip(f"{_format_columns(f'  {run.name}', cells, SHORT)}  {run.note}".rstrip(), COLUMNS)


def _format_stages(profile: Profile, shades: str) -> list[str]:
    """Formats the lowest ceilings as bars on a logarithmic scale, on which a stage that is ten times as fast does not
    shrink the other bars to nothing."""
    stages = compute_stage_rates(profile)
    if not stages:
        return []
    kept = sorted(stages, key=lambda one: one.images_s)[: STAGES - 1]
    rates = [one.images_s for one in kept]
    # The axis begins at a power of ten that leaves the slowest stage a bar of some length.
    low, high = 10 ** math.floor(math.log10(min(rates) / 2)), max(rates)
    marks = {profile.verdict.next_stage: "next", profile.verdict.stage: "the limit"}
    arrow = "\u25c4" if shades == BLOCKS else "<"
    scale = f"logarithmic, from {format_number(low)}"
    slowest = f"; the slowest {len(kept)} of {len(stages)}" if len(kept) < len(stages) else ""
    lines = [f"Each stage alone, in images/s ({scale}{slowest})"]
    for one in stages:
        if one in kept:
            drawn = _format_bar(math.log(one.images_s / low) / math.log(high / low), shades)
            mark = marks.get(one.name, "")
            row = f"  {_clip(one.name, 25):<25} {drawn:<{BAR}} {format_number(one.images_s):>11}"
            lines.append(f"{row} {arrow} {mark}" if mark else row)
    return lines


def _format_bar(share: float, shades: str) -> str:
    levels = len(shades) - 1
    # At least one, so that every stage can be seen.
    eighths = max(1, round(share * BAR * levels))
    full, rest = divmod(eighths, levels)
    return shades[-1] * full + (shades[rest] if rest else "")


def _format_knobs(profile: Profile) -> list[str]:
    if not profile.knobs:
        return ["No other setting of the recipe is known to help."]
    heading = _format_columns("Settings that help", ("images/s", "times", "how sure"))
    doubt = _wrap(describe_disturbance(profile), indent="  ", most=1)
    items = [_format_knob(knob, describe_certainty(knob, profile)) for knob in profile.knobs]
    return [f"{heading}  how", *doubt, *_fit_items(items, KNOBS - 1 - len(doubt))]


def describe_disturbance(profile: Profile) -> str:
    """Says that other programs kept gains from being measured; empty: they did not."""
    if not profile.is_disturbed:
        return ""
    share = format_percent(profile.other_load or 0.0)
    return f"Not measured: other programs took {share} of the processor. Examine again when it is idle."


def describe_certainty(knob: Knob, profile: Profile) -> str:
    """Returns `measured` or `computed`, with a question mark if no run confirmed the prediction.

    If other programs took much of the processor, every gain is an `estimate`.
    """
    if profile.is_disturbed:
        return "estimate"
    doubtful = profile.measured is not None and not profile.verdict.confirmed
    return ("measured" if knob.measured else "computed") + "?" * doubtful


def _format_knob(knob: Knob, sure: str) -> list[str]:
    """Formats a row, the override on its own lines if it does not fit (it must stay copyable), and the cost."""
    row = _format_columns(f"  {knob.name}", (format_number(knob.images_s), f"{knob.gain:.2f}", sure))
    how = describe_change(knob)
    # Never cut or broken inside a word: the user copies the override.
    if len(row) + 2 + len(how) <= COLUMNS:
        lines = [f"{row}  {how}"]
    else:
        lines = [row, *textwrap.wrap(how, COLUMNS - 4, break_long_words=False, break_on_hyphens=False)]
        lines[1:] = [f"    {line}" for line in lines[1:]]
    return lines + _wrap(describe_cost(knob), indent="    ", most=SENTENCE)


def describe_change(knob: Knob) -> str:
    """Returns the exact override or command, or that there is none."""
    return knob.override or "no key of the recipe"


def describe_cost(knob: Knob) -> str:
    """Returns the cost, and whether the recipe's mathematics change; empty: neither."""
    changes = "" if knob.exact else "It changes the recipe's mathematics."
    cost = f"It costs: {knob.cost.removesuffix('.')}." if knob.cost else ""
    return f"{changes} {cost}".strip()


def _format_environment(profile: Profile) -> list[str]:
    if not profile.environment:
        return []
    faults = [finding for finding in profile.environment if finding.cure]
    well = len(profile.environment) - len(faults)
    if not faults:
        return [f"Environment: no faults; the profile lists the {well} facts that were checked."]
    beside = f"; {well} more facts without a fault are in the profile" if well else ""
    items = [_wrap(f"{one.what} {one.cure}", indent="  - ", most=SENTENCE) for one in faults]
    return [
        f"Environment: {pluralise(len(faults), 'fault')} to fix{beside}",
        *_fit_items(items, ENVIRONMENT - 1),
    ]


def _format_not_measured(profile: Profile) -> list[str]:
    if not profile.not_measured:
        return []
    items = [_wrap(what, indent="  - ", most=SENTENCE) for what in profile.not_measured]
    return ["Not measured", *_fit_items(items, NOT_MEASURED - 1)]


def _format_columns(name: str, cells: Iterable[str], width: int = NAME) -> str:
    return " ".join([f"{_clip(name, width):<{width}}", *(f"{cell:>9}" for cell in cells)])


def _fit_items(items: Sequence[list[str]], most: int) -> list[str]:
    """Returns as many items (of some lines each) as fit into `most` lines; the last line counts the rest."""
    lines = [line for item in items for line in item]
    kept = len(items)
    # Whole items only: half a sentence of advice would mislead.
    while len(lines) > most and kept:
        kept -= 1
        rest = f"  ... and {len(items) - kept} more, in the profile."
        lines = [*(line for item in items[:kept] for line in item), rest]
    return lines


def _wrap(sentence: str, *, most: int, indent: str = "") -> list[str]:
    return textwrap.wrap(
        sentence,
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        max_lines=max(1, most),
        placeholder=" ...",
    )


def _clip(name: str, width: int) -> str:
    """Shortens a text to one line of this many columns."""
    line = re.sub(r"[^\S ]+", " ", name)
    return line if len(line) <= width else f"{line[: width - 4].rstrip()} ..."
