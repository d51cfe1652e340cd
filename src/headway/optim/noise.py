"""Multiplicative gradient noise: the fluctuations of a small batch in a large one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from headway.core.random_keys import UInt64, draw_uniform

STREAM_NOISE = 600
"""And the next one: a normal number is made of two words. headway.data.random_streams lists the others."""


def draw_gradient_noise(keys: UInt64, sigma: float) -> NDArray[np.float32]:
    """Factors z ~ N(1, sigma^2), one a key, by which the samples' losses are multiplied.

    The gradient is then (1/M) sum g_n z_n, g_n being that of a sample: what Hoffer et al. 2017 (arXiv 1705.08741,
    equation 9) add to a batch of M, with sigma^2 proportional to M. No gradient of a single sample is needed. Numbers
    are made by Box and Muller's method, so that they depend on the samples' keys alone.
    """
    radius = np.sqrt(-2 * np.log1p(-draw_uniform(keys, STREAM_NOISE)))
    angle = 2 * math.pi * draw_uniform(keys, STREAM_NOISE + 1)
    factors: NDArray[np.float32] = (1 + sigma * radius * np.cos(angle)).astype(np.float32)
    return factors
