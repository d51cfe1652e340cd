from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.core.errors import UsageError
from headway.core.keys import UInt64, integers, keys, uniform
from headway.data.augment import STREAM_DOWN, STREAM_FLIP, STREAM_RIGHT, Augment, flip_and_translate, measure
from headway.data.options import AugmentRecipe

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)
RECIPE = AugmentRecipe(flip=True, translate=2, mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))


def some(b: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (b, height, width, channels), dtype=torch.uint8, generator=generator)


def reference(image: torch.Tensor, key: UInt64, flip: bool, translate: int) -> np.ndarray:
    """One image, slowly: mirrored, then cut out of itself with a reflected border."""
    out = image.numpy()
    if flip and uniform(key, STREAM_FLIP)[0] < 0.5:
        out = out[:, ::-1]
    down = int(integers(key, STREAM_DOWN, -translate, translate + 1)[0])
    right = int(integers(key, STREAM_RIGHT, -translate, translate + 1)[0])
    padded = np.pad(out, ((translate, translate), (translate, translate), (0, 0)), mode="reflect")
    height, width = out.shape[:2]
    top, left = translate + down, translate + right
    return padded[top : top + height, left : left + width]


@quick
@given(
    b=st.integers(1, 6),
    sides=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels=st.sampled_from([1, 3]),
    flip=st.booleans(),
    seed=seeds,
    data=st.data(),
)
def test_flip_and_translate_do_what_a_slow_reference_does(
    b: int, sides: tuple[int, int], channels: int, flip: bool, seed: int, data: st.DataObject
) -> None:
    translate = data.draw(st.integers(0, min(sides) - 1))
    images, key = some(b, *sides, channels, seed), keys(seed, 0, np.arange(b))
    before = images.clone()
    out = flip_and_translate(images, key, flip=flip, translate=translate)
    assert out.dtype == torch.uint8
    assert out.shape == images.shape
    assert out.is_contiguous()
    for place in range(b):
        assert (out[place].numpy() == reference(images[place], key[place : place + 1], flip, translate)).all()
    assert (images == before).all()
    assert out.data_ptr() != images.data_ptr()


@quick
@given(b=st.integers(1, 40), seed=seeds)
def test_a_flip_undoes_itself(b: int, seed: int) -> None:
    images, key = some(b, 4, 5), keys(seed, 1, np.arange(b))
    once = flip_and_translate(images, key, flip=True, translate=0)
    assert (flip_and_translate(once, key, flip=True, translate=0) == images).all()
    mirrored = uniform(key, STREAM_FLIP) < 0.5
    assert (once[mirrored] == images[mirrored].flip(2)).all()
    assert (once[~mirrored] == images[~mirrored]).all()


def test_half_of_the_samples_are_flipped_and_every_shift_comes_equally_often() -> None:
    b, translate = 20_000, 2
    rows, columns = np.mgrid[0:6, 0:6].astype(np.uint8)
    image = torch.from_numpy(np.stack([rows, columns, columns * 0], axis=-1)[None])
    out = flip_and_translate(image.expand(b, -1, -1, -1), keys(3, 0, np.arange(b)), flip=True, translate=translate)
    centre = out[:, 2:4, 2:4].int()  # away from the border nothing is reflected
    assert (centre[:, 1, :, 0] - centre[:, 0, :, 0] == 1).all()
    flipped = centre[:, 0, 1, 1] < centre[:, 0, 0, 1]
    assert abs(flipped.float().mean().item() - 0.5) < 4 * 0.5 / b**0.5
    down = centre[:, 0, 0, 0] - 2
    right = torch.where(flipped, 3 - centre[:, 0, 0, 1], centre[:, 0, 0, 1] - 2)
    counts = torch.bincount((down + 2) * 5 + right + 2, minlength=25).double()
    assert len(counts) == 25  # within bounds
    assert ((counts - b / 25) ** 2 / (b / 25)).sum() < 24 + 4 * (2 * 24) ** 0.5


@quick
@given(seed=seeds, data=st.data())
def test_what_happens_to_a_sample_depends_on_its_key_alone(seed: int, data: st.DataObject) -> None:
    images, key = some(12, 7, 9, seed=seed), keys(seed, 2, np.arange(12))
    whole = flip_and_translate(images, key, flip=True, translate=3)
    order = data.draw(st.permutations(range(12)))[: data.draw(st.integers(1, 12))]
    assert (flip_and_translate(images[order], key[order], flip=True, translate=3) == whole[order]).all()


def test_any_type_of_pixels_is_moved() -> None:
    images, key = some(5, 6, 6), keys(0, 0, np.arange(5))
    moved = flip_and_translate(images, key, flip=True, translate=2)
    assert (flip_and_translate(images.float(), key, flip=True, translate=2) == moved.float()).all()
    assert len(flip_and_translate(images[:0], key[:0], flip=True, translate=2)) == 0


@pytest.mark.parametrize(("size", "translate"), [((4, 9), 4), ((9, 4), 5), ((1, 1), 1)])
def test_a_shift_as_large_as_the_image_is_refused(size: tuple[int, int], translate: int) -> None:
    with pytest.raises(UsageError, match=f"images of {size[0]} x {size[1]} pixels cannot be moved by {translate}"):
        flip_and_translate(some(2, *size), keys(0, 0, [0, 1]), flip=False, translate=translate)


# Augment


@pytest.mark.parametrize("channels", [1, 3])
def test_the_output_is_normalised_and_lies_channels_last(channels: int) -> None:
    images = some(6, 5, 7, channels)
    mean, std = measure(images)
    out = Augment(AugmentRecipe(mean=mean, std=std), "cpu")(images)
    assert out.dtype == torch.float32
    assert out.shape == (6, channels, 5, 7)
    assert out.is_contiguous(memory_format=torch.channels_last)
    contiguous = Augment(AugmentRecipe(mean=mean, std=std), "cpu", channels_last=False)(images)
    assert contiguous.is_contiguous()
    assert (contiguous == out).all()
    for channel in range(channels):
        expected = (images[..., channel].double() - mean[channel]) / std[channel]
        torch.testing.assert_close(out[:, channel].double(), expected, rtol=1e-6, atol=1e-6)
    assert out.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    assert (out.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-4


def test_only_batches_with_keys_are_moved() -> None:
    augment, images, key = Augment(RECIPE, "cpu"), some(6, 8, 8), keys(0, 0, np.arange(6))
    assert augment.random
    moved = flip_and_translate(images, key, flip=True, translate=2)
    assert (augment(images, key) == augment(moved)).all()
    assert (augment(images, key) != augment(images)).any()
    plain = Augment(RECIPE.model_copy(update={"flip": False, "translate": 0}), "cpu")
    assert not plain.random
    assert (plain(images, key) == augment(images)).all()
    assert Augment(RECIPE.model_copy(update={"flip": False}), "cpu").random
    assert Augment(RECIPE.model_copy(update={"translate": 0}), "cpu").random


@pytest.mark.parametrize("unknown", [{"mean": "auto"}, {"std": "auto"}])
def test_statistics_have_to_be_known(unknown: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="mean and std are not known"):
        Augment(RECIPE.model_copy(update=unknown), "cpu")


def test_statistics_are_measured_by_channel() -> None:
    images = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    images[:2, ..., 0] = 200
    images[..., 1] = 50
    images[0, 0, 0, 2] = 255
    assert measure(images) == ((100.0, 50.0, 15.9375), (100.0, 1.0, round(255 * (15 / 256) ** 0.5, 4)))
    large = some(64, 32, 32)
    mean, std = measure(large)
    assert mean == pytest.approx(large.double().mean(dim=(0, 1, 2)).tolist(), abs=1e-4)
    assert std == pytest.approx(large.double().std(dim=(0, 1, 2)).tolist(), rel=1e-4)
