"""Counter-based random numbers: every random choice about a sample comes from its key and a stream number.

A key is 64 bits of (seed, epoch, sample, view), so that choices do not depend on threads, ranks, batch size or resume.
The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"): two multiplications and three shifts, vectorised over numpy arrays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

UInt64 = NDArray[np.uint64]

MASK = (1 << 64) - 1
# 2^64 / golden ratio, odd: the step of a Weyl sequence.
GOLDEN = 0x9E3779B97F4A7C15
_M1, _M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_GOLDEN, _M1_64, _M2_64 = np.uint64(GOLDEN), np.uint64(_M1), np.uint64(_M2)
_S30, _S27, _S31, _S32, _S11 = (np.uint64(shift) for shift in (30, 27, 31, 32, 11))


def mix(x: UInt64) -> UInt64:
    """Maps 64-bit words one to one so that every input bit flips every output bit with probability near 1/2."""
    x = x ^ (x >> _S30)
    x *= _M1_64
    x ^= x >> _S27
    x *= _M2_64
    x ^= x >> _S31
    return x


def mix_int(x: int) -> int:
    """Applies `mix` to one Python integer modulo 2^64."""
    x &= MASK
    x = ((x ^ (x >> 30)) * _M1) & MASK
    x = ((x ^ (x >> 27)) * _M2) & MASK
    return x ^ (x >> 31)


def make_keys(seed: int, epoch: ArrayLike, sample: ArrayLike, view: int = 0) -> UInt64:
    """Returns the random keys of samples.

    Args:
        seed: the run's seed.
        epoch: the epoch of each sample, or one for all.
        sample: sample numbers, shape [n].
        view: number of the view, if a sample is seen more than once per epoch.

    Returns:
        uint64 of shape [n].
    """
    # One round of mixing per coordinate, so that neighbouring seeds, epochs and samples have unrelated keys.
    base = np.uint64(mix_int(mix_int(seed) + view * GOLDEN))
    by_epoch = mix(np.asarray(epoch, np.uint64).reshape(-1) * _GOLDEN + base)
    return mix(np.asarray(sample, np.uint64).reshape(-1) * _GOLDEN + by_epoch)


def draw_words(key: UInt64, stream: int) -> UInt64:
    """Returns one random 64-bit word per key; `stream` numbers the choices about one sample."""
    return mix(key + np.uint64((stream * GOLDEN) & MASK))


def draw_uniform(key: UInt64, stream: int) -> NDArray[np.float64]:
    """Returns one uniform number in [0, 1) per key, with 53 random bits."""
    # The upper 53 bits: as many as the mantissa of a float64 holds.
    return (draw_words(key, stream) >> _S11).astype(np.float64) * 2.0**-53


def draw_integers(key: UInt64, stream: int, low: int, high: int) -> NDArray[np.int64]:
    """Returns one integer in [low, high) per key; the bias is below (high - low) / 2^32 (Lemire 2019)."""
    # Multiply and shift takes the place of a slow and equally biased modulo.
    span = np.uint64(high - low)
    return (((draw_words(key, stream) >> _S32) * span) >> _S32).astype(np.int64) + low
