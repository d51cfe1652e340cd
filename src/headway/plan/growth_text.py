"""Text of the gain of more training data, for the terminal."""

from __future__ import annotations

import math

from headway.core.text_format import align_table
from headway.plan.error_curve import ErrorCurve
from headway.plan.growth import DataGrowth, DataNeed

HEADING = ("samples", "error", "95 %", "parameters", "PF/s-days", "years of a server without a GPU", "measured up to")


def format_growth(growth: DataGrowth) -> list[str]:
    """Formats the law and the table of larger training sets, one line each."""
    return [describe_law(growth.error), *align_table(tabulate_growth(growth), left=-1)]


def describe_law(curve: ErrorCurve) -> str:
    """Describes the law of the error in a sentence."""
    text = f"The error falls as samples to the power of {curve.exponent:.3f}"
    if not curve.floor:
        return f"{text}; these pairs show no floor."
    return f"{text}, to a floor of {curve.floor:.3g} (95 %: {curve.floor_low:.3g} to {curve.floor_high:.3g})."


def tabulate_growth(growth: DataGrowth) -> list[tuple[str, ...]]:
    """Tabulates the predictions for larger training sets: a heading, then a row per set."""
    table: list[tuple[str, ...]] = [HEADING]
    for one in growth.sizes:
        band = f"{one.low:.3g} to {one.high:.3g}" if one.high < math.inf else "unknown from so few points"
        needs = ("-" if need is None else f"{need:,.3g}" for need in (one.parameters, one.pf_s_days, one.cpu_years))
        measured = f"1/{one.extrapolated:.3g} of it" if one.extrapolated > 1 else "more"
        table.append((f"{one.samples:,.3g}", f"{one.error:.3g}", band, *needs, measured))
    # Without a workload or network sizes, some columns hold nothing.
    columns = [column for column in zip(*table, strict=True) if set(column[1:]) != {"-"}]
    return [tuple(row) for row in zip(*columns, strict=True)]


def format_need(need: DataNeed) -> list[str]:
    """Formats the samples that an error needs, with their interval and what the user's own sets say about it."""
    what = f"An error of {need.error:g} needs about {_format_samples(need.samples)} samples"
    lines = [f"{what}, {need.extrapolated:.3g} times the largest measured set. {_describe_interval(need)}"]
    if (held := need.held_out) is not None:
        lines.append(
            f"Check: the smaller sets alone would have asked for {_format_samples(held.samples)} samples to reach the"
            f" error of the largest, which has {_format_samples(held.measured)}."
        )
    return lines


def _describe_interval(need: DataNeed) -> str:
    if need.low == 0:
        return "A law fits so few pairs whatever they are: one more gives an interval."
    if need.high == math.inf:
        return f"95 %: at least {_format_samples(need.low)}, without an upper bound: these pairs scatter too much."
    return f"95 %: {_format_samples(need.low)} to {_format_samples(need.high)}, if the law goes on."


def _format_samples(number: float) -> str:
    return f"{float(f'{number:.3g}'):,.0f}" if number < 1e12 else f"{number:.3g}"
