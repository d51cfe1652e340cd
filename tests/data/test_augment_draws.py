from __future__ import annotations

import random
from math import exp, log, sqrt

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.random_keys import draw_words, make_keys
from headway.data.augment_draws import (
    compute_kept_area,
    draw_cutmix_boxes,
    draw_cutout_boxes,
    draw_erasing_boxes,
    draw_factors,
    draw_partners,
    draw_symmetric_beta,
)
from headway.data.random_streams import STREAM_CUTOUT

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)
sizes = st.tuples(st.integers(1, 300), st.integers(1, 300))
COUNT = 20_000
KEYS = make_keys(11, 0, np.arange(COUNT))


@pytest.mark.parametrize("alpha", [0.01, 0.2, 0.5, 1.0, 1.5, 8.0, 300.0])
def test_beta_variates_have_the_beta_distribution(alpha: float) -> None:
    drawn = draw_symmetric_beta(KEYS, alpha)
    assert ((drawn >= 0) & (drawn <= 1)).all()
    expected = scipy.stats.beta(alpha, alpha)
    assert scipy.stats.kstest(drawn[drawn < 0.5], lambda value: 2 * expected.cdf(value)).pvalue > 1e-3
    assert abs((drawn < 0.5).mean() - 0.5) < 4 * 0.5 / COUNT**0.5
    if alpha >= 0.2:  # of less, a third lies nearer to 1 than a double can tell
        assert scipy.stats.kstest(drawn, expected.cdf).pvalue > 1e-3


def test_an_alpha_of_0_is_refused() -> None:
    for alpha in (0.0, -1.0, float("nan")):
        with pytest.raises(UsageError, match="Give a number above 0"):
            draw_symmetric_beta(KEYS[:3], alpha)


@pytest.mark.parametrize(("spread", "low", "high"), [(0.4, 0.6, 1.4), (1.0, 0.0, 2.0), (2.5, 0.0, 3.5)])
def test_factors_are_uniform_around_1_and_never_negative(spread: float, low: float, high: float) -> None:
    drawn = draw_factors(KEYS, 9, spread)
    assert scipy.stats.kstest(drawn, scipy.stats.uniform(low, high - low).cdf).pvalue > 1e-3


@quick
@given(size=sizes, side=st.integers(1, 400), seed=seeds)
def test_a_cutout_is_a_square_around_a_pixel_cut_off_at_the_border(size: tuple[int, int], side: int, seed: int) -> None:
    height, width = size
    left, top, w, h = draw_cutout_boxes(make_keys(seed, 0, np.arange(50)), side, size).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (left + w <= width).all()
    assert (top + h <= height).all()
    assert (w <= side).all()
    assert (w[(left > 0) & (left + w < width)] == side).all()  # not at the border: whole
    assert (h[(top > 0) & (top + h < height)] == side).all()
    assert (w >= min(-(-side // 2), width)).all()  # its middle lies in the image
    assert (h >= min(-(-side // 2), height)).all()


@quick
@given(size=st.tuples(st.integers(1, 2**20), st.integers(1, 2**20)), seed=seeds)
def test_a_pixel_is_drawn_by_the_two_halves_of_a_word(size: tuple[int, int], seed: int) -> None:
    """In whole numbers: half * side / 2^32."""
    key = make_keys(seed, 0, np.arange(50))
    left, top, _, _ = draw_cutout_boxes(key, 1, size).T
    drawn = [int(word) for word in draw_words(key, STREAM_CUTOUT)]
    assert left.tolist() == [(word >> 32) * size[1] >> 32 for word in drawn]
    assert top.tolist() == [(word % 2**32) * size[0] >> 32 for word in drawn]


def test_every_pixel_is_cut_out_equally_often_but_at_the_border() -> None:
    left, top, w, h = draw_cutout_boxes(KEYS, 1, (6, 9)).T
    assert (w * h == 1).all()
    assert scipy.stats.chisquare(np.bincount(top * 9 + left, minlength=54)).pvalue > 1e-3


def torchvisions_erasing(height: int, width: int, p: float) -> list[int]:
    """RandomErasing's algorithm for one image, with Python's generator."""
    if random.random() >= p:
        return [0, 0, 0, 0]
    for _ in range(10):
        area = height * width * random.uniform(0.02, 0.33)
        aspect = exp(random.uniform(log(0.3), log(3.3)))
        h, w = round(sqrt(area * aspect)), round(sqrt(area / aspect))
        if h < height and w < width:
            return [random.randint(0, width - w), random.randint(0, height - h), w, h]
    return [0, 0, 0, 0]


@pytest.mark.parametrize("size", [(32, 32), (64, 224), (300, 12)])
def test_erased_boxes_are_distributed_as_torchvisions(size: tuple[int, int]) -> None:
    random.seed(1)
    theirs = np.array([torchvisions_erasing(*size, 0.7) for _ in range(COUNT)])
    ours = draw_erasing_boxes(KEYS, size, p=0.7)
    for column in range(4):
        assert scipy.stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    share = (ours[:, 2] > 0).mean(), (theirs[:, 2] > 0).mean()
    assert abs(share[0] - share[1]) < 4 * (0.5 / COUNT) ** 0.5
    assert (ours[:, :2] + ours[:, 2:] <= size[::-1]).all()


def test_an_image_too_small_to_erase_stays() -> None:
    assert (draw_erasing_boxes(KEYS[:100], (1, 1), p=1.0)[:, 2:].prod(axis=1) == 0).all()


@quick
@given(b=st.integers(1, 60), seed=seeds, data=st.data())
def test_partners_are_one_cycle_that_depends_on_the_keys_alone(b: int, seed: int, data: st.DataObject) -> None:
    key = make_keys(seed, 0, np.arange(b))
    partner = draw_partners(key)
    place, seen = 0, set()
    for _ in range(b):
        seen.add(place)
        place = int(partner[place])
    assert place == 0
    assert seen == set(range(b))
    order = np.array(data.draw(st.permutations(range(b))))
    assert (key[order][draw_partners(key[order])] == key[partner][order]).all()


@quick
@given(size=sizes, seed=seeds)
def test_a_cutmix_box_lies_inside_and_its_share_is_the_true_one(size: tuple[int, int], seed: int) -> None:
    key = make_keys(seed, 0, np.arange(40))
    share = draw_symmetric_beta(key, 1.0)
    boxes = draw_cutmix_boxes(key, share, size)
    left, top, w, h = boxes.T
    assert (boxes >= 0).all()
    assert (left + w <= size[1]).all()
    assert (top + h <= size[0]).all()
    kept = compute_kept_area(boxes, size)
    assert kept == pytest.approx(1 - w * h / (size[0] * size[1]))
    assert (kept >= share - 1e-12).all()  # rounded down, and cut off at the border
    assert (draw_cutmix_boxes(key, np.ones(40), size)[:, 2:] == 0).all()
    inside = (left > 0) & (top > 0) & (left + w < size[1]) & (top + h < size[0])
    assert (w[inside] == np.floor(size[1] * np.sqrt(1 - share[inside]))).all()


def test_the_middle_of_a_cutmix_box_is_a_uniform_pixel() -> None:
    left, top, w, h = draw_cutmix_boxes(KEYS, np.full(COUNT, 1 - (4 / 9) ** 2), (9, 9)).T  # 4 x 4, its middle at 2
    for first, side in ((left, w), (top, h)):
        assert set(side) == {2, 3, 4}
        assert scipy.stats.chisquare(np.bincount(first), COUNT / 9 * np.array([3, 1, 1, 1, 1, 1, 1])).pvalue > 1e-3


@quick
@given(seed=seeds, data=st.data())
def test_what_is_drawn_for_a_sample_depends_on_its_key_alone(seed: int, data: st.DataObject) -> None:
    key = make_keys(seed, 2, np.arange(30))
    order = np.array(data.draw(st.permutations(range(30))))[: data.draw(st.integers(1, 30))]
    share = draw_symmetric_beta(key, 0.4)
    for draw in (
        lambda k: draw_symmetric_beta(k, 0.4),
        lambda k: draw_factors(k, 9, 0.4),
        lambda k: draw_cutout_boxes(k, 5, (20, 30)),
        lambda k: draw_erasing_boxes(k, (20, 30), p=0.5),
    ):
        assert (draw(key[order]) == draw(key)[order]).all()
    assert (
        draw_cutmix_boxes(key[order], share[order], (20, 30)) == draw_cutmix_boxes(key, share, (20, 30))[order]
    ).all()
