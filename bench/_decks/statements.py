"""Five statements about large batches, measured on gradients of handwritten digits in Headway's Order.

tests/statements proves each of them; `python -m bench.decks --statements` measures them, keeps what it found in
bench/results/statements.jsonl, and draws the pictures of docs/statements.md. It takes some 15 CPU seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from bench._accuracy.results import FOLDER, Results, commit
from headway.core.random_keys import make_keys
from headway.data.order import Order
from headway.optim import draw_gradient_noise

RESULTS = FOLDER / "statements.jsonl"
N = 480
"""Images; divided by each batch here, so that no batch crosses the end of an epoch."""
SIZES = (2, 4, 8, 16, 32, 60, 120, 240)
RATES = tuple(0.1 * 2.0**-power for power in range(6))
ROOT_FACTORS = (2, 4, 8, 16)
ROOT_BATCH = 15
NOISE_BATCHES, NOISE_DRAWS, NOISE_SHARE = (24, 48, 96, 240), 6000, 0.25
"""sigma is NOISE_SHARE times the root of the batch: the covariance is that of batches of 16."""

Vectors = NDArray[np.float64]


@cache
def read_digits() -> tuple[Tensor, Tensor]:
    """Reads the first N of scikit-learn's digits, centred: images [N, 64] and labels [N]."""
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    # `load_digits` gives the same; its import takes two seconds.
    rows = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", np.uint8, delimiter=",", max_rows=N)
    return torch.from_numpy(rows[:, :-1] / 16 - 0.3), torch.from_numpy(rows[:, -1].astype(np.int64))


def compute_loss(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of a network of one hidden layer, whose weights are one vector."""
    first, second = weights[: 64 * 12].view(12, 64), weights[64 * 12 :].view(10, 12)
    return F.cross_entropy(torch.tanh(images @ first.T) @ second.T, labels)


@cache
def draw_start() -> Tensor:
    """Draws the weights at which all gradients are taken."""
    return 0.15 * torch.randn(64 * 12 + 120, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def compute_gradient(weights: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the mean loss of some images."""
    weights = weights.clone().requires_grad_()
    return torch.autograd.grad(compute_loss(weights, images, labels), weights)[0]


@cache
def compute_gradients() -> Vectors:
    """The gradient of each image at the start, [N, weights]."""
    images, labels = read_digits()
    parts = (slice(one, one + 1) for one in range(N))
    return torch.stack([compute_gradient(draw_start(), images[part], labels[part]) for part in parts]).numpy()


def average_batches(size: int, epochs: int, seed: int = 1) -> Vectors:
    """Gradients of all batches of some epochs, [batches, weights]."""
    _, samples = Order(N, seed)(np.arange(epochs * N))
    return compute_gradients()[samples.reshape(-1, size)].mean(1)


def measure_spread(size: int, epochs: int = 40, seed: int = 1) -> tuple[float, float]:
    """Trace of the covariance of a batch's gradient about the mean of all images, and its standard error. Batches of
    one epoch are not independent, epochs are."""
    away = ((average_batches(size, epochs, seed) - compute_gradients().mean(0)) ** 2).sum(1)
    by_epoch = away.reshape(epochs, -1).mean(1)
    return float(by_epoch.mean()), float(by_epoch.std(ddof=1) / epochs**0.5)


def correct_share(size: int) -> float:
    """Of N images drawn without replacement the variance of a mean is less by this factor, and 0 for all of them."""
    return 1 - size / N


def fit_slope(sizes: tuple[int, ...], *, correct: bool) -> tuple[float, float]:
    """Slope of log variance over log m, by weighted least squares, and its standard error."""
    found = [measure_spread(size) for size in sizes]
    x = np.log(sizes)
    y = np.log([value / (correct_share(size) if correct else 1) for size, (value, _) in zip(sizes, found, strict=True)])
    weight = np.array([(value / error) ** 2 for value, error in found])
    centred = x - (weight @ x) / weight.sum()
    return float((weight * centred) @ y / (weight @ centred**2)), float((weight @ centred**2) ** -0.5)


def compare_steps(k: int) -> tuple[list[float], list[float]]:
    """Distance between k small steps and one large one at each of RATES, and how far the large one moved."""
    images, labels = read_digits()
    parts = [slice(30 * j, 30 * j + 30) for j in range(k)]
    away, moved = [], []
    for rate in RATES:
        small = draw_start()
        for part in parts:
            small = small - rate * compute_gradient(small, images[part], labels[part])
        large = draw_start() - k * rate * compute_gradient(draw_start(), images[: 30 * k], labels[: 30 * k])
        away.append(float((small - large).norm()))
        moved.append(float((large - draw_start()).norm()))
    return away, moved


def compare_covariance(k: int) -> tuple[float, float]:
    """Covariance of a step with k times the batch at sqrt(k) times the rate, over that of the small batch; and four
    standard errors of it."""
    (small, small_error), (large, large_error) = (
        measure_spread(ROOT_BATCH),
        measure_spread(ROOT_BATCH * k, epochs=120, seed=2),
    )
    ratio = k * large / correct_share(ROOT_BATCH * k) / (small / correct_share(ROOT_BATCH))
    return ratio, 4 * ((small_error / small) ** 2 + (large_error / large) ** 2) ** 0.5


def draw_noisy(batch: int) -> tuple[Vectors, Vectors, float]:
    """Draws a batch's gradient with multiplicative noise many times, along the five axes in which gradients vary most.

    Returns:
        gradients of the batch's images [batch, 5], noisy means [draws, 5], and sigma.
    """
    sigma = NOISE_SHARE * batch**0.5
    draws = range(NOISE_DRAWS)
    factors = np.stack([draw_gradient_noise(make_keys(3, epoch, np.arange(batch)), sigma) for epoch in draws])
    mine = compute_gradients()[:batch] @ find_axes(5).T
    return mine, factors @ mine / batch, sigma


@cache
def find_axes(count: int) -> Vectors:
    """Finds the directions in which gradients vary most, [count, weights]."""
    _, _, axes = np.linalg.svd(compute_gradients() - compute_gradients().mean(0), full_matrices=False)
    return np.asarray(axes[:count])


def _measure_variance() -> dict[str, Any]:
    slope, error = fit_slope(SIZES, correct=True)
    spreads = [measure_spread(size)[0] / correct_share(size) for size in SIZES]
    # Eight points leave six degrees of freedom: Student's t.
    return {"value": slope, "error": 2.45 * error, "x": SIZES, "y": spreads}


def _measure_steps() -> dict[str, Any]:
    away, _ = compare_steps(8)
    orders = np.diff(np.log(away)) / np.diff(np.log(RATES))
    return {"value": float(orders[-1]), "x": RATES, "y": away}


def _measure_root() -> dict[str, Any]:
    found = [compare_covariance(k) for k in ROOT_FACTORS]
    linear = [k * ratio for k, (ratio, _) in zip(ROOT_FACTORS, found, strict=True)]
    ratio, error = found[-1]
    return {"value": ratio, "error": error / 2, "x": ROOT_FACTORS, "y": [one for one, _ in found], "linear": linear}


def _measure_noise() -> dict[str, Any]:
    traces, worst = [], 0.0
    for batch in NOISE_BATCHES:
        mine, noisy, sigma = draw_noisy(batch)
        expected = sigma**2 / batch**2 * mine.T @ mine
        error = np.sqrt(np.diag(expected) / NOISE_DRAWS)
        worst = max(worst, float((abs(noisy.mean(0) - mine.mean(0)) / error).max()))
        # Of one image: gradients of other batches are of other sizes.
        traces.append(float(np.trace(np.cov(noisy.T)) / np.trace(mine.T @ mine / batch)))
    large, small = (traces[NOISE_BATCHES.index(batch)] for batch in (96, 24))
    return {"value": large / small, "mean_off": worst, "x": NOISE_BATCHES, "y": traces}


def _measure_norm() -> dict[str, Any]:
    make = torch.Generator().manual_seed(0)
    x = 3 + 2 * torch.randn(24, 5, 4, 3, generator=make, dtype=torch.float64)
    norm = nn.BatchNorm2d(5, eps=1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(5, generator=make))
        norm.bias.copy_(torch.randn(5, generator=make))
    found = norm(x).detach()
    expected = normalise(x, norm, 24)
    some = slice(None, None, 12)
    x_some, y_some = expected.flatten()[some].tolist(), found.flatten()[some].tolist()
    return {"value": float((found - expected).abs().max()), "x": x_some, "y": y_some}


def normalise(x: Tensor, norm: nn.Module, group: int) -> Tensor:
    """Computes x' = (x - mu) / sqrt(sigma^2 + eps), y = gamma x' + beta of each channel, over groups of samples.

    Source: Ioffe and Szegedy 2015 (arXiv 1502.03167), algorithm 1.
    """
    out = torch.empty_like(x)
    for first in range(0, len(x), group):
        for channel in range(x.shape[1]):
            part = x[first : first + group, channel]
            mu = part.sum() / part.numel()
            variance = ((part - mu) ** 2).sum() / part.numel()
            hat = (part - mu) / (variance + norm.eps).sqrt()
            out[first : first + group, channel] = (norm.weight[channel] * hat + norm.bias[channel]).detach()
    return out


MEASURES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "variance": _measure_variance,
    "linear": _measure_steps,
    "root": _measure_root,
    "noise": _measure_noise,
    "norm": _measure_norm,
}


def measure_statements() -> None:
    """Measures all statements, and keeps what was found."""
    RESULTS.unlink(missing_ok=True)
    results, made_by = Results(RESULTS), commit()
    for name, measure in MEASURES.items():
        results.add({"name": name, **measure(), "commit": made_by})
