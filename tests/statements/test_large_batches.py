"""Statements about large batches, measured on gradients of real images (handwritten digits) in our Order."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests._support import digits_arrays
from torch import Tensor, nn
from torch.nn import functional as F

from headway.core.random_keys import make_keys
from headway.data.order import Order
from headway.model.batch_norm import GhostBatchNorm
from headway.optim import draw_gradient_noise

N = 480
"""Images; divided by each batch of these tests, so that no batch crosses the end of an epoch."""

Vectors = NDArray[np.float64]


@cache
def data() -> tuple[Tensor, Tensor]:
    images, labels = digits_arrays()
    return torch.from_numpy(images[:N].reshape(N, 64) / 16 - 0.3), torch.from_numpy(labels[:N])


def loss_of(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of a network of one hidden layer, whose weights are one vector."""
    first, second = weights[: 64 * 12].view(12, 64), weights[64 * 12 :].view(10, 12)
    return F.cross_entropy(torch.tanh(images @ first.T) @ second.T, labels)


@cache
def start() -> Tensor:
    return 0.15 * torch.randn(64 * 12 + 120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@cache
def gradients() -> Vectors:
    """That of each image at the start, [N, weights]."""
    images, labels = data()
    out = []
    for one in range(N):
        weights = start().clone().requires_grad_()
        out.append(torch.autograd.grad(loss_of(weights, images[one : one + 1], labels[one : one + 1]), weights)[0])
    return torch.stack(out).numpy()


def batch_means(size: int, epochs: int, seed: int = 1) -> Vectors:
    """Gradients of all batches of some epochs, [batches, weights]."""
    _, samples = Order(N, seed)(np.arange(epochs * N))
    return gradients()[samples.reshape(-1, size)].mean(1)


def spread(size: int, epochs: int = 40, seed: int = 1) -> tuple[float, float]:
    """Trace of the covariance of a batch's gradient about the mean of all images, and its standard error. Batches of
    one epoch are not independent, epochs are."""
    away = ((batch_means(size, epochs, seed) - gradients().mean(0)) ** 2).sum(1).reshape(epochs, -1).mean(1)
    return float(away.mean()), float(away.std(ddof=1) / epochs**0.5)


def corrected(size: int) -> float:
    """Of N images drawn without replacement the variance of a mean is less by this factor, and 0 for all of them."""
    return 1 - size / N


SIZES = (2, 4, 8, 16, 32, 60, 120, 240)


def slope(sizes: tuple[int, ...], correct: bool) -> tuple[float, float]:
    """Of log variance over log m, by weighted least squares, and its standard error."""
    found = [spread(size) for size in sizes]
    x = np.log(sizes)
    y = np.log([value / (corrected(size) if correct else 1) for size, (value, _) in zip(sizes, found, strict=True)])
    weight = np.array([(value / error) ** 2 for value, error in found])
    centred = x - (weight @ x) / weight.sum()
    return float((weight * centred) @ y / (weight @ centred**2)), float((weight @ centred**2) ** -0.5)


@pytest.mark.check
def test_the_variance_of_a_gradient_falls_as_one_over_the_batch() -> None:
    """Var(g) = Var(g_1) / m: the slope is -1 within its 95 % interval, which is narrow; and the level is that of single
    gradients."""
    found, error = slope(SIZES, correct=True)
    assert error < 0.02
    assert abs(found + 1) < 2.4 * error  # eight points leave six degrees of freedom: Student's t
    single = float(gradients().var(0, ddof=1).sum())
    for size in SIZES:
        value, error = spread(size)
        assert abs(value - single * corrected(size) / size) < 4 * error + 1e-12, size


def test_without_the_correction_the_slope_is_another() -> None:
    """The batches are large parts of the data: a test that left that out would find a law that is not there."""
    found, error = slope(SIZES[-4:], correct=False)
    assert found < -1 - 4 * error


@pytest.mark.parametrize("k", [2, 4, 8])
def test_k_small_steps_are_one_large_step_to_first_order(k: int) -> None:
    """Goyal et al. 2017 (arXiv 1706.02677), section 2.1: with eta' = k eta they differ by what gradients change on the
    way, so by eta^2: half the rate, a quarter of the difference."""
    images, labels = data()
    parts = [slice(30 * j, 30 * j + 30) for j in range(k)]

    def gradient(weights: Tensor, part: slice) -> Tensor:
        weights = weights.clone().requires_grad_()
        return torch.autograd.grad(loss_of(weights, images[part], labels[part]), weights)[0]

    rates = [0.1 * 2.0**-power for power in range(6)]
    away, moved = [], []
    for rate in rates:
        small = start()
        for part in parts:
            small = small - rate * gradient(small, part)
        large = start() - k * rate * gradient(start(), slice(0, 30 * k))
        away.append(float((small - large).norm()))
        moved.append(float((large - start()).norm()))
    orders = np.diff(np.log(away)) / np.diff(np.log(rates))
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
        expected, unbiased = torch.empty_like(x), []
        for first in range(0, 24, size):
            for channel in range(5):
                part = x[first : first + size, channel]
                mu = part.sum() / part.numel()
                variance = ((part - mu) ** 2).sum() / part.numel()
                hat = (part - mu) / (variance + 1e-3).sqrt()
                expected[first : first + size, channel] = norm.weight[channel] * hat + norm.bias[channel]
                unbiased.append(variance * part.numel() / (part.numel() - 1))
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)
        running = 0.9 + 0.1 * torch.stack(unbiased).view(-1, 5).mean(0)
        torch.testing.assert_close(norm.running_var, running, rtol=1e-12, atol=0)


@pytest.mark.check
@pytest.mark.thin(1)
@pytest.mark.parametrize("k", [4, 16])
def test_the_square_root_rule_keeps_the_covariance_of_the_step(k: int) -> None:
    """cov(dw) is about eta^2 / M times that of single gradients, so k times the batch at sqrt(k) times the rate has the
    same one, and at k times the rate (linear rule) k times it (Hoffer et al. 2017, arXiv 1705.08741, equation 7)."""
    (small, small_error), (large, large_error) = spread(15), spread(15 * k, epochs=120, seed=2)
    small, large = small / corrected(15), large / corrected(15 * k)
    error = 4 * ((small_error / small) ** 2 + (large_error / (large * corrected(15 * k))) ** 2) ** 0.5
    assert error < 0.25
    assert k * large / small == pytest.approx(1, abs=error)
    assert k**2 * large / small == pytest.approx(k, abs=k * error)
    # And not its size alone: along the directions in which gradients vary most, as a matrix.
    _, _, axes = np.linalg.svd(gradients() - gradients().mean(0), full_matrices=False)
    one, other = (
        np.cov((batch_means(size, epochs) @ axes[:4].T).T) / corrected(size)
        for size, epochs in ((15, 60), (15 * k, 240))
    )
    assert np.linalg.norm(k * other - one) / np.linalg.norm(one) < 0.35


@pytest.mark.parametrize("batch", [24, 96])
@pytest.mark.thin(1)
def test_multiplicative_noise_keeps_the_mean_and_has_its_covariance(batch: int) -> None:
    """g' = 1 / M sum g_n z_n with z ~ N(1, sigma^2), sigma^2 proportional to M: over the draws of z its mean is the
    gradient of the batch, its covariance sigma^2 / M^2 sum g_n g_n^T, which for sigma^2 = M / m is that of batches of m
    as far as gradients have mean 0 (Hoffer et al. 2017, equation 9)."""
    draws, sigma = 6000, 0.25 * batch**0.5
    factors = np.stack([draw_gradient_noise(make_keys(3, epoch, np.arange(batch)), sigma) for epoch in range(draws)])
    _, _, axes = np.linalg.svd(gradients() - gradients().mean(0), full_matrices=False)
    mine = gradients()[:batch] @ axes[:5].T
    noisy = factors @ mine / batch
    expected = sigma**2 / batch**2 * mine.T @ mine
    error = np.sqrt(np.diag(expected) / draws)
    assert (abs(noisy.mean(0) - mine.mean(0)) < 4 * error).all()
    found = np.cov(noisy.T)
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.08
    assert sigma**2 / batch == pytest.approx(1 / 16)  # whatever the batch: that of 16 samples
