"""Methods on made-up learning curves. They say nothing of real networks, but a method that loses here is broken."""

from __future__ import annotations

import numpy as np
import pytest

from headway.sweep.budget import Method
from headway.sweep.state import State, Task, fold, rank_trials

from ._sweeps import go_on, make_plan

SEEDS, FULL = 30, 27


class Curves:
    """Power laws that cross: error = floor + height * epochs^-rate, observed with noise."""

    def __init__(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        # Good floors are rare, and independent of how fast a curve falls.
        self.floor = 0.05 + 0.5 * random.beta(1.2, 2.5, 500)
        self.height, self.rate = random.uniform(0.3, 0.6, 500), random.uniform(0.3, 1.5, 500)
        self.noise = random.normal(0, 0.01, (500, FULL + 1))

    def get_error(self, trial: int, epochs: int) -> float:
        return float(self.floor[trial] + self.height[trial] * epochs ** -self.rate[trial])

    def __call__(self, task: Task) -> float:
        epochs = int(task.to * FULL)
        return self.get_error(task.trial.number, epochs) + float(self.noise[task.trial.number, epochs])


def measure_error(method: Method, seed: int) -> float:
    """Returns the error, without noise, of the trial that a sweep names the best."""
    plan, curves = make_plan(method, 4, 3, FULL, higher_is_better=False), Curves(seed)
    state = fold(State(plan), go_on(plan, curves, seed=seed))
    best = state.trials[rank_trials(state)[0]]
    return curves.get_error(best.number, int(plan.find_bracket(best.number).levels[best.rung] * FULL))


@pytest.mark.parametrize("method", ["halving", "asha"])
def test_halving_finds_better_trials_than_random_search_with_the_same_work(method: Method) -> None:
    gains = np.array([measure_error("random", seed) - measure_error(method, seed) for seed in range(SEEDS)])
    # Two standard errors of the mean.
    assert gains.mean() > 2 * gains.std(ddof=1) / SEEDS**0.5
