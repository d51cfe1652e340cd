from __future__ import annotations

import math
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.core.errors import UsageError
from headway.core.random_keys import draw_uniform, make_keys
from headway.data.crops import draw_flips, draw_random_resized_boxes, draw_shifts
from headway.data.data_recipe import CropRecipe
from headway.data.random_streams import STREAM_FLIP

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)
sides = st.integers(1, 3000)
ranges = st.tuples(st.floats(0.01, 1), st.floats(0.01, 1)).map(lambda pair: (min(pair), max(pair)))


def boxes_of(count: int, width: int, height: int, seed: int = 0, **options: Any) -> np.ndarray:
    full = np.ones(count, np.uint32)
    return draw_random_resized_boxes(make_keys(seed, 0, np.arange(count)), full * width, full * height, **options)


@quick
@given(
    shapes=st.lists(st.tuples(sides, sides), min_size=1, max_size=40),
    seed=seeds,
    scale=ranges,
    ratio=ranges,
    attempts=st.integers(1, 12),
)
def test_boxes_are_whole_and_lie_inside_the_image(
    shapes: list[tuple[int, int]],
    seed: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    attempts: int,
) -> None:
    width, height = np.array(shapes, np.uint32).T
    key = make_keys(seed, 0, np.arange(len(shapes)))
    boxes = draw_random_resized_boxes(key, width, height, scale=scale, ratio=ratio, attempts=attempts)
    assert boxes.dtype == np.float32
    assert boxes.shape == (len(shapes), 4)
    assert (boxes == np.floor(boxes)).all()
    left, top, box_w, box_h = boxes.astype(np.int64).T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (box_w >= 1).all()
    assert (box_h >= 1).all()
    assert (left + box_w <= width).all()
    assert (top + box_h <= height).all()


@quick
@given(seed=seeds, data=st.data())
def test_a_box_depends_on_its_key_and_image_alone(seed: int, data: st.DataObject) -> None:
    generator = np.random.default_rng(seed)
    width, height = generator.integers(1, 900, (2, 60)).astype(np.uint32)
    key = make_keys(seed, 3, np.arange(60))
    whole = draw_random_resized_boxes(key, width, height)
    order = np.array(data.draw(st.permutations(range(60))))[: data.draw(st.integers(1, 60))]
    assert (draw_random_resized_boxes(key[order], width[order], height[order]) == whole[order]).all()


def torchvisions(width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]) -> list[int]:
    """RandomResizedCrop's algorithm for one image, with Python's generator."""
    for _ in range(10):
        area = width * height * random.uniform(*scale)
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return [random.randint(0, width - w), random.randint(0, height - h), w, h]
    if width / height < ratio[0]:
        w, h = width, round(width / ratio[0])
    elif width / height > ratio[1]:
        w, h = round(height * ratio[1]), height
    else:
        w, h = width, height
    return [(width - w) // 2, (height - h) // 2, w, h]


@pytest.mark.check
@pytest.mark.parametrize(
    ("width", "height", "scale", "ratio"),
    [
        (500, 375, (0.08, 1.0), (3 / 4, 4 / 3)),
        (32, 32, (0.08, 1.0), (3 / 4, 4 / 3)),
        (900, 120, (0.08, 1.0), (3 / 4, 4 / 3)),  # the first attempt fails more often than not
        (40, 400, (0.35, 1.0), (3 / 4, 4 / 3)),  # all of them do
        (33, 48, (0.25, 0.25), (1.0, 1.0)),
    ],
)
@pytest.mark.thin(2)
def test_boxes_are_distributed_as_torchvisions(
    width: int, height: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    count = 6000
    random.seed(4)
    theirs = np.array([torchvisions(width, height, scale, ratio) for _ in range(count)])
    ours = boxes_of(count, width, height, seed=9, scale=scale, ratio=ratio).astype(np.float64)
    for column in range(4):
        assert scipy.stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > 1e-3
    assert scipy.stats.ks_2samp(ours[:, 2] / ours[:, 3], theirs[:, 2] / theirs[:, 3]).pvalue > 1e-3
    assert scipy.stats.ks_2samp(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]).pvalue > 1e-3


def test_area_and_ratio_place_and_size_are_drawn_apart() -> None:
    left, top, w, h = boxes_of(40_000, 4000, 4000, seed=2, scale=(0.2, 0.4)).astype(np.float64).T
    assert scipy.stats.kstest(w * h / 4000**2, scipy.stats.uniform(0.2, 0.2).cdf).pvalue > 1e-3
    assert (
        scipy.stats.kstest(np.log(w / h), scipy.stats.uniform(math.log(3 / 4), 2 * math.log(4 / 3)).cdf).pvalue > 1e-3
    )
    across, down = left / (4000 - w), top / (4000 - h)
    for place in (across, down):
        assert scipy.stats.kstest(place, scipy.stats.uniform.cdf).pvalue > 1e-3
    columns = np.stack([w * h, w / h, across, down])
    assert np.abs(np.corrcoef(columns) - np.eye(4)).max() < 4 / 40_000**0.5


@pytest.mark.parametrize(
    ("size", "ratio", "expected"),
    [((10, 400), (3 / 4, 4 / 3), [0, 193, 10, 13]), ((400, 10), (3 / 4, 4 / 3), [193, 0, 13, 10])],
)
def test_where_no_attempt_fits_the_box_is_centred(
    size: tuple[int, int], ratio: tuple[float, float], expected: list[int]
) -> None:
    boxes = boxes_of(20, *size, scale=(1.0, 1.0), ratio=ratio)
    assert (boxes == expected).all()


def test_impossible_ranges_are_refused() -> None:
    for options in ({"scale": (0.5, 0.1)}, {"scale": (0.0, 1.0)}, {"ratio": (-1.0, 1.0)}):
        with pytest.raises(UsageError, match=r"Give \(smallest, largest\), both above 0"):
            boxes_of(2, 10, 10, **options)
    for attempts in (0, 100):
        with pytest.raises(UsageError, match="Give 1 to 99"):
            boxes_of(2, 10, 10, attempts=attempts)


# Flips and shifts


def test_an_endless_ratio_is_refused_in_a_recipe() -> None:
    with pytest.raises(ValidationError, match=r"ratio\.1\n.*finite"):
        CropRecipe(name="random", ratio=(1.0, math.inf))


def test_an_alternating_flip_shows_each_sample_both_ways_in_two_epochs() -> None:
    samples = np.arange(1000)
    first = make_keys(7, 0, samples)
    by_epoch = [draw_flips(first, np.full(1000, epoch), "alternating") for epoch in range(5)]
    assert (by_epoch[0] == (draw_uniform(first, STREAM_FLIP) < 0.5)).all()
    assert (by_epoch[0] == draw_flips(first)).all()
    for before, after in pairwise(by_epoch):
        assert (before != after).all()
    mixed = draw_flips(first, samples % 5, "alternating")  # a step that spans epochs
    assert all(mixed[place] == by_epoch[place % 5][place] for place in samples)
    with pytest.raises(UsageError, match="Give epochs"):
        draw_flips(first, mode="alternating")


def test_random_flips_are_drawn_anew_in_each_epoch() -> None:
    by_epoch = np.stack([draw_flips(make_keys(7, epoch, np.arange(4000))) for epoch in range(4)])
    assert abs(by_epoch.mean() - 0.5) < 4 * 0.5 / by_epoch.size**0.5
    assert np.abs(np.corrcoef(by_epoch) - np.eye(4)).max() < 4 / 4000**0.5


def test_shifts_are_uniform_both_ways() -> None:
    drawn = draw_shifts(make_keys(3, 0, np.arange(50_000)), 2)
    assert drawn.shape == (50_000, 2)
    counts = np.bincount((drawn[:, 0] + 2) * 5 + drawn[:, 1] + 2, minlength=25)
    assert len(counts) == 25
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert (draw_shifts(make_keys(3, 0, np.arange(9)), 0) == 0).all()
