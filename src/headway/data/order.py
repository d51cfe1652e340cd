"""Order: which sample is served at which position. A pure function of (seed, position), in O(1) memory.

epoch = position // n; sample = permutation(seed, epoch)[position mod n]. The permutation is a Feistel network over
Z_a x Z_b with a * b just above n, walked along its cycle until it lands below n (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"): any position at once, and nothing to store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.keys import GOLDEN, MASK, UInt64, mix_int

Int64 = NDArray[np.int64]

SMALL = 4096


def rounds_of(n: int) -> int:
    """Half-rounds for a range of n: few values need many.

    Over 20,000 keys, chi-square / freedom of all 120 permutations of n = 5 is 78 with 3 half-rounds, 11 with 6, 4 with
    8, 1.07 with 12. From 4,096 on, 6 half-rounds give the fixed points and neighbour distances of random permutations.
    """
    return 20 if n < SMALL else 6


BLOCKS_A_WINDOW = 8
"""A window holds pieces of this many places of the data set."""

_M1, _M2 = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)
_S32 = np.uint64(32)


def share(total: int, rank: int, world: int) -> tuple[int, int]:
    """Slots [low, high) of `total` that belong to `rank` of `world`: sizes differ by at most one."""
    return rank * total // world, (rank + 1) * total // world


def permute(x: UInt64, n: int, key: int, salt: UInt64 | None = None) -> UInt64:
    """Image of each x < n under the permutation of [0, n) that `key` names.

    Args:
        x: uint64 of shape [k], each below n.
        n: size of the permuted range, 1 to 2^62.
        key: 64 bits.
        salt: uint64 of shape [k]: makes another permutation for each value of it.

    Returns:
        uint64 of shape [k].
    """
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    out = _feistel(x, a, b, key, salt)
    outside = np.flatnonzero(out >= np.uint64(n))
    while outside.size:  # about one in sqrt(n) leaves the range, since a * b < n + sqrt(n) + 1
        out[outside] = _feistel(out[outside], a, b, key, None if salt is None else salt[outside])
        outside = outside[out[outside] >= np.uint64(n)]
    return out


def _feistel(x: UInt64, a: int, b: int, key: int, salt: UInt64 | None) -> UInt64:
    size = (np.uint64(a), np.uint64(b))
    half = [x // size[1], x % size[1]]
    for number in range(rounds_of(a * b)):
        to, of = number & 1, 1 - (number & 1)
        round_key = np.uint64(mix_int(key + (number + 1) * GOLDEN) & MASK)
        word = half[of] * _M1 + round_key
        if salt is not None:
            word += salt
        word ^= word >> _S32
        word *= _M2
        word ^= word >> _S32
        word *= _M1
        half[to] = half[to] + (((word >> _S32) * size[to]) >> _S32)  # multiply-high: uniform in [0, size)
        np.subtract(half[to], size[to], out=half[to], where=half[to] >= size[to])
    return half[0] * size[1] + half[1]


@dataclass(frozen=True)
class Order:
    """The order in which a run is served its samples.

    Args:
        samples: size n of the data set, at least 1.
        seed: the run's seed.
        window: how many samples are mixed together; None: all. A smaller one permutes blocks of window / 8 samples
            that lie together, then the samples inside each window, so that a disk reads nearly sequentially. The blocks
            begin at another place in each epoch.

    Raises:
        UsageError: n or the window is below 1.
    """

    samples: int
    seed: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("there is no order over an empty data set")
        if self.window is not None and self.window < 1:
            raise UsageError(f"a window of {self.window} samples", fix="Leave it out, or set 1 or more.")

    def __call__(self, positions: Int64) -> tuple[Int64, Int64]:
        """(epoch, sample) of each position; int64 arrays of the shape [k] of `positions`."""
        positions = np.asarray(positions, np.int64).reshape(-1)
        epochs, slots = np.divmod(positions, self.samples)
        samples = np.empty_like(slots)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            samples[here] = self._epoch(int(epoch), slots[here].astype(np.uint64)).astype(np.int64)
        return epochs, samples

    def _epoch(self, epoch: int, slots: UInt64) -> UInt64:
        key = mix_int(mix_int(self.seed) + (epoch + 1) * GOLDEN)
        n, window = self.samples, self.window
        if window is None or window >= n:
            return permute(slots, n, key)
        inside = np.empty_like(slots)
        number = slots // np.uint64(window)
        whole = n // window
        full = number < np.uint64(whole)
        for mask, size in ((full, window), (~full, n - whole * window)):
            if mask.any():
                start = number[mask] * np.uint64(window)
                inside[mask] = start + permute(slots[mask] - start, size, mix_int(key + 1), number[mask])
        block = -(-window // BLOCKS_A_WINDOW)
        blocks = n // block
        place = inside // np.uint64(block)
        moved = place < np.uint64(blocks)  # the short last block stays last; the offset below moves it every epoch
        out = inside.copy()
        out[moved] = permute(place[moved], blocks, mix_int(key + 2)) * np.uint64(block) + inside[moved] % np.uint64(
            block
        )
        return (out + np.uint64(mix_int(key + 3) % n)) % np.uint64(n)
