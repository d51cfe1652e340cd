"""A plan of a sweep in words."""

from __future__ import annotations

import math
from fractions import Fraction

from headway.core.text_format import pluralise
from headway.sweep.budget import Plan
from headway.sweep.rungs import Bracket, build_bracket, build_hyperband, count_divisions


def describe_plan(plan: Plan) -> str:
    """Describes how many trials train how far, and what that costs."""
    rungs = "; ".join(map(_describe_bracket, plan.brackets))
    trials = pluralise(plan.trials, "trial")
    if plan.method == "asha":
        # How many go on depends on the results.
        budget = f"the budget of {_count(plan.budget, 'full training')} is spent"
        return f"asha: at most {trials} (at most {rungs}), until {budget}."
    return f"{plan.method}: {trials} ({rungs}), {_count(plan.work, 'full training')}."


def name_level(level: Fraction, trials: int) -> str:
    """Returns `1/9 of a training`, and of a whole one `its end` or `their end`."""
    if level == 1:
        return "its end" if trials == 1 else "their end"
    return f"{level} of a training"


def describe_raised_smallest(plan: Plan, smallest: Fraction, max_trials: int | None) -> str | None:
    """Says that trials are compared later than `smallest` allows, and what would change it; None: they are not.

    Args:
        smallest, max_trials: those of `plan_brackets`, which has made the plan.
    """
    wanted, eta = count_divisions(1 / smallest, plan.eta), plan.eta
    if plan.method in ("random", "pbt") or max(len(bracket.levels) for bracket in plan.brackets) > wanted:
        return None
    first = min(bracket.levels[0] for bracket in plan.brackets)
    is_round = plan.method == "hyperband"
    brackets = build_hyperband(eta**wanted, eta) if is_round else (build_bracket(eta**wanted, wanted, eta),)
    what = f"Trials are compared first after {'a whole training' if first == 1 else f'{first} of a training'}"
    trials, work = sum(bracket.sizes[0] for bracket in brackets), sum(bracket.work for bracket in brackets)
    needs = []
    if work > plan.budget:
        # Rounded up, so that it holds from there on.
        needs.append(f"--budget {math.ceil(10 * work) / 10:g}")
    if max_trials is not None and trials > max_trials:
        needs.append(f"{trials} trials")
    return f"{what}: --smallest {smallest} needs {' and '.join(needs)} or more."


def _count(number: Fraction, name: str) -> str:
    """Returns a fraction as a decimal number with its noun."""
    return f"{float(number):.4g} {name}{'' if number == 1 else 's'}"


def _describe_bracket(bracket: Bracket) -> str:
    """Describes the rungs of a bracket: `9 to 1/9, 3 to 1/3 of a training, 1 to its end`."""
    *before, last = bracket.sizes
    rungs = ", ".join(f"{size} to {level}" for size, level in zip(before, bracket.levels, strict=False))
    end = f"{last} to {name_level(Fraction(1), last)}"
    return f"{rungs} of a training, {end}" if rungs else end
