"""The gradient noise scale, from gradients that are at hand anyway: those of each rank, and their sum.

McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1. The gradient of b
samples has the expected squared norm |G|^2 + tr(Sigma) / b, so two batch sizes give both terms. Their ratio
B_simple = tr(Sigma) / |G|^2 is the batch, in samples, beyond which a larger one saves ever fewer steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from headway.core.errors import UsageError


def squared_norm(grads: Iterable[Tensor]) -> Tensor:
    """Sum of the squares of all elements: one number, on the device, float32 (float64 for such gradients)."""
    wide = [grad if grad.dtype in (torch.float32, torch.float64) else grad.float() for grad in grads]
    return torch.nn.utils.get_total_norm(wide).square()


def local_term(grads: Iterable[Tensor], share: float) -> Tensor:
    """What a rank adds, over the ranks, to `local_mean_sq`; additive over buckets, too.

    The sum over ranks is the mean of their squared gradient norms, weighted by their numbers of samples b_r: of the
    gradients g_r of each rank's mean loss, sum b_r / B |g_r|^2, with expectation |G|^2 + tr(Sigma) / small for
    small = B / (number of ranks with samples).

    Args:
        grads: before they are reduced, scaled such that their sum over the ranks is the gradient: b_r / B g_r.
        share: b_r / B, this rank's share of the samples; 0: the rank has none, and the term is 0.

    Returns:
        one number, on the device.

    Raises:
        UsageError: the share is not in [0, 1].
    """
    if not 0 <= share <= 1:
        raise UsageError(f"a rank's share of the batch is {share}", fix="It is its samples / those of all ranks.")
    return squared_norm(grads) * (1 / share if share else 0.0)


@dataclass(frozen=True)
class Estimate:
    """The noise scale as far as it is known.

    Attributes:
        scale: B_simple, samples; inf where the gradient is lost in the noise, nan before the first step.
        error: its standard error, samples; inf where it cannot be told.
        noise: tr(Sigma), of one sample's gradient.
        signal: |G|^2.
    """

    scale: float
    error: float
    noise: float
    signal: float


@final
class NoiseScale:
    """B_simple as the ratio of moving averages of tr(Sigma) and |G|^2; each step's ratio alone would be biased.

    `update` waits for no device; `value` does.

    Args:
        decay: of the exponential moving averages, a step; 0.99 remembers about 200 steps.

    Raises:
        UsageError: a decay outside of [0, 1).
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"a decay of {decay}", fix="Set one from 0 to below 1: 0.99 remembers about 200 steps.")
        self._decay = decay
        # Moving averages, from zero, of: 1, noise, signal, noise^2, noise signal, signal^2; and the sum of the squares
        # of the steps' weights.
        self._state = torch.zeros(7, dtype=torch.float64)

    def update(self, local_mean_sq: Tensor | float, reduced_sq: Tensor | float, small: float, big: float) -> None:
        """Takes in one step; one that is not finite is left out.

        Args:
            local_mean_sq: mean squared norm of the gradients of `small` samples each: the sum of all `local_term`.
            reduced_sq: squared norm of the gradient of all `big` samples.
            small: samples; with ranks of different sizes, the harmonic mean for a plain mean of squared norms, and
                big / (number of ranks with samples) for the one of `local_term`.
            big: samples.

        Raises:
            UsageError: `small` is not below `big`: one rank alone has to accumulate gradients over several batches.
        """
        if not 0 < small < big:
            what = f"the noise of gradients cannot be told from batches of {small:g} and of {big:g} samples"
            raise UsageError(what, fix="Use at least two ranks, or accumulate gradients over at least two batches.")
        with torch.no_grad():
            local, reduced = (torch.as_tensor(value, dtype=torch.float64) for value in (local_mean_sq, reduced_sq))
            signal = (big * reduced - small * local) / (big - small)
            noise = (local - reduced) / (1 / small - 1 / big)
            moments = [torch.ones_like(noise), noise, signal, noise * noise, noise * signal, signal * signal]
            now = torch.stack([*moments, torch.full_like(noise, 1 - self._decay)])
            self._state = self._state.to(now.device)
            kept = torch.full_like(now, self._decay)
            kept[-1] = self._decay**2
            then = kept * self._state + (1 - self._decay) * now
            self._state = torch.where(then.isfinite().all(), then, self._state)

    def value(self) -> Estimate:
        """The noise scale; waits for the device.

        Its error is that of a ratio of two means (the delta method), from the spread of steps taken as independent.
        """
        weight, *means, squares = self._state.tolist()
        if weight == 0:
            return Estimate(math.nan, math.inf, math.nan, math.nan)
        noise, signal, noise_sq, product, signal_sq = (mean / weight for mean in means)
        if signal <= 0:
            return Estimate(math.inf, math.inf, noise, signal)
        scale = noise / signal
        steps = weight**2 / squares  # as many equally weighted ones would know as much
        if steps < 1 + 1e-9:
            return Estimate(scale, math.inf, noise, signal)
        variance = (noise_sq - noise**2) - 2 * scale * (product - noise * signal) + scale**2 * (signal_sq - signal**2)
        return Estimate(scale, math.sqrt(max(variance, 0.0) / (steps - 1)) / signal, noise, signal)

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        return {"state": self._state}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on where another one was."""
        self._state = state["state"].clone()
