"""Order: the sample served at each position, a pure function of (seed, position) in O(1) memory.

epoch = position // n; sample = permutation(seed, epoch)[position mod n]. The permutation is a Feistel network over
Z_a x Z_b with a * b just above n, walked along its cycle until it lands below n (Black and Rogaway 2002, "Ciphers with
arbitrary finite domains"): it gives any position at once and stores nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headway.core.errors import UsageError
from headway.core.random_keys import GOLDEN, MASK, UInt64, mix_int

Int64 = NDArray[np.int64]

SMALL_RANGE_SIZE = 4096
"""Smaller ranges take more half-rounds; see `count_rounds`."""


def count_rounds(n: int) -> int:
    """Returns the Feistel half-rounds for a range of n: small ranges need more."""
    # Over 20,000 keys, chi-square / freedom of all 120 permutations of n = 5 is 78 with 3 half-rounds, 11 with 6, 4
    # with 8, 1.07 with 12. From 4,096 on, 6 give the fixed points and neighbour distances of random permutations.
    return 20 if n < SMALL_RANGE_SIZE else 6


BLOCKS_PER_WINDOW = 8
"""Number of blocks in a window; each comes from another place of the data set."""

_MULTIPLIER_1 = np.uint64(0xD6E8FEB86659FD93)
_MULTIPLIER_2 = np.uint64(0xA0761D6478BD642F)
_SHIFT_32 = np.uint64(32)


def get_rank_slots(total: int, rank: int, world: int) -> tuple[int, int]:
    """Returns the slots [low, high) of `total` that belong to `rank` of `world`; sizes differ by at most one."""
    return rank * total // world, (rank + 1) * total // world


def permute(x: UInt64, n: int, key: int, salt: UInt64 | None = None) -> UInt64:
    """Returns the image of each x under the pseudo-random permutation of [0, n) that `key` selects.

    Args:
        x: uint64 of shape [k], each below n.
        n: size of the permuted range, 1 to 2^62.
        key: 64 bits.
        salt: uint64 of shape [k]; each value selects another permutation.

    Returns:
        uint64 of shape [k].
    """
    return _walk_cycle(_apply_feistel, x, n, key, salt)


def unpermute(y: UInt64, n: int, key: int, salt: UInt64 | None = None) -> UInt64:
    """Returns the x of each y = permute(x, n, key, salt): the inverse of `permute`."""
    return _walk_cycle(_invert_feistel, y, n, key, salt)


def _walk_cycle(feistel: Callable[..., UInt64], x: UInt64, n: int, key: int, salt: UInt64 | None) -> UInt64:
    # The smallest near-square a x b that holds n values.
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    image = feistel(x, a, b, key, salt)
    outside = np.flatnonzero(image >= np.uint64(n))
    # About one in sqrt(n) leaves the range, since a * b < n + sqrt(n) + 1. It follows its cycle back into the range.
    while outside.size:
        image[outside] = feistel(image[outside], a, b, key, None if salt is None else salt[outside])
        outside = outside[image[outside] >= np.uint64(n)]
    return image


def _apply_feistel(x: UInt64, a: int, b: int, key: int, salt: UInt64 | None) -> UInt64:
    size = (np.uint64(a), np.uint64(b))
    halves = [x // size[1], x % size[1]]
    for round in range(count_rounds(a * b)):
        target = round & 1
        halves[target] = halves[target] + _draw_round(halves[1 - target], size[target], round, key, salt)
        np.subtract(halves[target], size[target], out=halves[target], where=halves[target] >= size[target])
    return halves[0] * size[1] + halves[1]


def _invert_feistel(y: UInt64, a: int, b: int, key: int, salt: UInt64 | None) -> UInt64:
    size = (np.uint64(a), np.uint64(b))
    halves = [y // size[1], y % size[1]]
    # The rounds of `_apply_feistel` in reverse, each subtracted instead of added.
    for round in reversed(range(count_rounds(a * b))):
        target = round & 1
        halves[target] = halves[target] + (
            size[target] - _draw_round(halves[1 - target], size[target], round, key, salt)
        )
        np.subtract(halves[target], size[target], out=halves[target], where=halves[target] >= size[target])
    return halves[0] * size[1] + halves[1]


def _draw_round(half: UInt64, size: np.uint64, round: int, key: int, salt: UInt64 | None) -> UInt64:
    """Computes the round function: the number below `size` that a round adds to one half, from the other half."""
    word = half * _MULTIPLIER_1 + np.uint64(mix_int(key + (round + 1) * GOLDEN) & MASK)
    if salt is not None:
        word += salt
    word ^= word >> _SHIFT_32
    word *= _MULTIPLIER_2
    word ^= word >> _SHIFT_32
    word *= _MULTIPLIER_1
    # Multiply-high maps 32 random bits to [0, size) uniformly, without a division.
    return ((word >> _SHIFT_32) * size) >> _SHIFT_32


@dataclass(frozen=True)
class Order:
    """The order in which a run serves its samples.

    Args:
        samples: size n of the data set, at least 1.
        seed: the run's seed.
        window: samples that are shuffled together; None: all. A smaller window permutes blocks of window / 8
            neighbours, then the samples inside each window, so that a disk reads nearly sequentially. The blocks begin
            at another place in each epoch.

    Raises:
        UsageError: n or the window is below 1.
    """

    samples: int
    seed: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("an order over an empty data set", fix="Give a data set of 1 sample or more.")
        if self.window is not None and self.window < 1:
            raise UsageError(f"a window of {self.window} samples", fix="Leave it out, or set 1 or more.")

    def for_worker(self, worker: int) -> Order:
        """Returns the order by which one of several workers reads at random from the whole data set.

        Each worker shuffles the whole set by itself, anew in each epoch, and serves its own positions of the run by
        that. So an epoch of w workers serves some samples several times and misses a share (1 - 1/w)^w of them, 25 %
        of two workers and 37 % of many. Worker 0 has this order itself.
        """
        # The seed of the keys too: two workers that read a sample in one epoch augment it differently.
        return self if worker == 0 else replace(self, seed=mix_int(mix_int(self.seed) - worker * GOLDEN))

    def __call__(self, positions: Int64) -> tuple[Int64, Int64]:
        """Returns (epoch, sample) of each position; int64 arrays of the shape [k] of `positions`."""
        positions = np.asarray(positions, np.int64).reshape(-1)
        epochs, slots = np.divmod(positions, self.samples)
        samples = np.empty_like(slots)
        # Every epoch has its own key; a batch spans one or two of them.
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            samples[in_epoch] = self._permute_epoch(int(epoch), slots[in_epoch].astype(np.uint64)).astype(np.int64)
        return epochs, samples

    def find_positions(self, epoch: int, samples: Int64) -> Int64:
        """Finds the position of each sample in an epoch, the inverse of a call; int64 of the shape [k] of `samples`."""
        sample_ids = np.asarray(samples, np.int64).reshape(-1).astype(np.uint64)
        return self._unpermute_epoch(epoch, sample_ids).astype(np.int64) + epoch * self.samples

    def _permute_epoch(self, epoch: int, slots: UInt64) -> UInt64:
        key = mix_int(mix_int(self.seed) + (epoch + 1) * GOLDEN)
        if self.window is None or self.window >= self.samples:
            return permute(slots, self.samples, key)
        window_slots = self._permute_windows(permute, slots, self.window, key)
        block_slots = self._permute_blocks(permute, window_slots, self.window, key)
        return (block_slots + self._compute_shift(key)) % np.uint64(self.samples)

    def _unpermute_epoch(self, epoch: int, samples: UInt64) -> UInt64:
        key = mix_int(mix_int(self.seed) + (epoch + 1) * GOLDEN)
        if self.window is None or self.window >= self.samples:
            return unpermute(samples, self.samples, key)
        num_samples = np.uint64(self.samples)
        window_slots = self._permute_blocks(
            unpermute, (samples + (num_samples - self._compute_shift(key))) % num_samples, self.window, key
        )
        return self._permute_windows(unpermute, window_slots, self.window, key)

    def _compute_shift(self, key: int) -> np.uint64:
        # Blocks begin at another offset in each epoch, so that neighbours do not always share one.
        return np.uint64(mix_int(key + 3) % self.samples)

    def _permute_windows(self, permute_range: Callable[..., UInt64], slots: UInt64, window: int, key: int) -> UInt64:
        """Applies `permute_range` (`permute` or `unpermute`) inside each window; the last window may be shorter."""
        permuted = np.empty_like(slots)
        window_index = slots // np.uint64(window)
        num_full_windows = self.samples // window
        is_full = window_index < np.uint64(num_full_windows)
        for mask, size in ((is_full, window), (~is_full, self.samples - num_full_windows * window)):
            if mask.any():
                start = window_index[mask] * np.uint64(window)
                permuted[mask] = start + permute_range(slots[mask] - start, size, mix_int(key + 1), window_index[mask])
        return permuted

    def _permute_blocks(self, permute_range: Callable[..., UInt64], slots: UInt64, window: int, key: int) -> UInt64:
        """Applies `permute_range` (`permute` or `unpermute`) to the blocks of the set."""
        block_size = -(-window // BLOCKS_PER_WINDOW)
        num_blocks = self.samples // block_size
        block_index, offset = np.divmod(slots, np.uint64(block_size))
        # The short last block stays last; the epoch's shift moves it.
        is_full = block_index < np.uint64(num_blocks)
        permuted = slots.copy()
        permuted[is_full] = (
            permute_range(block_index[is_full], num_blocks, mix_int(key + 2)) * np.uint64(block_size) + offset[is_full]
        )
        return permuted
