"""Each batched operation against a plain one for a single image, written here or in Pillow."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps
from tests._waits import counted, waits_refused

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_integers, draw_uniform, make_keys
from headway.data.augment_draws import (
    draw_angles,
    draw_cutmix_boxes,
    draw_cutout_boxes,
    draw_erasing_boxes,
    draw_factors,
    draw_hue_shifts,
    draw_partners,
    draw_symmetric_beta,
)
from headway.data.crops import draw_flip_masks, draw_flips, draw_shifts
from headway.data.ops.colour import (
    adjust_brightness,
    adjust_contrast,
    adjust_saturation,
    adjust_sharpness,
    convert_to_gray,
    shift_hue,
)
from headway.data.ops.erase import erase, make_noise
from headway.data.ops.mix import apply_cutmix, apply_mixup, mix_labels
from headway.data.ops.move import flip_and_translate, warp
from headway.data.ops.rotate import rotate
from headway.data.ops.tone import autocontrast, equalize, posterize, solarize
from headway.data.upload import to_device

quick = settings(deadline=None, max_examples=60)
seeds = st.integers(0, 2**32)

Op = Callable[[torch.Tensor, UInt64], torch.Tensor]


def fill_of(images: torch.Tensor) -> torch.Tensor:
    return to_device(np.array([120, 110, 100, 90, 80][: images.shape[3]], np.uint8), images.device).to(images.dtype)


def size_of(images: torch.Tensor) -> tuple[int, int]:
    return images.shape[1], images.shape[2]


def some_matrices(key: UInt64) -> np.ndarray:
    drawn = np.stack([draw_uniform(key, 1000 + place) - 0.5 for place in range(6)], axis=1)
    return np.array([1.0, 0, 0, 0, 1, 0]) + drawn * [0.8, 0.8, 9, 0.8, 0.8, 9]


MOVING: dict[str, Op] = {
    "flip and translate": lambda x, k: flip_and_translate(
        x, draw_flips(k), draw_shifts(k, min(2, min(size_of(x)) - 1))
    ),
    "warp": lambda x, k: warp(x, some_matrices(k), fill_of(x)),
    "rotate": lambda x, k: rotate(x, draw_angles(k, 180, 0.8), fill_of(x)),
    "rotate reflected": lambda x, k: rotate(x, draw_angles(k, 180), None),
    "erase": lambda x, k: erase(x, draw_erasing_boxes(k, size_of(x), p=0.8), fill_of(x)),
    "cutout": lambda x, k: erase(x, draw_cutout_boxes(k, 3, size_of(x)), fill_of(x)),
    "erase by noise": lambda x, k: erase(x, draw_cutout_boxes(k, 3, size_of(x)), make_noise(x, k)),
}
BLENDING: dict[str, Op] = {
    "brightness": lambda x, k: adjust_brightness(x, draw_factors(k, 9, 0.9)),
    "contrast": lambda x, k: adjust_contrast(x, draw_factors(k, 10, 0.9)),
    "saturation": lambda x, k: adjust_saturation(x, draw_factors(k, 11, 0.9)),
    "sharpness": lambda x, k: adjust_sharpness(x, draw_factors(k, 12, 0.9)),
    "hue": lambda x, k: shift_hue(x, draw_hue_shifts(k, 0.5)),
}
OF_BYTES: dict[str, Op] = {
    "posterize": lambda x, k: posterize(x, draw_integers(k, 1000, 0, 9)),
    "solarize": lambda x, k: solarize(x, draw_uniform(k, 1000) * 255),
    "autocontrast": lambda x, k: autocontrast(x),
    "equalize": lambda x, k: equalize(x),
}
MIXING: dict[str, Op] = {
    "mixup": lambda x, k: apply_mixup(x, x.flip(0), draw_symmetric_beta(k, 0.2)),
    "cutmix": lambda x, k: apply_cutmix(x, x.flip(0), draw_cutmix_boxes(k, draw_symmetric_beta(k, 1.0), size_of(x))),
    "soft labels": lambda x, k: mix_labels(x[:, 0, 0, 0].long() % 5, draw_partners(k), draw_symmetric_beta(k, 1.0), 5),
}
ALONE = MOVING | BLENDING | OF_BYTES
EVERY = ALONE | MIXING


def some(b: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (b, height, width, channels), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def photographs(data_root: Path) -> torch.Tensor:
    """uint8 [8, 30, 40, 3]: real ones, and one of few colours."""
    files = sorted((data_root / "imagenet-250").rglob("*.JPEG"))[:7]
    assert len(files) == 7
    pixels = [np.asarray(Image.open(io.BytesIO(file.read_bytes())).convert("RGB").resize((40, 30))) for file in files]
    flat = np.full((30, 40, 3), (9, 200, 31), np.uint8)
    flat[4:9, 5:9] = (9, 201, 250)
    return torch.from_numpy(np.stack([*pixels, flat]))


def pictures(images: torch.Tensor) -> list[Image.Image]:
    return [Image.fromarray(image.numpy()) for image in images]


def assert_near(images: torch.Tensor, expected: list[Image.Image], most: int) -> None:
    for ours, theirs in zip(images.numpy(), expected, strict=True):
        assert np.abs(ours.astype(int) - np.asarray(theirs).astype(int)).max() <= most


# What holds for all


@pytest.mark.thin
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 1, 1, 3), (2, 1, 7, 3), (3, 5, 1, 1), (4, 9, 8, 1), (5, 6, 11, 3)])
def test_every_shape_is_served_and_the_input_stays(name: str, shape: tuple[int, int, int, int]) -> None:
    images, key = some(*shape), make_keys(5, 0, np.arange(shape[0]))
    before = images.clone()
    out = EVERY[name](images, key)
    assert (images == before).all()
    assert out.shape == ((shape[0], 5) if name == "soft labels" else shape)
    assert out.dtype == (torch.float32 if name in ("mixup", "soft labels") else torch.uint8)
    assert out.data_ptr() != images.data_ptr()
    assert len(EVERY[name](images[:0], key[:0])) == 0


@pytest.mark.parametrize("name", ALONE)
def test_a_sample_does_not_depend_on_the_others(name: str) -> None:
    images, key = some(9, 12, 10), make_keys(6, 0, np.arange(9))
    whole = ALONE[name](images, key)
    assert (torch.cat([ALONE[name](images[:4], key[:4]), ALONE[name](images[4:], key[4:])]) == whole).all()
    order = [7, 2, 3, 0]
    assert (ALONE[name](images[order], key[order]) == whole[order]).all()


@pytest.mark.parametrize("name", EVERY)
def test_nothing_waits_for_the_device(name: str) -> None:
    images, key = some(6, 9, 8), make_keys(2, 0, np.arange(6))
    with counted() as found:
        EVERY[name](images, key)
        assert found == {}
        assert images.max().item() > 0
    assert found["item"] == 1, "the counter does not see a wait"


@pytest.mark.parametrize("name", MOVING | BLENDING | {"cutmix": MIXING["cutmix"]})
def test_floats_are_served_as_bytes_are(name: str) -> None:
    images, key = some(7, 9, 8), make_keys(3, 0, np.arange(7))
    ours = EVERY[name](images.float(), key)
    assert ours.dtype == torch.float32
    off = (ours - EVERY[name](images, key).float()).abs().max()
    # Blends of bytes drop fractions, up to three times; a rotation drops 3 of 8 bits once, and rounds.
    assert off < (4 if name in BLENDING else 0.55 if name.startswith("rotate") else 0.001)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_gpu_gives_the_same_without_a_wait(name: str, channels: int) -> None:
    images, key = some(33, 40, 29, channels), make_keys(4, 0, np.arange(33))
    there = images.cuda()
    EVERY[name](there, key)  # libraries set themselves up
    with waits_refused():
        out = EVERY[name](there, key)
    if out.dtype == torch.uint8:
        assert (out.cpu() == EVERY[name](images, key)).all()
    else:
        torch.testing.assert_close(out.cpu(), EVERY[name](images, key))


# Moves


@quick
@given(
    b=st.integers(1, 6),
    sides=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    channels=st.sampled_from([1, 3]),
    flip=st.booleans(),
    vertical_flip=st.booleans(),
    seed=seeds,
    data=st.data(),
)
def test_flip_and_translate_are_a_crop_of_the_mirrored_and_padded_image(
    b: int, sides: tuple[int, int], channels: int, flip: bool, vertical_flip: bool, seed: int, data: st.DataObject
) -> None:
    translate = data.draw(st.integers(0, min(sides) - 1))
    images, key = some(b, *sides, channels, seed), make_keys(seed, 0, np.arange(b))
    mirrored, moved = draw_flips(key) if flip else None, draw_shifts(key, translate) if translate else None
    upside_down = draw_flip_masks("vertical", key)[1] if vertical_flip else None
    out = flip_and_translate(images, mirrored, moved, upside_down)
    assert out.is_contiguous()
    for place in range(b):
        image = images[place].numpy()
        if mirrored is not None and mirrored[place]:
            image = image[:, ::-1]
        if upside_down is not None and upside_down[place]:
            image = image[::-1]
        down, right = (0, 0) if moved is None else moved[place]
        padded = np.pad(image, ((translate, translate), (translate, translate), (0, 0)), mode="reflect")
        top, left = translate + down, translate + right
        assert (out[place].numpy() == padded[top : top + sides[0], left : left + sides[1]]).all()


@pytest.mark.parametrize(("size", "shift"), [((4, 9), 4), ((9, 4), 5), ((1, 1), 1)])
def test_a_shift_as_large_as_the_image_is_refused(size: tuple[int, int], shift: int) -> None:
    with pytest.raises(UsageError, match=f"images of {size[0]} x {size[1]} pixels cannot be moved by {shift}"):
        flip_and_translate(some(2, *size), shifts=np.array([[0, 0], [0, -shift]]))


@quick
@given(size=st.tuples(st.integers(1, 40), st.integers(1, 40)), channels=st.sampled_from([1, 3]), seed=seeds)
def test_affine_maps_are_pillows_to_the_pixel(size: tuple[int, int], channels: int, seed: int) -> None:
    images, key = some(4, *size, channels, seed), make_keys(seed, 0, np.arange(4))
    matrices, fill = some_matrices(key), fill_of(images)
    out = warp(images, matrices, fill).numpy()
    for place in range(4):
        picture = Image.fromarray(images[place].numpy().squeeze(2) if channels == 1 else images[place].numpy())
        color = tuple(fill.tolist()) if channels == 3 else int(fill[0])
        expected = picture.transform(
            size[::-1], Image.Transform.AFFINE, tuple(matrices[place]), Image.Resampling.NEAREST, fillcolor=color
        )
        assert (out[place] == np.asarray(expected).reshape(out[place].shape)).all()


# Colours


def shift_by_colorsys(pixel: list[int], turns: float) -> list[float]:
    hue, saturation, value = colorsys.rgb_to_hsv(*(byte / 255 for byte in pixel))
    return [255 * share for share in colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value)]


@pytest.mark.parametrize("turns", [0.0, 0.5, -0.5, 1 / 3, -0.07, 0.41])
def test_a_shift_of_the_hue_is_colorsyss(turns: float) -> None:
    corners = [[r, g, b] for r in (0, 9, 255) for g in (0, 9, 255) for b in (0, 9, 255)]
    pixels = [*corners, *some(1, 1, 200)[0, 0].tolist()]
    images = torch.tensor(pixels, dtype=torch.uint8)[None, None]
    expected = torch.tensor([shift_by_colorsys(pixel, turns) for pixel in pixels])[None, None]
    # Rounded to the nearest byte; 1/4096 of a sixth of a turn is at most 255 / 8192.
    assert (shift_hue(images, np.array([turns])).float() - expected).abs().max() <= 0.5 + 0.05
    assert (shift_hue(images.float(), np.array([turns])) - expected).abs().max() < 1e-3
    if turns == 0:
        assert (shift_hue(images, np.array([turns])) == images).all()


def test_hue_shifts_and_angles_are_uniform() -> None:
    keys = make_keys(4, 0, np.arange(20_000))
    hue, angles = draw_hue_shifts(keys, 0.1), draw_angles(keys, 30, 0.4)
    assert scipy.stats.kstest(hue, "uniform", (-0.1, 0.2)).pvalue > 1e-3
    assert abs((angles != 0).mean() - 0.4) < 4 * (0.24 / len(keys)) ** 0.5
    assert scipy.stats.kstest(angles[angles != 0], "uniform", (-30, 60)).pvalue > 1e-3
    assert abs(np.corrcoef(hue[angles != 0], angles[angles != 0])[0, 1]) < 0.05
    assert (draw_angles(keys, 30) != 0).all()


def blended(image: np.ndarray, other: np.ndarray, factor: float) -> np.ndarray:
    own, rest = np.float32(factor), np.float32(1 - factor)
    return (own * image.astype(np.float32) + rest * other.astype(np.float32)).clip(0, 255).astype(np.uint8)


def gray_of(image: np.ndarray) -> np.ndarray:
    red, green, blue = image.astype(np.int64).transpose(2, 0, 1)
    return ((2989 * red + 5870 * green + 1140 * blue) // 10_000)[:, :, None]


def smooth_of(image: np.ndarray) -> np.ndarray:
    out = image.copy()
    for row in range(1, image.shape[0] - 1):
        for column in range(1, image.shape[1] - 1):
            around = image[row - 1 : row + 2, column - 1 : column + 2].astype(int)
            out[row, column] = np.rint((around.sum(axis=(0, 1)) + 4 * around[1, 1]) / 13)
    return out


COLOURS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[np.ndarray], np.ndarray], type, int]] = {
    "brightness": (adjust_brightness, lambda image: image * 0, ImageEnhance.Brightness, 1),
    "contrast": (adjust_contrast, lambda image: np.float32(gray_of(image).mean()), ImageEnhance.Contrast, 2),
    "saturation": (adjust_saturation, gray_of, ImageEnhance.Color, 2),
    "sharpness": (adjust_sharpness, smooth_of, ImageEnhance.Sharpness, 1),
}


@pytest.mark.parametrize("name", COLOURS)
def test_colours_are_torchvisions_and_nearly_pillows(name: str, photographs: torch.Tensor) -> None:
    """Pillow's weights of gray are other ones in the fourth digit, and it rounds the mean."""
    batched, other, enhancer, most = COLOURS[name]
    strengths = np.array([0.0, 0.3, 0.71, 1.0, 1.25, 1.6, 1.9, 2.4])
    out = batched(photographs, strengths)
    for place, image in enumerate(photographs.numpy()):
        expected = blended(image, other(image), strengths[place])
        if name == "sharpness":  # a border blended with itself may lose 1 by rounding
            assert (out[place, [0, -1]] == photographs[place, [0, -1]]).all()
            assert (out[place, :, [0, -1]] == photographs[place, :, [0, -1]]).all()
            assert (out[place, 1:-1, 1:-1].numpy() == expected[1:-1, 1:-1]).all()
        else:
            assert (out[place].numpy() == expected).all()
    assert (out[3] == photographs[3]).all()
    theirs = [enhancer(p).enhance(factor) for p, factor in zip(pictures(photographs), strengths, strict=True)]
    assert_near(out, theirs, round(most * strengths.max()))


def test_gray_drops_the_fraction_of_every_colour() -> None:
    """Of all that are a whole number or just below one."""
    values = np.arange(256, dtype=np.int32)
    total = 2989 * values[:, None, None] + 5870 * values[:, None] + 1140 * values
    colours = np.argwhere(np.isin(total % 10_000, (0, 9999, 9998))).astype(np.uint8)[None, None]
    assert colours.shape[2] > 3000
    assert (convert_to_gray(torch.from_numpy(colours)).numpy() == gray_of(colours[0])).all()


def test_images_of_one_channel_have_no_saturation() -> None:
    images = some(3, 5, 6, 1)
    assert (adjust_saturation(images, np.array([0.0, 0.5, 2.0])) == images).all()
    assert (convert_to_gray(images) == images).all()


def test_tones_are_pillows(photographs: torch.Tensor) -> None:
    bits = np.arange(8) + 1
    expected = [ImageOps.posterize(p, b) for p, b in zip(pictures(photographs), bits, strict=True)]
    assert_near(posterize(photographs, bits), expected, 0)
    assert (posterize(photographs, bits * 0) == 0).all()
    thresholds = np.linspace(0, 255, 8)
    expected = [ImageOps.solarize(p, t) for p, t in zip(pictures(photographs), thresholds, strict=True)]
    assert_near(solarize(photographs, thresholds), expected, 0)
    assert_near(equalize(photographs), [ImageOps.equalize(p) for p in pictures(photographs)], 0)
    assert_near(autocontrast(photographs), [ImageOps.autocontrast(p) for p in pictures(photographs)], 1)
    stretched = autocontrast(photographs)
    assert (stretched[:7].amax(dim=(1, 2)) == 255).all()
    assert (stretched[:7].amin(dim=(1, 2)) == 0).all()
    assert (stretched[7, :, :, 0] == 9).all()  # a single value


@quick
@given(size=st.tuples(st.integers(1, 30), st.integers(1, 30)), colours=st.integers(1, 40), seed=seeds)
def test_equalize_is_pillows_for_any_histogram(size: tuple[int, int], colours: int, seed: int) -> None:
    images = some(3, *size, 3, seed)
    images = (images % colours) * (255 // colours)
    assert_near(equalize(images), [ImageOps.equalize(p) for p in pictures(images)], 0)


# Boxes


@pytest.mark.parametrize("random", [False, True])
def test_erase_fills_the_boxes_and_nothing_else(random: bool) -> None:
    images, key = some(40, 13, 17), make_keys(8, 0, np.arange(40))
    boxes = draw_erasing_boxes(key, (13, 17), p=0.6)
    values = make_noise(images, key) if random else torch.tensor([1, 2, 3], dtype=torch.uint8)
    out, expected = erase(images, boxes, values), images.clone()
    for place, (left, top, width, height) in enumerate(boxes):
        rows, columns = slice(top, top + height), slice(left, left + width)
        expected[place, rows, columns] = values[place, rows, columns] if random else values
    assert (out == expected).all()
    assert 10 < (boxes[:, 2] > 0).sum() < 35


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_noise_is_independent_uniform_bytes(channels: int) -> None:
    images = some(64, 32, 32, channels)
    drawn = make_noise(images, make_keys(3, 0, np.arange(64))).numpy().astype(np.int64)
    assert scipy.stats.chisquare(np.bincount(drawn.reshape(-1), minlength=256)).pvalue > 1e-3
    flat = drawn.reshape(64, -1)
    for one, other in [
        (flat[:, :-1], flat[:, 1:]),
        (flat[:-1], flat[1:]),
        (drawn[:, 1:], drawn[:, :-1]),
        (drawn[..., 0], drawn[..., -1]) if channels > 1 else (flat[:-2], flat[2:]),
    ]:
        joint = np.bincount((one.reshape(-1) // 16) * 16 + other.reshape(-1) // 16, minlength=256)
        assert scipy.stats.chisquare(joint).pvalue > 1e-3
    assert (make_noise(images[:2], make_keys(4, 0, [0, 1])).numpy() != drawn[:2]).mean() > 0.9
    with pytest.raises(UsageError, match="Fill with the mean or a number"):
        make_noise(some(1, 2, 2, 5), make_keys(0, 0, [0]))


# Mixes


def test_mixup_is_the_weighted_mean() -> None:
    images, key = some(12, 6, 7), make_keys(1, 0, np.arange(12))
    kept = draw_symmetric_beta(key, 0.8)
    kept[3], kept[4] = 1, 0
    partner = draw_partners(key)
    out = apply_mixup(images, images[torch.from_numpy(partner)], kept)
    expected = np.stack([kept[i] * images[i].numpy() + (1 - kept[i]) * images[partner[i]].numpy() for i in range(12)])
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-4)
    assert (out[3] == images[3]).all()
    assert (out[4] == images[partner[4]]).all()
    images_chw = images.permute(0, 3, 1, 2).float()
    assert (apply_mixup(images_chw, images_chw[torch.from_numpy(partner)], kept).permute(0, 2, 3, 1) == out).all()


def test_cutmix_pastes_the_partners_box() -> None:
    images, key = some(12, 9, 7), make_keys(1, 0, np.arange(12))
    boxes, partner = draw_cutmix_boxes(key, draw_symmetric_beta(key, 1.0), (9, 7)), draw_partners(key)
    out, expected = apply_cutmix(images, images[torch.from_numpy(partner)], boxes), images.clone()
    for place, (left, top, width, height) in enumerate(boxes):
        rows, columns = slice(top, top + height), slice(left, left + width)
        expected[place, rows, columns] = images[partner[place], rows, columns]
    assert (out == expected).all()
    assert (out != images).any()


@quick
@given(b=st.integers(1, 20), classes=st.integers(1, 9), seed=seeds)
def test_soft_labels_are_shares_of_both_classes(b: int, classes: int, seed: int) -> None:
    labels = torch.randint(0, classes, (b,), generator=torch.Generator().manual_seed(seed))
    key = make_keys(seed, 0, np.arange(b))
    kept, partner = draw_symmetric_beta(key, 1.0), draw_partners(key)
    out = mix_labels(labels, partner, kept, classes)
    assert out.dtype == torch.float32
    expected = np.zeros((b, classes))
    for place in range(b):
        expected[place, labels[place]] += kept[place]
        expected[place, labels[partner[place]]] += 1 - kept[place]
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-6)
