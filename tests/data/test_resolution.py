from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headway.core.errors import UsageError
from headway.data.resolution import ProgressiveRecipe, compute_progressive_size, describe_sizes, list_sizes


def test_the_ramp_of_the_imagenet_recipes() -> None:
    """160 to 192 over epochs 6 to 13 of 16, in steps of 32; the full size from there on."""
    recipe = ProgressiveRecipe(start=160, from_epoch=6, until_epoch=13)
    sides = [compute_progressive_size(recipe, (192, 192), epoch)[0] for epoch in range(16)]
    assert sides == [160] * 10 + [192] * 6
    wider = ProgressiveRecipe(start=128, until_epoch=4)
    assert [compute_progressive_size(wider, (224, 224), epoch)[0] for epoch in range(6)] == [
        128,
        160,
        192,
        192,
        224,
        224,
    ]
    finer = ProgressiveRecipe(start=128, until_epoch=4, step=8)
    assert [compute_progressive_size(finer, (224, 224), epoch)[0] for epoch in range(6)] == [
        128,
        152,
        176,
        200,
        224,
        224,
    ]


def test_the_sizes_that_a_run_meets_are_said() -> None:
    recipe = ProgressiveRecipe(start=128, until_epoch=4)
    said = "Training images are 128x128 from epoch 0, 160x160 from epoch 1, 192x192 from epoch 2, 224x224 from epoch 4."
    assert describe_sizes(list_sizes(recipe, (224, 224), 6)) == said
    assert list_sizes(recipe, (224, 224), 1.5) == [(0, (128, 128)), (1, (160, 160))]  # and no others
    fine = ProgressiveRecipe(start=32, until_epoch=100, step=1)
    many = describe_sizes(list_sizes(fine, (224, 224), 120))
    assert many.startswith("Training images are 32x32 from epoch 0, 34x34 from epoch 1,")
    assert ", 93 more, " in many
    assert many.endswith("224x224 from epoch 100.")


def test_halves_are_rounded_up_at_every_multiple() -> None:
    """6.5 and 7.5 steps of four pixels: rounding to even numbers would take one down and the other up."""
    recipe = ProgressiveRecipe(start=24, from_epoch=2, until_epoch=6, step=4)
    assert [compute_progressive_size(recipe, (32, 32), epoch)[0] for epoch in range(8)] == [24] * 3 + [28] * 2 + [
        32
    ] * 3


def test_the_end_is_the_full_size_even_where_it_is_no_multiple() -> None:
    recipe = ProgressiveRecipe(start=64, until_epoch=2)
    assert [compute_progressive_size(recipe, (100, 150), epoch) for epoch in (0, 1, 1.99, 2, 2.5)] == [
        (64, 96),
        (96, 128),
        (96, 150),
        (100, 150),
        (100, 150),
    ]


@given(
    full=st.tuples(st.integers(2, 400), st.integers(2, 400)),
    start=st.integers(1, 400),
    step=st.integers(1, 64),
    begin=st.floats(0, 50),
    length=st.floats(0.1, 50),
)
def test_sides_never_shrink_and_are_multiples_below_the_end(
    full: tuple[int, int], start: int, step: int, begin: float, length: float
) -> None:
    recipe = ProgressiveRecipe(start=start, from_epoch=begin, until_epoch=begin + length, step=step)
    if start >= min(full):
        with pytest.raises(UsageError, match="Set it to less than"):
            compute_progressive_size(recipe, full, 0)
        return
    sizes = [compute_progressive_size(recipe, full, epoch) for epoch in np.linspace(0, begin + length + 1, 40)]
    for side in (0, 1):
        sides = [size[side] for size in sizes]
        assert sides == sorted(sides)
        assert sides[-1] == full[side]
        assert all(1 <= value == full[side] or value % step == 0 for value in sides)
    first = compute_progressive_size(recipe, full, begin)
    assert sizes[0] == first
    assert abs(min(first) - start) <= max(step / 2, step - start)


def test_a_ramp_that_does_not_rise_is_refused() -> None:
    with pytest.raises(ValidationError, match="set until_epoch to more than from_epoch"):
        ProgressiveRecipe(from_epoch=5, until_epoch=5)
