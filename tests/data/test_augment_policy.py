from __future__ import annotations

import math

import numpy as np
import pytest
import scipy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tests._waits import counted, waits_refused

from headway.core.errors import UsageError
from headway.core.random_keys import make_keys
from headway.data.augment_policy import (
    COMMON_OPERATIONS,
    OPERATIONS,
    apply_operations,
    build_affine_matrices,
    draw_auto_augment,
    draw_rand_augment,
    draw_trivial_augment,
)
from headway.data.augment_tables import PolicyTable, parse_table
from headway.data.ops.colour import adjust_brightness, adjust_contrast, adjust_saturation, adjust_sharpness

quick = settings(deadline=None, max_examples=40)
COUNT = 28_000
KEYS = make_keys(21, 0, np.arange(COUNT))
FILL = (7, 90, 201)


def some(b: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (b, height, width, channels), dtype=torch.uint8, generator=generator)


def fill_of(images: torch.Tensor) -> torch.Tensor:
    return torch.tensor(FILL[: images.shape[3]], dtype=torch.uint8, device=images.device)


def alone(image: torch.Tensor, name: str, strength: float) -> np.ndarray:
    """One operation on one image [1, H, W, 3]: Pillow's where it has the same one."""
    picture = Image.fromarray(image[0].numpy())
    height, width = image.shape[1:3]
    factor = np.array([1 + strength])
    match name:
        case "identity":
            return image[0].numpy()
        case "shear_x" | "shear_y" | "translate_x" | "translate_y":
            by = -int(strength)
            data = {
                "shear_x": (1, strength, 0, 0, 1, 0),
                "shear_y": (1, 0, 0, strength, 1, 0),
                "translate_x": (1, 0, by, 0, 1, 0),
                "translate_y": (1, 0, 0, 0, 1, by),
            }[name]
            return np.asarray(picture.transform((width, height), Image.Transform.AFFINE, data, fillcolor=FILL))
        case "rotate":
            return np.asarray(picture.rotate(strength, fillcolor=FILL))
        case "brightness":
            return adjust_brightness(image, factor)[0].numpy()
        case "color":
            return adjust_saturation(image, factor)[0].numpy()
        case "contrast":
            return adjust_contrast(image, factor)[0].numpy()
        case "sharpness":
            return adjust_sharpness(image, factor)[0].numpy()
        case "posterize":
            return np.asarray(ImageOps.posterize(picture, int(strength)))
        case "solarize":
            return np.asarray(ImageOps.solarize(picture, strength))
        case "invert":
            return np.asarray(ImageOps.invert(picture))
        case "equalize":
            return np.asarray(ImageOps.equalize(picture))
        case "autocontrast":
            out = np.empty_like(image[0].numpy())
            for channel in range(3):
                values = image[0, :, :, channel].numpy().astype(int)
                out[..., channel] = (values - values.min()) * 255 // max(1, values.max() - values.min())
            return out
    raise AssertionError(name)


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_gets_its_operations_in_their_order(seed: int) -> None:
    images, key = some(60, 12, 17, seed=seed), make_keys(seed, 0, np.arange(60))
    operations, strengths = draw_rand_augment(key, (12, 17), n=3, m=17)
    before = images.clone()
    out = apply_operations(images, operations, strengths, fill_of(images))
    assert (images == before).all()
    assert len(np.unique(operations)) == len(COMMON_OPERATIONS)
    for place in range(60):
        expected = images[place : place + 1]
        for operation, strength in zip(operations[place], strengths[place], strict=True):
            expected = torch.from_numpy(alone(expected, OPERATIONS[operation], float(strength)).copy())[None]
        assert (out[place] == expected[0]).all(), [OPERATIONS[k] for k in operations[place]]


@pytest.mark.parametrize("table", ["imagenet", "cifar10", "svhn"])
def test_auto_augment_gives_every_sample_its_pair(table: PolicyTable) -> None:
    images, key = some(60, 12, 17), make_keys(5, 0, np.arange(60))
    operations, strengths = draw_auto_augment(key, (12, 17), table)
    out = apply_operations(images, operations, strengths, fill_of(images))
    for place in range(60):
        expected = images[place : place + 1]
        for operation, strength in zip(operations[place], strengths[place], strict=True):
            expected = torch.from_numpy(alone(expected, OPERATIONS[operation], float(strength)).copy())[None]
        assert (out[place] == expected[0]).all(), [OPERATIONS[k] for k in operations[place]]


@quick
@given(
    size=st.tuples(st.integers(1, 20), st.integers(1, 20)), channels=st.sampled_from([1, 3]), seed=st.integers(0, 2**32)
)
def test_any_size_is_served_and_samples_do_not_touch(size: tuple[int, int], channels: int, seed: int) -> None:
    images, key = some(20, *size, channels, seed), make_keys(seed, 0, np.arange(20))
    drawn = draw_trivial_augment(key, size)
    whole = apply_operations(images, *drawn, fill_of(images))
    assert whole.shape == images.shape
    part = [3, 19, 4, 0]
    again = draw_trivial_augment(key[part], size)
    assert (again[0] == drawn[0][part]).all()
    assert (again[1] == drawn[1][part]).all()
    assert (apply_operations(images[part], *again, fill_of(images)) == whole[part]).all()


def strengths_of(name: str, drawn: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    operations, strengths = drawn
    return strengths[operations == OPERATIONS.index(name)]


def test_trivial_augment_draws_operation_level_and_sign_uniformly() -> None:
    drawn = draw_trivial_augment(KEYS, (224, 160))
    assert drawn[0].shape == drawn[1].shape == (COUNT, 1)
    assert scipy.stats.chisquare(np.bincount(drawn[0][:, 0], minlength=14)).pvalue > 1e-3
    largest = {"shear_x": 0.99, "shear_y": 0.99, "translate_x": 32, "translate_y": 32, "rotate": 135}
    largest |= dict.fromkeys(("brightness", "color", "contrast", "sharpness"), 0.99)
    for name, most in largest.items():
        found = strengths_of(name, drawn)
        assert np.abs(found).max() == pytest.approx(most)
        levels = np.rint(np.abs(found) / most * 30).astype(int)
        assert scipy.stats.chisquare(np.bincount(levels, minlength=31)).pvalue > 1e-3
        assert abs((found[levels > 0] > 0).mean() - 0.5) < 4 * 0.5 / len(found) ** 0.5
    assert set(strengths_of("posterize", drawn)) == {2, 3, 4, 5, 6, 7, 8}
    assert np.allclose(np.unique(strengths_of("solarize", drawn)), np.linspace(0, 255, 31))
    for name in ("identity", "autocontrast", "equalize"):
        assert (strengths_of(name, drawn) == 0).all()


def test_rand_augment_has_one_level_and_its_rounds_are_independent() -> None:
    drawn = draw_rand_augment(KEYS, (224, 160), n=2, m=15)
    joint = np.bincount(drawn[0][:, 0] * 14 + drawn[0][:, 1], minlength=196)
    assert scipy.stats.chisquare(joint).pvalue > 1e-3
    expected = {
        "shear_x": 0.15,
        "translate_x": 160 * 150 / 331 / 2,
        "translate_y": 224 * 150 / 331 / 2,
        "rotate": 15,
        "color": 0.45,
    }
    for name, strength in expected.items():
        found = strengths_of(name, drawn)
        assert set(np.round(np.abs(found), 9)) == {round(strength, 9)}
        assert abs((found > 0).mean() - 0.5) < 4 * 0.5 / len(found) ** 0.5
    assert set(strengths_of("posterize", drawn)) == {6}
    assert set(strengths_of("solarize", drawn)) == {127.5}


@pytest.mark.parametrize(
    ("table", "both"),
    [
        # Pairs of the paper's appendix with the probability that both operations run.
        ("imagenet", {("posterize", "rotate"): 0.4 * 0.6, ("sharpness", "invert"): 0.4 * 0.6}),
        ("cifar10", {("shear_y", "posterize"): 0.2 * 0.3, ("brightness", "color"): 0.9 * 0.2 + 0.1 * 0.7}),
        ("svhn", {("shear_y", "translate_x"): 0.3 * 0.9, ("solarize", "translate_y"): 0.7 * 0.6}),
    ],
)
def test_auto_augment_draws_the_pairs_with_their_probabilities(
    table: PolicyTable, both: dict[tuple[str, str], float]
) -> None:
    operations, _ = draw_auto_augment(KEYS, (224, 160), table)
    for (first, second), probability in both.items():
        found = (operations == [OPERATIONS.index(first), OPERATIONS.index(second)]).all(axis=1).mean()
        expected = probability / 25
        assert abs(found - expected) < 4 * (expected / COUNT) ** 0.5, (first, second)
    pairs = parse_table(table)
    assert len(pairs) == 25
    # Each operation comes in each of the two places as often as its probabilities say.
    for place in range(2):
        counts = np.bincount(operations[:, place], minlength=len(OPERATIONS))
        shares = np.zeros(len(OPERATIONS))
        for pair in pairs:
            name, probability, _ = pair[place]
            shares[OPERATIONS.index(name)] += probability / 25
        shares[0] = 1 - shares[1:].sum()
        used = shares > 0
        assert not counts[~used].any()
        assert scipy.stats.chisquare(counts[used], shares[used] * COUNT).pvalue > 1e-3


def test_auto_augment_has_ten_levels_and_two_directions() -> None:
    drawn = draw_auto_augment(KEYS, (224, 160), "imagenet")
    # Levels of the paper's table for ImageNet, in torchvision's units.
    levels = {"rotate": {3, 8, 9}, "color": {0, 2, 4, 8}, "contrast": {8}, "sharpness": {7}, "shear_x": {5}}
    largest = {"rotate": 30, "color": 0.9, "contrast": 0.9, "sharpness": 0.9, "shear_x": 0.3}
    for name, expected in levels.items():
        found = strengths_of(name, drawn)
        assert {round(float(value), 6) for value in np.abs(found) / largest[name] * 9} == expected
        moved = found[found != 0]
        assert abs((moved > 0).mean() - 0.5) < 4 * 0.5 / len(moved) ** 0.5
    assert set(strengths_of("posterize", drawn)) == {8 - round(level * 4 / 9) for level in (5, 6, 7, 8)}
    assert np.allclose(np.unique(strengths_of("solarize", drawn)), [255 * (1 - level / 9) for level in (8, 7, 5, 4, 3)])
    assert (strengths_of("invert", drawn) == 0).all()
    translated = draw_auto_augment(KEYS, (224, 160), "cifar10")
    assert np.abs(strengths_of("translate_x", translated)).max() == pytest.approx(160 * 150 / 331)
    assert np.abs(strengths_of("translate_y", translated)).max() == pytest.approx(224 * 150 / 331)


def test_impossible_numbers_are_refused() -> None:
    for options in ({"n": 0}, {"m": 31}, {"m": -1}, {"n": 100}):
        with pytest.raises(UsageError, match="Give 1 to 99 of level 0 to 30"):
            draw_rand_augment(KEYS[:2], (8, 8), **options)
    images = some(2, 5, 5)
    with pytest.raises(UsageError, match="Apply them before normalisation"):
        apply_operations(images.float(), *draw_trivial_augment(KEYS[:2], (5, 5)), fill_of(images))


def test_a_quarter_turn_and_back() -> None:
    images = some(1, 9, 9)
    turn = build_affine_matrices(np.array([OPERATIONS.index("rotate")]), np.array([90.0]), (9, 9))
    assert turn[0] == pytest.approx([0, -1, 9, 1, 0, 0])
    angles = np.array([[90.0], [-90.0]])
    both = np.full((2, 1), OPERATIONS.index("rotate"))
    out = apply_operations(images.expand(2, -1, -1, -1), both, angles, fill_of(images))
    assert (out[0] == images[0].rot90()).all()
    assert (out[1] == images[0].rot90(-1)).all()
    assert math.isclose(np.linalg.det(turn[0].reshape(2, 3)[:, :2]), 1)


def test_nothing_waits_for_the_device() -> None:
    images, key = some(64, 9, 8), KEYS[:64]
    drawn = draw_rand_augment(key, (9, 8))
    with counted() as found:
        apply_operations(images, *drawn, fill_of(images))
    assert found == {}


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3])
def test_a_gpu_gives_the_same_pixels_without_a_wait(channels: int) -> None:
    images, key = some(200, 40, 29, channels), KEYS[:200]
    drawn = draw_rand_augment(key, (40, 29), n=3)
    there, fill = images.cuda(), fill_of(images).cuda()
    apply_operations(there, *drawn, fill)  # libraries set themselves up
    with waits_refused():
        out = apply_operations(there, *drawn, fill)
    assert (out.cpu() == apply_operations(images, *drawn, fill.cpu())).all()
