"""Estimates the gradient noise scale from gradients that are at hand anyway: those of each rank, and their sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.core.errors import UsageError
from headway.core.statistics import compute_student_t

# McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The gradient of b
# samples has the expected squared norm |G|^2 + tr(Sigma) / b, so two batch sizes give both terms. Their ratio
# B_simple = tr(Sigma) / |G|^2 is the batch, in samples, beyond which a larger one saves ever fewer steps.

# Number of batches of neighbouring measurements, whose means are taken as independent. Fewer give no interval.
MAX_BATCH_MEANS = 16
MIN_BATCH_MEANS = 4


def compute_squared_norm(grads: Iterable[Tensor]) -> Tensor:
    """Returns the sum of squares of all elements: a scalar on the device, float32 (float64 for such gradients)."""
    # Half-precision gradients are widened first: their squares would overflow or vanish.
    widened = [grad if grad.dtype in (torch.float32, torch.float64) else grad.float() for grad in grads]
    return torch.nn.utils.get_total_norm(widened).square()


def compute_local_term(grads: Iterable[Tensor], sample_share: float) -> Tensor:
    """Returns a rank's addend to `local_mean_sq`. Terms add up over ranks, and over buckets.

    The sum over ranks is the mean of their squared gradient norms, weighted by their numbers of samples b_r: for the
    gradients g_r of each rank's mean loss, sum b_r / B |g_r|^2, with expectation |G|^2 + tr(Sigma) / small for
    small = B / (number of ranks with samples).

    Args:
        grads: gradients before they are reduced, scaled such that their sum over the ranks is the gradient: b_r / B
            g_r.
        sample_share: b_r / B, this rank's share of the samples; 0 if the rank has none: the term is 0.

    Returns:
        a scalar on the device.

    Raises:
        UsageError: the share is not in [0, 1].
    """
    if not 0 <= sample_share <= 1:
        what = f"a rank's share of the batch is {sample_share}"
        raise UsageError(what, fix="Set it to its samples / those of all ranks.")
    return compute_squared_norm(grads) * (1 / sample_share if sample_share else 0.0)


def predict_sample_ratio(batch: float, critical_batch: float, factor: float = 2.0) -> float:
    """Returns the predicted samples to the same loss with `factor` times the batch, relative to those with the batch.

    With the best learning rate of each batch, steps S and samples E to a loss follow (S / Smin - 1) (E / Emin - 1) = 1,
    so that E = Emin (1 + batch / critical_batch) (McCandlish et al. 2018, equation 2.11). Steps change by the result /
    factor.
    """
    if math.isinf(critical_batch):
        return 1.0
    return (critical_batch + factor * batch) / (critical_batch + batch)


@final
@dataclass(frozen=True, kw_only=True)
class NoiseEstimate:
    """An estimate of the noise scale.

    Attributes:
        scale: B_simple in samples; inf if the gradient is lost in the noise, nan before the first step.
        low, high: ends of the 95 % interval of `scale`; 0 and inf if they cannot be determined.
        noise: tr(Sigma), the variance of one sample's gradient.
        signal: |G|^2, the squared norm of the true gradient.
    """

    scale: float
    low: float
    high: float
    noise: float
    signal: float


@final
class NoiseScale:
    """Estimates B_simple as mean tr(Sigma) over mean |G|^2 of the newest measurements.

    The mean of the measurements' own ratios would be biased. `update` does not wait for the device; `estimate` does.

    Args:
        window: number of newest measurements that count, at least 8.

    Raises:
        UsageError: the window is smaller than 8.
    """

    def __init__(self, window: int = 256) -> None:
        if window < 8:
            raise UsageError(f"a window of {window}", fix="Set at least 8: 256 suits one measurement a step.")
        self._pairs = torch.full((window, 2), math.nan, dtype=torch.float64)
        self._count = 0
        # Sums of noise, signal and 1 since the last measurement.
        self._open_sums = torch.zeros(3, dtype=torch.float64)

    def update(
        self, local_mean_sq: Tensor | float, reduced_sq: Tensor | float, small: float, big: float, *, last: bool = True
    ) -> None:
        """Adds one step; a step that is not finite is left out.

        Args:
            local_mean_sq: mean squared norm of the gradients of `small` samples: the sum of all `compute_local_term`.
            reduced_sq: squared norm of the gradient of all `big` samples.
            small: samples; if ranks differ in size, the harmonic mean for a plain mean of squared norms, and
                big / (number of ranks with samples) for that of `compute_local_term`.
            big: samples.
            last: if False, this step and the following ones, up to a last one, make one measurement: their mean.

        Raises:
            UsageError: `small` is not below `big`. A rank that is alone has to divide its batch.
        """
        if not 0 < small < big:
            what = f"the gradient noise cannot be estimated from batches of {small:g} and of {big:g} samples"
            raise UsageError(what, fix="Use at least two ranks, or divide the batch into at least two parts.")
        with torch.no_grad():
            local, reduced = (torch.as_tensor(value, dtype=torch.float64) for value in (local_mean_sq, reduced_sq))
            # The unbiased estimators of appendix A.1; either may be negative in one step.
            signal = (big * reduced - small * local) / (big - small)
            noise = (local - reduced) / (1 / small - 1 / big)
            addend = torch.stack([noise, signal, torch.ones_like(noise)])
            self._open_sums = self._open_sums.to(addend.device)
            self._open_sums = self._open_sums + addend.masked_fill(~addend.isfinite().all(), 0)
            if last:
                self._pairs = self._pairs.to(addend.device)
                self._pairs[self._count % len(self._pairs)] = self._open_sums[:2] / self._open_sums[2]
                self._open_sums = torch.zeros_like(self._open_sums)
                self._count += 1

    def estimate(self) -> NoiseEstimate:
        """Returns the estimate from the newest measurements; waits for the device."""
        pairs = self._order_pairs(self._pairs.cpu()).numpy()
        return estimate_ratio(pairs[np.isfinite(pairs).all(1)])

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the state for a checkpoint: the measurements that count, oldest first, and the open one."""
        pairs = self._order_pairs(self._pairs)
        return {"pairs": pairs[len(pairs) - min(self._count, len(pairs)) :], "open": self._open_sums.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores a state; of a larger window only the newest measurements."""
        newest_pairs = state["pairs"].reshape(-1, 2)[-len(self._pairs) :]
        self._pairs = torch.full_like(self._pairs, math.nan, device=newest_pairs.device)
        self._pairs[: len(newest_pairs)] = newest_pairs
        self._count, self._open_sums = len(newest_pairs), state["open"].clone()

    def _order_pairs(self, pairs: Tensor) -> Tensor:
        """Returns a copy of the ring buffer with the oldest measurement first."""
        oldest = self._count % len(pairs)
        return torch.cat([pairs[oldest:], pairs[:oldest]])


def estimate_ratio(pairs: NDArray[np.float64]) -> NoiseEstimate:
    """Returns the ratio of two means with its 95 % interval, from (noise, signal) [n, 2] in the order of time."""
    if not len(pairs):
        return NoiseEstimate(scale=math.nan, low=0.0, high=math.inf, noise=math.nan, signal=math.nan)
    noise, signal = pairs.mean(0).tolist()
    scale = noise / signal if signal > 0 else math.inf
    # Successive measurements are made at nearly the same weights, and their mean drifts with these, so they are not
    # independent. They are averaged in at most 16 batches of neighbours, whose means nearly are, and a drift over the
    # window widens the interval (batch means; Schmeiser 1982, "Batch size effects in the analysis of simulation
    # output", says why more batches gain nothing).
    size = max(1, len(pairs) // MAX_BATCH_MEANS)
    batches = len(pairs) // size
    if batches < MIN_BATCH_MEANS:
        return NoiseEstimate(scale=scale, low=0.0, high=math.inf, noise=noise, signal=signal)
    means = pairs[len(pairs) - size * batches :].reshape(batches, size, 2).mean(1)
    # Noise and signal come from the same gradients: their covariance is part of Fieller's interval (1954), which is not
    # symmetric, and has no upper end if the signal may be 0.
    (nn, ns), (_, ss) = (np.cov(means.T) * (compute_student_t(batches - 1) ** 2 / batches)).tolist()
    # Ratios r with (noise - r signal)^2 <= nn - 2 r ns + r^2 ss: between or outside the roots of a r^2 - 2 b r + c.
    a, b, c = signal**2 - ss, noise * signal - ns, noise**2 - nn
    discriminant = b * b - a * c
    low, high = 0.0, math.inf
    if discriminant >= 0 and a != 0:
        low_root, high_root = sorted(((b - math.sqrt(discriminant)) / a, (b + math.sqrt(discriminant)) / a))
        if a > 0 and signal > 0:
            low, high = max(0.0, low_root), max(0.0, high_root)
        elif a < 0 and low_root <= 0:
            low = max(0.0, high_root)
    return NoiseEstimate(scale=scale, low=low, high=high, noise=noise, signal=signal)
