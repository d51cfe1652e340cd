from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.sweep.importance import LEAST_SCORES, Importance, measure_importance

SETTINGS = settings(deadline=None, max_examples=5)


def draw(seed: int, trials: int = 60, parameters: int = 3) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    """Returns columns, and scores of which the first one explains nearly all."""
    generator = np.random.default_rng(seed)
    columns = generator.random((trials, parameters))
    return columns, 3 * columns[:, 0] + columns[:, 1] + 0.1 * generator.standard_normal(trials), generator


def measure(columns: np.ndarray, scores: np.ndarray) -> Importance:
    found = measure_importance(columns, scores)
    assert found is not None
    return found


@given(st.integers(0, 1000))
@SETTINGS
def test_only_the_order_of_values_counts_and_no_scale_of_scores(seed: int) -> None:
    columns, scores, _ = draw(seed)
    found = measure(columns, scores)
    assert measure(np.exp(9 * columns), scores) == found
    for times in (1e-150, -5.0, 1e150):
        scaled = measure(columns, times * (scores - 1))
        assert scaled.shares == pytest.approx(found.shares, abs=1e-6)
        assert scaled.r2 == pytest.approx(found.r2, abs=1e-6)


@given(st.integers(0, 1000))
@SETTINGS
def test_shares_follow_the_variance_and_the_places_of_parameters(seed: int) -> None:
    columns, scores, _ = draw(seed, 120)
    first, second, none = measure(columns, scores).shares
    assert first > 0.8 > 0.2 > second > none
    assert first + second + none == pytest.approx(1)


def test_a_forest_predicts_as_well_as_that_of_scikit_learn() -> None:
    from sklearn.ensemble import RandomForestRegressor

    for seed in range(3):
        columns, scores, _ = draw(seed, 150, 4)
        forest = RandomForestRegressor(64, min_samples_leaf=3, oob_score=True, random_state=0).fit(columns, scores)
        assert measure(columns, scores).r2 == pytest.approx(forest.oob_score_, abs=0.05)


def test_noise_is_not_explained() -> None:
    columns, _, generator = draw(0, 100)
    assert all(measure(columns, generator.random(100)).r2 < 0.1 for _ in range(5))


def test_a_parameter_that_trials_lack_explains_by_its_absence() -> None:
    columns, _, generator = draw(0)
    lacks = generator.random(60) < 0.5
    columns[lacks, 1] = np.nan
    found = measure(columns, lacks + 0.01 * generator.random(60))
    assert found.shares[1] > 0.95
    assert found.r2 > 0.9


def test_a_few_scores_or_equal_ones_have_no_importance() -> None:
    columns, scores, _ = draw(0)
    few = LEAST_SCORES - 1
    assert measure_importance(columns[:few], scores[:few]) is None
    assert measure_importance(columns, np.ones(60)) is None
