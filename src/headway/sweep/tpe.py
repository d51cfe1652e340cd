"""Suggestions by the tree-structured Parzen estimator of the package optuna (Bergstra et al. 2011).

Only its sampler is used. The study lies in memory, and is made anew for each trial from the results so far: nothing of
it is stored, so that a sweep that goes on after a crash gets the same suggestions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.core.errors import UsageError
from headway.core.random_keys import make_keys
from headway.sweep.parameter import ParameterRecipe, is_same
from headway.sweep.space_recipe import SpaceRecipe

# Importing optuna takes a quarter of a second, and it is an extra.
if TYPE_CHECKING:
    from optuna import Trial
    from optuna.distributions import BaseDistribution


def import_optuna() -> Any:
    """Returns the package optuna. Raises UsageError if it is not installed."""
    try:
        import optuna
    except ImportError as error:
        fix = "Install it: pip install 'headway[optuna]'. Or set method to sobol or random."
        raise UsageError("method: tpe needs the package optuna, which is not installed", fix=fix) from error
    return optuna


def suggest_values(
    recipe: SpaceRecipe,
    seed: int,
    trial: int,
    past: Sequence[tuple[Mapping[str, Any], float | None]],
    higher_is_better: bool,
) -> dict[str, Any]:
    """Returns the values of a trial; see `Space.suggest`."""
    optuna = import_optuna()
    distributions = {key: _build_distribution(parameter) for key, parameter in recipe.parameters.items()}
    # 32 bits, as numpy's generators take. Each trial has a generator of its own, whatever was drawn before.
    sampler_seed = int(make_keys(seed, 0, trial)[0] >> 32)
    # Univariate: each parameter is modelled alone, over the trials that have it. Conditions need nothing more.
    sampler = optuna.samplers.TPESampler(seed=sampler_seed, n_startup_trials=0, multivariate=False)
    with _mute(optuna):
        study = optuna.create_study(sampler=sampler, direction="maximize" if higher_is_better else "minimize")
    for values, score in past:
        known = {key: value for key, value in values.items() if key in distributions}
        frozen = optuna.trial.create_trial(
            params={key: _to_optuna(recipe.parameters[key], value) for key, value in known.items()},
            distributions={key: distributions[key] for key in known},
            value=_replace_failed(score, higher_is_better),
        )
        study.add_trial(frozen)
    asked = study.ask()
    chosen: dict[str, Any] = {}
    for key in recipe.sort_keys():
        if recipe.is_active(key, chosen):
            chosen[key] = _ask(asked, key, recipe.parameters[key])
    return chosen


def _build_distribution(parameter: ParameterRecipe) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    low, high = parameter.bounds
    if parameter.choice is not None:
        # Places in the choice, as optuna takes no lists and mappings.
        return CategoricalDistribution(range(len(parameter.choice)))
    is_log = parameter.kind.startswith("log")
    if parameter.kind.endswith("integer"):
        return IntDistribution(int(low), int(high), log=is_log)
    return FloatDistribution(low, high, log=is_log)


def _to_optuna(parameter: ParameterRecipe, value: Any) -> Any:
    if parameter.choice is None:
        return value
    return next(index for index, one in enumerate(parameter.choice) if is_same(one, value))


def _ask(asked: Trial, key: str, parameter: ParameterRecipe) -> Any:
    low, high = parameter.bounds
    if parameter.choice is not None:
        return parameter.choice[asked.suggest_categorical(key, range(len(parameter.choice)))]
    is_log = parameter.kind.startswith("log")
    if parameter.kind.endswith("integer"):
        return asked.suggest_int(key, int(low), int(high), log=is_log)
    return parameter.round(asked.suggest_float(key, low, high, log=is_log))


def _replace_failed(score: float | None, higher_is_better: bool) -> float:
    # The worst possible score, not optuna's state of failure: a search has to keep away from where trials diverge.
    if score is None or math.isnan(score):
        return -math.inf if higher_is_better else math.inf
    return score


@contextmanager
def _mute(optuna: Any) -> Iterator[None]:
    """Keeps optuna from announcing on standard error each study that is made."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
