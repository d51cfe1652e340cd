"""Rungs of successive halving and Hyperband's brackets: how many trials train how far.

Levels are exact fractions of a full training, so that work can be added up and compared without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import final


@final
@dataclass(frozen=True)
class Bracket:
    """Trials that start together and are compared with each other.

    Attributes:
        first_trial: number of its first trial; the others follow.
        levels: the fraction of a full training at which each rung ends; the last one is 1.
        sizes: trials in each rung.
    """

    first_trial: int
    levels: tuple[Fraction, ...]
    sizes: tuple[int, ...]

    @property
    def work(self) -> Fraction:
        """Full trainings in all. A promoted trial resumes, so it pays the difference between two levels."""
        befores = (Fraction(0), *self.levels)
        rungs = zip(self.sizes, self.levels, befores, strict=False)
        return sum((size * (level - before) for size, level, before in rungs), Fraction(0))


def count_divisions(ratio: Fraction | int, eta: int) -> int:
    """Returns floor(log_eta(ratio)) for a ratio of at least 1, by multiplication."""
    # math.log(243, 3) is 4.999999999999999.
    count, power = 0, eta
    while power <= ratio:
        count, power = count + 1, power * eta
    return count


def build_bracket(trials: int, depth: int, eta: int, first_trial: int = 0) -> Bracket:
    """Returns a bracket of successive halving (arXiv 1502.07943): of n trials, floor(n eta^-i) reach rung i.

    Args:
        depth: rungs below the full training; the first rung ends at eta^-depth of it.
    """
    levels = tuple(Fraction(1, eta ** (depth - rung)) for rung in range(depth + 1))
    # Dividing repeatedly and rounding down each time gives the same integers.
    return Bracket(first_trial, levels, tuple(trials // eta**rung for rung in range(depth + 1)))


def build_hyperband(ratio: Fraction | int, eta: int, first_trial: int = 0) -> tuple[Bracket, ...]:
    """Returns the brackets of one round of Hyperband (arXiv 1603.06560), the one with most trials first.

    Args:
        ratio: R/r, a full training over the least training after which trials are compared.
    """
    deepest, brackets = count_divisions(ratio, eta), []
    for depth in range(deepest, -1, -1):
        # ceil((s_max + 1) eta^s / (s + 1))
        trials = -(-(deepest + 1) * eta**depth // (depth + 1))
        brackets.append(build_bracket(trials, depth, eta, first_trial))
        first_trial += trials
    return tuple(brackets)
