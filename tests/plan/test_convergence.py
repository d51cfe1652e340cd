"""Epochs by batch: laws that are known are found again, and official points predict each other."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from bench._plan.times import leave_one_out
from hypothesis import given
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.plan.convergence import (
    ConvergencePoint,
    EpochsLaw,
    derive_epochs_law,
    fit_epochs,
    interpolate_epochs,
    load_official_points,
    suggest_learning_rate,
)


@given(st.floats(1, 200), st.floats(100, 1e6), st.lists(st.floats(16, 1e6), min_size=3, max_size=9, unique=True))
def test_a_law_is_found_again(least: float, critical: float, batches: list[float]) -> None:
    batches = [*batches, critical / 3, critical * 3]
    found = fit_epochs([ConvergencePoint(batch, least * (1 + batch / critical)) for batch in batches])
    for batch in batches:
        assert found.predict_epochs(batch) == pytest.approx(least * (1 + batch / critical), rel=1e-3)
    assert found.error == pytest.approx(0, abs=1e-3)


def test_official_points_predict_each_other() -> None:
    found = fit_epochs(load_official_points())
    assert (found.low, found.high) == (1632, 67840)
    assert found.error is not None
    assert found.error < 0.04
    assert max(abs(off) for _, off in leave_one_out(load_official_points())) <= 0.08
    assert len(leave_one_out(load_official_points())) == len(load_official_points()) - 2


def test_steps_and_epochs_trade_off() -> None:
    law = EpochsLaw(10.0, 1000.0, 100, 10_000, 0.0)
    assert law.predict_epochs(1000) == 20
    assert law.predict_steps(1000, 50_000) == 1000
    assert [law.classify_batch(batch) for batch in (50, 1000, 20_000)] == [
        "perfect scaling", "diminishing returns", "no gain",
    ]  # fmt: skip


def test_outside_of_what_was_measured_it_is_said() -> None:
    law = EpochsLaw(10.0, 1000.0, 100, 10_000, 0.0)
    assert law.describe_extrapolation(100) == law.describe_extrapolation(10_000) == ""
    assert "below the measured 100" in law.describe_extrapolation(99)
    assert "above the measured 10,000" in law.describe_extrapolation(10_001)
    assert "guessed" in derive_epochs_law(1000, 64, 10).describe_extrapolation(65)


def test_how_far_two_batches_are_off_is_not_known() -> None:
    """They are met exactly, whatever the truth; unless a larger batch takes fewer epochs, which no hyperbola does."""
    assert fit_epochs([ConvergencePoint(32, 10), ConvergencePoint(320, 20)]).error is None
    assert fit_epochs([ConvergencePoint(10, 5), ConvergencePoint(20, 4)]).error == pytest.approx(
        math.log(5 / 4) / 2, rel=1e-2
    )
    assert (
        fit_epochs([ConvergencePoint(32, 10), ConvergencePoint(320, 20), ConvergencePoint(640, 40)]).error is not None
    )


def test_the_noise_scale_is_the_critical_batch() -> None:
    law = derive_epochs_law(1000, 1000, 20)
    assert (law.least, law.critical) == (10, 1000)


def test_learning_rates_lie_between_those_of_official_runs() -> None:
    points = load_official_points()
    for point in points:
        found = suggest_learning_rate(point.batch, points)
        assert found is not None
        assert found.inside
        assert (found.lr, found.warmup) == (pytest.approx(point.lr), pytest.approx(point.warmup))
    between = suggest_learning_rate(20_000, points)
    assert between is not None
    assert 12.8 < between.lr < 21.2
    assert 9 < between.warmup < 16
    assert between.between == (13056, 32768)
    far = suggest_learning_rate(10**6, points)
    assert far is not None
    assert not far.inside
    assert suggest_learning_rate(64, [ConvergencePoint(64, 10)]) is None


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([], "2 batches or more, not 0"),
        ([ConvergencePoint(64, 1), ConvergencePoint(64, 2)], "2 batches or more, not 1"),
        ([ConvergencePoint(64, 1), ConvergencePoint(0, 2)], "above 0"),
        ([ConvergencePoint(64, -1), ConvergencePoint(1, 2)], "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_said(points: list[ConvergencePoint], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fit_epochs(points)
    with pytest.raises(UsageError, match="above 0"):
        derive_epochs_law(0, 64, 10)


def test_points_of_one_kind_are_followed_and_the_law_goes_on_beyond_them() -> None:
    points = load_official_points()
    law, followed = fit_epochs(points), interpolate_epochs(points)
    for one in points:
        assert followed.predict_epochs(one.batch) == pytest.approx(one.epochs)
    for low, high in pairwise(sorted({one.batch for one in points})):
        ratios = [followed.predict_epochs(batch) / law.predict_epochs(batch) for batch in (low, (low + high) / 2, high)]
        assert min(ratios[0], ratios[2]) <= ratios[1] <= max(ratios[0], ratios[2])
    # Beyond the points, a larger batch still takes more epochs.
    assert followed.predict_epochs(2e5) > followed.predict_epochs(1e5) > followed.predict_epochs(points[-1].batch)
    assert followed.error is not None
    assert 0 < followed.error < 0.08
    # Two points at one batch count as their mean.
    twice = interpolate_epochs([ConvergencePoint(10, 4), ConvergencePoint(10, 6), ConvergencePoint(40, 8)])
    assert twice.predict_epochs(10) == pytest.approx(5)
