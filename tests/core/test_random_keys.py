from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.random_keys import MASK, UInt64, draw_integers, draw_uniform, draw_words, make_keys, mix, mix_int

COUNT = 200_000
words64 = st.integers(0, MASK)
seeds = st.integers(0, 2**63 - 1)
numbers = st.integers(0, 2**62)


def many(seed: int = 0, epoch: int = 0, view: int = 0, count: int = COUNT) -> UInt64:
    return make_keys(seed, epoch, np.arange(count), view)


def undone(word: int) -> int:
    """The inverse of `mix`, by its steps backwards."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        out = word
        for _ in range(64 // shift):
            out = word ^ (out >> shift)
        word = out * pow(factor, -1, 1 << 64) & MASK
    return word


@given(st.lists(words64, max_size=20))
def test_mix_is_a_bijection_and_the_same_for_an_array_and_a_number(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    mixed = mix(array)
    assert mixed.tolist() == [mix_int(value) for value in values]
    assert [undone(value) for value in mixed.tolist()] == values
    assert array.tolist() == values  # the argument stays as it was


@given(st.integers())
def test_mix_int_takes_any_integer_modulo_2_to_the_64(value: int) -> None:
    assert mix_int(value) == mix_int(value & MASK) <= MASK


def test_mix_is_the_finaliser_of_splitmix64() -> None:
    # The first numbers of SplitMix64 from seed 1234567, as its authors' and Java's implementations give them.
    golden = 0x9E3779B97F4A7C15
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [mix_int(1234567 + step * golden) for step in range(1, 5)] == expected


def test_each_bit_moves_half_of_the_bits() -> None:
    words_before = np.random.default_rng(1).integers(0, 2**64, 2000, np.uint64)
    for bit in range(64):
        moved = mix(words_before) ^ mix(words_before ^ np.uint64(1 << bit))
        assert abs(np.bitwise_count(moved).mean() - 32) < 0.5, bit


@given(seed=seeds, epoch=numbers, view=st.integers(0, 9), samples=st.lists(numbers, min_size=1), data=st.data())
def test_a_key_does_not_depend_on_its_batch(
    seed: int, epoch: int, view: int, samples: list[int], data: st.DataObject
) -> None:
    whole = make_keys(seed, epoch, samples, view)
    assert whole.dtype == np.uint64
    assert whole.shape == (len(samples),)
    order = data.draw(st.permutations(range(len(samples))))
    some = order[: data.draw(st.integers(1, len(samples)))]
    assert (make_keys(seed, [epoch] * len(some), np.array(samples)[some], view) == whole[some]).all()
    assert make_keys(seed, epoch, samples[some[0]], view) == whole[some[:1]]


@given(seed=seeds, epoch=st.integers(0, 10**6), sample=st.integers(0, 10**9), view=st.integers(0, 9))
def test_seed_epoch_sample_and_view_each_make_another_key(seed: int, epoch: int, sample: int, view: int) -> None:
    variants = [(seed, epoch, sample, view), (seed + 1, epoch, sample, view), (seed, epoch + 1, sample, view),
                (seed, epoch, sample + 1, view), (seed, epoch, sample, view + 1)]  # fmt: skip
    assert len({int(make_keys(a, b, c, d)[0]) for a, b, c, d in variants}) == len(variants)


def test_neighbours_share_no_key() -> None:
    """Seeds, epochs, views and samples near each other: all 320,000 keys differ."""
    found = [many(seed, epoch, view, 5000) for seed in range(4) for epoch in range(4) for view in range(4)]
    assert len(np.unique(np.concatenate(found))) == 4 * 4 * 4 * 5000


@given(st.lists(words64, min_size=1, max_size=20), st.integers(0, 2000))
def test_numbers_lie_within_their_bounds(values: list[int], stream: int) -> None:
    key = np.array(values, np.uint64)
    drawn = draw_uniform(key, stream)
    assert drawn.dtype == np.float64
    assert ((drawn >= 0) & (drawn < 1)).all()
    for low, high in ((0, 1), (-4, 5), (3, 2**31), (-(2**31), 2**31 - 1)):
        whole = draw_integers(key, stream, low, high)
        assert whole.dtype == np.int64
        assert ((whole >= low) & (whole < high)).all()


def test_the_greatest_word_stays_below_1() -> None:
    key = np.array([undone(MASK)], np.uint64)
    assert draw_words(key, 0) == MASK
    assert draw_uniform(key, 0)[0] == 1 - 2**-53
    assert draw_integers(key, 0, -4, 5)[0] == 4


@pytest.mark.parametrize("stream", [0, 1, 2, 1000])
def test_uniform_numbers_are_uniform(stream: int) -> None:
    drawn = draw_uniform(many(seed=3, epoch=1), stream)
    assert abs(drawn.mean() - 0.5) < 4 * (1 / 12 / COUNT) ** 0.5
    assert abs(drawn.var() - 1 / 12) < 4 * (1 / 180 / COUNT) ** 0.5
    counts = np.bincount((drawn * 100).astype(int), minlength=100)
    assert chi_square(counts) < 99 + 4 * (2 * 99) ** 0.5


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-4, 5), (10, 17), (0, 1000)])
def test_integers_are_uniform(low: int, high: int) -> None:
    counts = np.bincount(draw_integers(many(seed=5), 7, low, high) - low, minlength=high - low)
    free = high - low - 1
    assert len(counts) == high - low
    assert chi_square(counts) < free + 4 * (2 * free) ** 0.5


# (key of the left number, stream) and (key of the right one, stream); samples are a slice of all.
ALL, FIRST, LAST = slice(None), slice(None, -1), slice(1, None)
PAIRS: dict[str, tuple[tuple[dict[str, int], int, slice], tuple[dict[str, int], int, slice]]] = {
    "streams": (({}, 1, ALL), ({}, 2, ALL)),
    "views": (({}, 1, ALL), ({"view": 1}, 1, ALL)),
    "epochs": (({}, 1, ALL), ({"epoch": 1}, 1, ALL)),
    "seeds": (({}, 1, ALL), ({"seed": 1}, 1, ALL)),
    "samples": (({}, 1, FIRST), ({}, 1, LAST)),
    # both numbers of a pair step by the same constant
    "views and streams": (({}, 2, ALL), ({"view": 1}, 1, ALL)),
    "epochs and samples": (({}, 1, LAST), ({"epoch": 1}, 1, FIRST)),
}


@pytest.mark.parametrize("what", PAIRS)
def test_numbers_that_differ_in_one_thing_are_independent(what: str) -> None:
    left, right = (draw_uniform(many(**of), stream)[part] for of, stream, part in PAIRS[what])
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / COUNT**0.5
    cells = np.bincount((left * 10).astype(int) * 10 + (right * 10).astype(int), minlength=100)
    assert chi_square(cells) < 99 + 4 * (2 * 99) ** 0.5


def chi_square(counts: np.ndarray) -> float:
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())
