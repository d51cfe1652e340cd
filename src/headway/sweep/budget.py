"""The plan of a sweep: how many trials start, and at which fractions of a training they are compared, for a budget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, final, get_args

from headway.core.errors import UsageError, suggest_nearest
from headway.sweep.rungs import Bracket, build_bracket, build_hyperband, count_divisions

Method = Literal["random", "halving", "hyperband", "asha", "pbt"]
METHODS: tuple[Method, ...] = get_args(Method)


def parse_method(name: str) -> Method:
    """Returns a method by its name. Raises UsageError if there is none."""
    for method in METHODS:
        if method == name:
            return method
    raise UsageError(f"there is no method {name!r}", fix=suggest_nearest(name, METHODS))


@final
@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decisions depend on besides results.

    Attributes:
        budget: most work, in full trainings.
        eta: one trial of eta goes on from a rung.
        brackets: `hyperband` has several. Sizes of `asha` are the most that the budget allows in each rung.
        higher_is_better: direction of the scores.
        seed: for the random choices of `pbt`.
    """

    method: Method
    budget: Fraction
    eta: int
    brackets: tuple[Bracket, ...]
    higher_is_better: bool
    seed: int

    @property
    def trials(self) -> int:
        """Trials that start; for `asha`, the most that may. Forks of `pbt` are not counted."""
        return _count_trials(self.brackets)

    @property
    def work(self) -> Fraction:
        """Full trainings if no trial fails; for `asha`, which depends on the results, the most."""
        work = _add_work(self.brackets)
        return min(self.budget, work) if self.method == "asha" else work

    def find_bracket(self, trial: int) -> Bracket:
        """Returns the bracket of a trial."""
        place = bisect_right(self.brackets, trial, key=lambda bracket: bracket.first_trial)
        return self.brackets[place - 1]


def plan_brackets(
    budget: Fraction | int,
    eta: int,
    smallest: Fraction,
    method: Method,
    *,
    max_trials: int | None = None,
    higher_is_better: bool = True,
    seed: int = 0,
) -> Plan:
    """Returns the plan whose work comes as close to a budget as it can without exceeding it.

    Fewer rungs than `smallest` allows are planned if the budget does not reach for one full training at the end.

    Args:
        budget: in full trainings, at least 1.
        eta: at least 2; one trial of eta goes on from a rung.
        smallest: least fraction of a training after which trials may be compared; the interval of `pbt`.
        max_trials: most trials that may start, for example the size of a grid.

    Raises:
        UsageError: one of these is out of range.
    """
    _expect_usable(budget, eta, smallest, max_trials)
    budget = Fraction(budget)
    # Every trial costs something, so the budget itself bounds their number.
    most = int(budget / smallest) if max_trials is None else max_trials
    builders: dict[Method, Callable[[], tuple[Bracket, ...]]] = {
        "random": lambda: (build_bracket(min(int(budget), most), 0, eta),),
        "halving": lambda: (_build_halving(budget, eta, smallest, most),),
        "hyperband": lambda: tuple(_build_rounds(budget, eta, smallest, most)),
        "asha": lambda: (_build_promotion(budget, eta, smallest, most),),
        "pbt": lambda: (_build_population(budget, smallest, most),),
    }
    return Plan(
        method=method,
        budget=budget,
        eta=eta,
        brackets=builders[method](),
        higher_is_better=higher_is_better,
        seed=seed,
    )


def _expect_usable(budget: Fraction | int, eta: int, smallest: Fraction, max_trials: int | None) -> None:
    if budget < 1:
        what = f"a budget of {float(budget):g} full trainings trains no trial to its end"
        raise UsageError(what, fix="Set the budget to at least 1")
    if eta < 2:
        raise UsageError(f"eta is {eta}, so every trial would go on", fix="Set eta to 2 or more; 3 and 4 are usual")
    if not 0 < smallest <= 1:
        what = f"trials would be compared first after {float(smallest):g} of a full training"
        raise UsageError(what, fix="Set a fraction above 0 and at most 1")
    if max_trials is not None and max_trials < 1:
        raise UsageError(f"at most {max_trials} trials may start", fix="Allow at least 1")


def _add_work(brackets: Iterable[Bracket]) -> Fraction:
    return sum((bracket.work for bracket in brackets), Fraction(0))


def _count_trials(brackets: Iterable[Bracket]) -> int:
    return sum(bracket.sizes[0] for bracket in brackets)


def _find_depth(budget: Fraction, eta: int, smallest: Fraction, most: int) -> int:
    """Returns the most rungs below a full training for which a bracket with one trial at the top can be paid."""
    depth = count_divisions(1 / smallest, eta)
    while depth and (eta**depth > most or build_bracket(eta**depth, depth, eta).work > budget):
        depth -= 1
    return depth


def _grow(bracket: Bracket, eta: int, budget: Fraction, most: int) -> Bracket:
    """Returns the largest bracket with the same levels whose work is within a budget."""
    depth, first = len(bracket.levels) - 1, bracket.first_trial
    # The work rises with the number of trials, so that number is found by bisection.
    sizes = range(bracket.sizes[0], most + 1)
    fitting = bisect_right(sizes, budget, key=lambda size: build_bracket(size, depth, eta).work)
    return build_bracket(sizes[fitting - 1], depth, eta, first)


def _build_halving(budget: Fraction, eta: int, smallest: Fraction, most: int) -> Bracket:
    depth = _find_depth(budget, eta, smallest, most)
    return _grow(build_bracket(eta**depth, depth, eta), eta, budget, most)


def _build_rounds(budget: Fraction, eta: int, smallest: Fraction, most: int) -> Iterator[Bracket]:
    """Yields whole rounds of Hyperband, brackets of one more round, and enlarges them to fill the budget."""
    depth = count_divisions(1 / smallest, eta)
    table = build_hyperband(eta**depth, eta)
    while depth and (_add_work(table) > budget or _count_trials(table) > most):
        depth -= 1
        table = build_hyperband(eta**depth, eta)
    trials = _count_trials(table)
    rounds = int(min(budget / _add_work(table), Fraction(most, trials)))
    budget_left, most_left = budget - rounds * _add_work(table), most - rounds * trials
    chosen = list(table * rounds)
    for bracket in table:
        if bracket.work <= budget_left and bracket.sizes[0] <= most_left:
            chosen.append(bracket)
            budget_left, most_left = budget_left - bracket.work, most_left - bracket.sizes[0]
    # The rest is less than one more bracket: the deepest ones, whose trials are cheapest, get more trials.
    first_trial = 0
    for bracket in chosen:
        grown = _grow(bracket, eta, budget_left + bracket.work, most_left + bracket.sizes[0])
        budget_left += bracket.work - grown.work
        most_left += bracket.sizes[0] - grown.sizes[0]
        yield replace(grown, first_trial=first_trial)
        first_trial += grown.sizes[0]


def _build_promotion(budget: Fraction, eta: int, smallest: Fraction, most: int) -> Bracket:
    levels = build_bracket(1, _find_depth(budget, eta, smallest, most), eta).levels
    return Bracket(0, levels, tuple(min(most, int(budget / level)) for level in levels))


def _build_population(budget: Fraction, smallest: Fraction, most: int) -> Bracket:
    # A fork continues from its parent's checkpoint, so a population costs what its members alone would cost.
    population, intervals = min(int(budget), most), int(1 / smallest)
    levels = tuple(Fraction(interval, intervals) for interval in range(1, intervals + 1))
    return Bracket(0, levels, (population,) * intervals)
