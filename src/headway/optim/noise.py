"""Multiplicative gradient noise: gives a large batch the fluctuations of a small one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.core.random_keys import UInt64, draw_uniform

STREAM_NOISE = 600
"""First of two streams: a normal number takes two words. `headway.data.random_streams` lists the other streams."""


def draw_gradient_noise(keys: UInt64, sigma: float) -> NDArray[np.float32]:
    """Returns factors z ~ N(1, sigma^2) on the losses of the samples, [n] for n keys.

    With the gradient g_n of sample n, the gradient of a batch of M becomes (1/M) sum g_n z_n, as in Hoffer et al. 2017
    (arXiv 1705.08741, equation 9) with sigma^2 proportional to M. Gradients of single samples are never computed. The
    factors depend on the keys of the samples alone.
    """
    # Box and Muller: a fixed number of words for each factor, unlike methods that reject.
    radius = np.sqrt(-2 * np.log1p(-draw_uniform(keys, STREAM_NOISE)))
    angle = 2 * math.pi * draw_uniform(keys, STREAM_NOISE + 1)
    # The mean is 1, so the expected gradient does not change.
    factors: NDArray[np.float32] = (1 + sigma * radius * np.cos(angle)).astype(np.float32)
    return factors
