"""Statements about large batches, measured on gradients of real images (handwritten digits) in our Order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from bench._decks.statements import (
    NOISE_DRAWS,
    NOISE_SHARE,
    RATES,
    SIZES,
    average_batches,
    compare_covariance,
    compare_steps,
    compute_gradients,
    correct_share,
    draw_noisy,
    find_axes,
    fit_slope,
    measure_spread,
    normalise,
)
from torch import nn

from headway.model.batch_norm import GhostBatchNorm


@pytest.mark.check
def test_the_variance_of_a_gradient_falls_as_one_over_the_batch() -> None:
    """Var(g) = Var(g_1) / m: the slope is -1 within its 95 % interval, which is narrow; and the level is that of single
    gradients."""
    found, error = fit_slope(SIZES, correct=True)
    assert error < 0.02
    assert abs(found + 1) < 2.4 * error  # eight points leave six degrees of freedom: Student's t
    single = float(compute_gradients().var(0, ddof=1).sum())
    for size in SIZES:
        value, error = measure_spread(size)
        assert abs(value - single * correct_share(size) / size) < 4 * error + 1e-12, size


def test_without_the_correction_the_slope_is_another() -> None:
    """The batches are large parts of the data: a test that left that out would find a law that is not there."""
    found, error = fit_slope(SIZES[-4:], correct=False)
    assert found < -1 - 4 * error


@pytest.mark.parametrize("k", [2, 4, 8])
def test_k_small_steps_are_one_large_step_to_first_order(k: int) -> None:
    """Goyal et al. 2017 (arXiv 1706.02677), section 2.1: with eta' = k eta they differ by what gradients change on the
    way, so by eta^2: half the rate, a quarter of the difference."""
    away, moved = compare_steps(k)
    orders = np.diff(np.log(away)) / np.diff(np.log(RATES))
    assert orders[-1] == pytest.approx(2, abs=0.03)
    assert (abs(orders - 2) < 0.3).all()
    assert away[-1] < 0.02 * moved[-1]


@pytest.mark.parametrize("group", [6, 24])
def test_batch_norm_is_its_equation(group: int) -> None:
    """x' = (x - mu) / sqrt(sigma^2 + eps), y = gamma x' + beta (Ioffe and Szegedy 2015, algorithm 1), over each ghost
    batch; the running variance is the unbiased one."""
    make = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(24, 5, 4, 3, generator=make, dtype=torch.float64)
    for norm in (nn.BatchNorm2d(5, eps=1e-3).double(), GhostBatchNorm(5, eps=1e-3, group=group).double()):
        size = group if isinstance(norm, GhostBatchNorm) else 24
        with torch.no_grad():
            norm.weight.copy_(torch.randn(5, generator=make))
            norm.bias.copy_(torch.randn(5, generator=make))
        parts = x.split(size)
        unbiased = torch.stack([part.transpose(0, 1).flatten(1).var(1) for part in parts])
        torch.testing.assert_close(norm(x), normalise(x, norm, size), rtol=1e-12, atol=1e-12)
        running = 0.9 + 0.1 * unbiased.mean(0)
        torch.testing.assert_close(norm.running_var, running, rtol=1e-12, atol=0)


@pytest.mark.check
@pytest.mark.thin(1)
@pytest.mark.parametrize("k", [4, 16])
def test_the_square_root_rule_keeps_the_covariance_of_the_step(k: int) -> None:
    """cov(dw) is about eta^2 / M times that of single gradients, so k times the batch at sqrt(k) times the rate has the
    same one, and at k times the rate (linear rule) k times it (Hoffer et al. 2017, arXiv 1705.08741, equation 7)."""
    ratio, error = compare_covariance(k)
    assert error < 0.25
    assert ratio == pytest.approx(1, abs=error)
    assert k * ratio == pytest.approx(k, abs=k * error)
    # And not its size alone: along the directions in which gradients vary most, as a matrix.
    one, other = (
        np.cov((average_batches(size, epochs) @ find_axes(4).T).T) / correct_share(size)
        for size, epochs in ((15, 60), (15 * k, 240))
    )
    assert np.linalg.norm(k * other - one) / np.linalg.norm(one) < 0.35


@pytest.mark.parametrize("batch", [24, 96])
@pytest.mark.thin(1)
def test_multiplicative_noise_keeps_the_mean_and_has_its_covariance(batch: int) -> None:
    """g' = 1 / M sum g_n z_n with z ~ N(1, sigma^2), sigma^2 proportional to M: over the draws of z its mean is the
    gradient of the batch, its covariance sigma^2 / M^2 sum g_n g_n^T, which for sigma^2 = M / m is that of batches of m
    as far as gradients have mean 0 (Hoffer et al. 2017, equation 9)."""
    mine, noisy, sigma = draw_noisy(batch)
    expected = sigma**2 / batch**2 * mine.T @ mine
    error = np.sqrt(np.diag(expected) / NOISE_DRAWS)
    assert (abs(noisy.mean(0) - mine.mean(0)) < 4 * error).all()
    found = np.cov(noisy.T)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.08
    assert sigma**2 / batch == pytest.approx(NOISE_SHARE**2)  # whatever the batch: that of 16 samples
