"""The values of new trials and of forks: the space, in the light of what the sweep has found so far."""

from __future__ import annotations

from typing import final

from headway.sweep.population import perturb_values
from headway.sweep.records import Values
from headway.sweep.space import RANDOM_TRIALS, Space
from headway.sweep.state import State


@final
class TrialValues:
    """The values of trials, as `decide` asks for them.

    Attributes:
        state: the state in whose light a trial is drawn; only `tpe` looks at it.
    """

    def __init__(self, space: Space, seed: int, state: State) -> None:
        self._space, self._seed, self.state = space, seed, state

    def draw(self, trial: int) -> Values:
        """Returns the values of a new trial."""
        plan, trials = self.state.plan, self.state.trials
        # The highest rung with enough results to learn from (BOHB, Falkner et al. 2018).
        rung = max(len(bracket.levels) for bracket in plan.brackets) - 1
        while rung and sum(one.has_result(rung) for one in trials) < RANDOM_TRIALS:
            rung -= 1
        past = [(one.values, one.get_score(rung)) for one in trials if one.has_result(rung)]
        return self._space.suggest(self._seed, trial, past, higher_is_better=plan.higher_is_better)

    def perturb(self, values: Values, trial: int, rung: int) -> Values:
        """Returns the values of a fork: those of its parent, times 0.8 or 1.2."""
        parameters = self._space.recipe.parameters
        ranges = {key: parameters[key].bounds for key in values if parameters[key].choice is None}
        perturbed = perturb_values(values, ranges, self._seed, trial, rung)
        return {
            key: parameters[key].round(value) if key in ranges and isinstance(value, float) else value
            for key, value in perturbed.items()
        }
