from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests._waits import counted, waits_refused

from headway.core.errors import UsageError
from headway.core.random_keys import UInt64, draw_uniform, make_keys
from headway.data import augment_draws, augment_policy
from headway.data.augment import Augment, measure_mean_std
from headway.data.augment_recipe import SETTINGS, AugmentRecipe
from headway.data.crops import draw_flips, draw_shifts
from headway.data.ops import colour, mix
from headway.data.ops.erase import erase, make_noise
from headway.data.ops.move import flip_and_translate
from headway.data.ops.rotate import rotate
from headway.data.random_streams import STREAM_BRIGHTNESS, STREAM_CONTRAST, STREAM_MIX, STREAM_SATURATION

quick = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**32)
MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)
CLASSES = 5

RECIPES: dict[str, dict[str, Any]] = {
    "flip and translate": {"flip": True, "translate": 2},
    "alternating": {"flip": "alternating"},
    "vertical": {"flip": "vertical"},
    "both flips": {"flip": "both", "translate": 1},
    "trivial": {"policy": "trivial"},
    "auto": {"policy": "auto"},
    "rotation": {"rotation": 40},
    "reflected rotation": {"rotation": {"degrees": 180, "p": 0.6, "border": "reflect"}},
    "hue": {"jitter": {"hue": 0.4}},
    "rand": {"policy": {"name": "rand", "n": 3, "m": 12}},
    "jitter": {"jitter": {"brightness": 0.4, "contrast": 0.3, "saturation": 0.5, "hue": 0.2}},
    "cutout": {"cutout": 3},
    "erasing": {"random_erasing": {"p": 0.7}},
    "noise": {"random_erasing": {"p": 0.7, "fill": "random"}},
    "a number": {"random_erasing": {"p": 0.7, "fill": 3}},
}
MIXES: dict[str, dict[str, Any]] = {
    "mixup": {"mixup": {"alpha": 0.4}},
    "cutmix": {"cutmix": {}},
    "both": {"mixup": {}, "cutmix": {"alpha": 0.7}},
}
ALL: dict[str, Any] = {"flip": "alternating", "translate": 2, "rotation": 25}
for _part in (RECIPES["rand"], RECIPES["jitter"], RECIPES["cutout"], RECIPES["noise"], MIXES["both"]):
    ALL |= _part
EVERY = RECIPES | MIXES | {"all": ALL}


def some(b: int, height: int, width: int, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (b, height, width, channels), dtype=torch.uint8, generator=generator)


def augment_of(options: dict[str, Any], channels: int = 3, device: str = "cpu", **more: Any) -> Augment:
    recipe = AugmentRecipe(**options, mean=MEAN[:channels], std=STD[:channels])
    return Augment(recipe, device, num_classes=CLASSES, **more)


def given_for(b: int, epoch: int = 3) -> tuple[UInt64, dict[str, Any]]:
    """The keys of a batch, and what an alternating flip needs besides."""
    samples = np.arange(b)
    return make_keys(9, epoch, samples), {"epochs": np.full(b, epoch), "first_epoch_keys": make_keys(9, 0, samples)}


def called(augment: Augment, images: torch.Tensor, epoch: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    key, more = given_for(len(images), epoch)
    return augment(images, torch.arange(len(images), device=images.device) % CLASSES, key, **more)


# What comes out


@pytest.mark.parametrize("channels", [1, 3])
def test_the_output_is_normalised_and_lies_channels_last(channels: int) -> None:
    images = some(6, 5, 7, channels)
    mean, std = measure_mean_std(images)
    out = Augment(AugmentRecipe(mean=mean, std=std), "cpu").normalise(images)
    assert out.dtype == torch.float32
    assert out.shape == (6, channels, 5, 7)
    assert out.is_contiguous(memory_format=torch.channels_last)
    contiguous = Augment(AugmentRecipe(mean=mean, std=std), "cpu", channels_last=False).normalise(images)
    assert contiguous.is_contiguous()
    assert (contiguous == out).all()
    for channel in range(channels):
        expected = (images[..., channel].double() - mean[channel]) / std[channel]
        torch.testing.assert_close(out[:, channel].double(), expected, rtol=1e-6, atol=1e-6)
    assert out.mean(dim=(0, 2, 3)).abs().max() < 1e-4
    assert (out.std(dim=(0, 2, 3), correction=0) - 1).abs().max() < 1e-4


def test_images_of_several_widths_are_normalised_by_one_augment() -> None:
    augment = augment_of({})
    for width in (4, 9, 4):
        images = some(2, 3, width)
        expected = (images.float() - torch.tensor(MEAN)) / torch.tensor(STD)
        torch.testing.assert_close(augment.normalise(images).permute(0, 2, 3, 1), expected)


def test_without_normalisation_the_bytes_are_given_as_they_are() -> None:
    recipe = AugmentRecipe(translate=2, normalise=False, mean=MEAN, std=STD)
    augment, images = Augment(recipe, "cpu"), some(4, 6, 9)
    plain = augment.normalise(images)
    assert (plain.dtype, plain.shape) == (torch.uint8, (4, 3, 6, 9))
    assert plain.data_ptr() == images.data_ptr()  # no copy
    key, _ = given_for(4)
    moved, _ = augment(images, torch.arange(4), key)
    assert moved.dtype == torch.uint8
    assert (moved.permute(0, 2, 3, 1) == flip_and_translate(images, None, draw_shifts(key, 2))).all()


def test_without_augmentation_no_keys_are_wanted_and_nothing_moves() -> None:
    augment, images, labels = augment_of({}), some(4, 6, 6), torch.arange(4)
    assert not augment.needs_keys
    out, same = augment(images, labels, None)
    assert (out == augment.normalise(images)).all()
    assert same is labels


def test_every_augmentation_of_the_recipe_is_among_those_tested() -> None:
    assert set(ALL) == set(AugmentRecipe.model_fields) - SETTINGS
    assert AugmentRecipe(**ALL).list_augmentations() == set(ALL)
    assert AugmentRecipe().list_augmentations() == set()
    for name, value in ALL.items():
        assert AugmentRecipe(**{name: value}).list_augmentations() == {name}
        assert augment_of({name: value}).needs_keys, f"{name} never runs"


@pytest.mark.parametrize("name", EVERY)
def test_a_random_recipe_wants_keys_and_changes_the_images(name: str) -> None:
    augment, images = augment_of(EVERY[name]), some(12, 8, 9)
    assert augment.needs_keys
    assert augment.needs_epochs == (EVERY[name].get("flip") == "alternating")
    before = images.clone()
    out, labels = called(augment, images)
    assert (images == before).all()
    assert (out != augment.normalise(images)).any()
    assert labels.shape == ((12, CLASSES) if name in MIXES or name == "all" else (12,))
    with pytest.raises(UsageError, match=r"Give batch\.keys"):
        augment(images, torch.arange(12), None)


def by_hand(images: torch.Tensor, labels: torch.Tensor, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The recipe ALL, step by step."""
    b, size = len(images), (images.shape[1], images.shape[2])
    key, more = given_for(b, epoch)
    fill = torch.tensor([120, 110, 100], dtype=torch.uint8)
    images = flip_and_translate(
        images, draw_flips(more["first_epoch_keys"], more["epochs"], "alternating"), draw_shifts(key, 2)
    )
    images = rotate(images, augment_draws.draw_angles(key, 25), fill)
    images = augment_policy.apply_operations(images, *augment_policy.draw_rand_augment(key, size, n=3, m=12), fill)
    images = colour.adjust_brightness(images, augment_draws.draw_factors(key, STREAM_BRIGHTNESS, 0.4))
    images = colour.adjust_contrast(images, augment_draws.draw_factors(key, STREAM_CONTRAST, 0.3))
    images = colour.adjust_saturation(images, augment_draws.draw_factors(key, STREAM_SATURATION, 0.5))
    images = colour.shift_hue(images, augment_draws.draw_hue_shifts(key, 0.2))
    images = erase(images, augment_draws.draw_cutout_boxes(key, 3, size), fill)
    images = erase(images, augment_draws.draw_erasing_boxes(key, size, p=0.7), make_noise(images, key))
    pasted, partner = draw_uniform(key, STREAM_MIX) < 0.5, augment_draws.draw_partners(key)
    boxes = augment_draws.draw_cutmix_boxes(key, np.where(pasted, augment_draws.draw_symmetric_beta(key, 0.7), 1), size)
    kept = np.where(pasted, 1, augment_draws.draw_symmetric_beta(key, 0.2))
    others = images[torch.from_numpy(partner)]
    images = mix.apply_mixup(mix.apply_cutmix(images, others, boxes), others, kept)
    shares = np.where(pasted, augment_draws.compute_kept_area(boxes, size), kept)
    out = (images.float() - torch.tensor(MEAN)) / torch.tensor(STD)
    return out.permute(0, 3, 1, 2), mix.mix_labels(labels, partner, shares, CLASSES)


def test_the_parts_of_a_recipe_come_in_its_order() -> None:
    images, labels = some(32, 12, 10), torch.arange(32) % CLASSES
    for epoch in (0, 1):
        out, shares = called(augment_of(ALL), images, epoch)
        expected, expected_shares = by_hand(images, labels, epoch)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(shares, expected_shares)
    torch.testing.assert_close(shares.sum(dim=1), torch.ones(32))


def test_an_alternating_flip_alternates() -> None:
    augment, images = augment_of(EVERY["alternating"]), some(20, 4, 5)
    epochs = [called(augment, images, epoch)[0] for epoch in range(3)]
    assert (epochs[0] == epochs[2]).all()
    assert (epochs[0] == epochs[1].flip(3)).all()
    with pytest.raises(UsageError, match="Give first_epoch_keys"):
        augment(images, torch.arange(20), given_for(20)[0], epochs=np.zeros(20, np.int64))


@pytest.mark.parametrize("name", RECIPES)
def test_a_sample_does_not_depend_on_its_batch(name: str) -> None:
    augment, images = augment_of(RECIPES[name]), some(14, 9, 8)
    key, more = given_for(14)
    whole, _ = augment(images, torch.zeros(14), key, **more)
    for part in (slice(0, 5), slice(5, 14)):
        cut = {name: value[part] for name, value in more.items()}
        assert (augment(images[part], torch.zeros(14)[part], key[part], **cut)[0] == whole[part]).all()


@pytest.mark.parametrize("name", MIXES)
def test_a_mixed_sample_depends_on_who_is_in_its_batch_and_not_where(name: str) -> None:
    augment, images, labels = augment_of(MIXES[name]), some(14, 9, 8), torch.arange(14) % CLASSES
    key, _ = given_for(14)
    whole, shares = augment(images, labels, key)
    order = np.random.default_rng(0).permutation(14)
    again, shares_again = augment(images[order], labels[order], key[order])
    assert (again == whole[order]).all()
    assert (shares_again == shares[order]).all()


@quick
@given(
    name=st.sampled_from(sorted(EVERY)),
    shape=st.tuples(st.integers(1, 4), st.integers(3, 9), st.integers(3, 9), st.sampled_from([1, 3])),
)
def test_every_shape_is_served(name: str, shape: tuple[int, int, int, int]) -> None:
    out, _ = called(augment_of(EVERY[name], shape[3]), some(*shape))
    assert out.shape == (shape[0], shape[3], shape[1], shape[2])
    assert out.isfinite().all()


def test_an_image_of_one_pixel_is_served() -> None:
    options = {name: value for name, value in ALL.items() if name != "translate"}
    out, labels = called(augment_of(options, 1), some(1, 1, 1, 1))
    assert out.shape == (1, 1, 1, 1)
    assert labels[0, 0] == 1  # its partner is itself


# Parameters


def test_the_parameters_are_what_is_done() -> None:
    augment, images = augment_of(ALL), some(32, 12, 10)
    key, more = given_for(32)
    done = augment.draw_parameters(key, (12, 10), **more)
    # Only this mode mirrors top to bottom.
    assert {name for name in vars(done) if getattr(done, name) is None} == {"vertical_flips"}
    assert all(len(values) == 32 for values in vars(done).values() if values is not None)
    _, shares = augment(images, torch.arange(32) % CLASSES, key, **more)
    pasted = done.cutmix[:, 2:].prod(axis=1) > 0
    mixed = done.mixup < 1
    assert not (pasted & mixed).any()
    assert 5 < mixed.sum() < 27
    own = torch.arange(32) % CLASSES
    differ = own != own[torch.from_numpy(done.partner)]
    np.testing.assert_allclose(shares[range(32), own][differ], done.label_weight[differ.numpy()], atol=1e-6)
    plain = augment_of({}).draw_parameters(key, (12, 10))
    assert all(getattr(plain, name) is None for name in vars(plain))


def test_nobody_is_mixed_with_a_masked_sample() -> None:
    key, _ = given_for(16)
    masked = np.arange(16) % 3 == 0
    images, labels = some(16, 8, 8), torch.arange(16) % CLASSES
    for name, options in MIXES.items():
        augment = augment_of(options)
        done = augment.draw_parameters(key, (8, 8), masked=masked)
        alone = masked[done.partner]
        assert (done.label_weight[alone] == 1).all(), name
        assert (done.label_weight[~alone] < 1).any()
        out, shares = augment(images, labels, key, masked=masked)
        assert (out[alone] == augment.normalise(images[alone])).all()
        assert (shares[alone].argmax(dim=1) == labels[alone]).all()
        free = augment(images, labels, key)[0]
        assert (out[~alone] == free[~alone]).all()


def test_what_the_loader_has_done_is_not_done_again() -> None:
    images = some(9, 8, 8)
    key, _ = given_for(9)
    whole = augment_of(EVERY["flip and translate"])
    rest = augment_of(EVERY["flip and translate"], done_by_loader=frozenset({"flip", "translate"}))
    assert not rest.needs_keys
    moved = flip_and_translate(images, draw_flips(key), draw_shifts(key, 2))
    assert (rest(moved, torch.zeros(9), None)[0] == whole(images, torch.zeros(9), key)[0]).all()
    turned = augment_of(EVERY["flip and translate"], done_by_loader=frozenset({"flip"}))
    flipped = flip_and_translate(images, draw_flips(key))
    assert (turned(flipped, torch.zeros(9), key)[0] == whole(images, torch.zeros(9), key)[0]).all()
    with pytest.raises(UsageError, match="cutout"):
        augment_of({}, done_by_loader=frozenset({"cutout"}))
    for where, device, expected in [
        ("auto", "cpu", {"flip", "translate"}),
        ("auto", "cuda", set()),
        ("host", "cuda", {"flip", "translate"}),
        ("device", "cpu", set()),
    ]:
        assert AugmentRecipe(flip=True, translate=1, where=where).select_host_augmentations(device) == expected
    assert AugmentRecipe(translate=1).select_host_augmentations("cpu") == {"translate"}
    assert AugmentRecipe().select_host_augmentations("cpu") == set()


# Waits and devices


@pytest.mark.parametrize("name", EVERY)
def test_nothing_waits_for_the_device(name: str) -> None:
    augment, images = augment_of(EVERY[name]), some(12, 8, 9)
    with counted() as found:
        called(augment, images)
    assert found == {}


@pytest.mark.gpu
@pytest.mark.parametrize("name", EVERY)
def test_a_gpu_gives_the_same_without_a_wait(name: str) -> None:
    images = some(60, 24, 20)
    there, augment = images.cuda(), augment_of(EVERY[name], device="cuda")
    called(augment, there)  # libraries set themselves up
    with waits_refused():
        out, labels = called(augment, there)
    expected, expected_labels = called(augment_of(EVERY[name]), images)
    torch.testing.assert_close(out.cpu(), expected)
    torch.testing.assert_close(labels.cpu(), expected_labels)


# Recipes and statistics


def test_short_forms_and_what_is_written_out() -> None:
    recipe = AugmentRecipe.model_validate({"policy": "trivial", "flip": True, "mixup": {}})
    assert recipe.flip_mode == "random"
    written = recipe.model_dump(mode="json")
    assert written["policy"] == {"name": "trivial"}
    assert AugmentRecipe.model_validate(written) == recipe
    rand = AugmentRecipe.model_validate({"policy": {"name": "rand", "m": 5}})
    assert rand.model_dump(mode="json")["policy"] == {"name": "rand", "n": 2, "m": 5}
    assert AugmentRecipe.model_validate(rand.model_dump(mode="json")) == rand
    auto = AugmentRecipe.model_validate({"policy": {"name": "auto", "table": "cifar10"}, "rotation": 15})
    assert auto.model_dump(mode="json")["policy"] == {"name": "auto", "table": "cifar10"}
    assert auto.model_dump(mode="json")["rotation"] == {"degrees": 15, "p": 1, "border": "mean"}
    assert AugmentRecipe.model_validate(auto.model_dump(mode="json")) == auto
    assert (AugmentRecipe().flip_mode, AugmentRecipe(flip="alternating").flip_mode) == (None, "alternating")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"policy": {"name": "trivial", "n": 2}}, "'trivial' does not use 'n'"),
        ({"policy": "autoaugment"}, "policy.name"),
        ({"policy": {"name": "auto", "m": 3}}, "'auto' does not use 'm'. Remove 'm', or set name: rand"),
        ({"policy": {"name": "rand", "table": "svhn"}}, "'rand' does not use 'table'. .* or set name: auto"),
        ({"policy": {"name": "auto", "table": "coco"}}, "policy.table"),
        ({"rotation": 200}, "rotation.degrees"),
        ({"rotation": True}, "rotation"),
        ({"rotation": {"degrees": 5, "border": "black"}}, "rotation.border"),
        ({"jitter": {"hue": 0.6}}, "jitter.hue"),
        ({"jitter": {}}, "this jitter changes nothing: set brightness, contrast, saturation or hue"),
        ({"random_erasing": {"scale": [0.4, 0.1]}}, "is an empty range: write the smallest first"),
        ({"random_erasing": {"p": 0}}, "random_erasing.p"),
        ({"random_erasing": {"fill": 300}}, "random_erasing.fill"),
        ({"mixup": {"alpha": 0}}, "mixup.alpha"),
        ({"std": [float("inf")]}, "std.*\n.*finite"),
        ({"mean": [float("nan")]}, "mean.*\n.*finite"),
        ({"random_erasing": {"ratio": [1, float("inf")]}}, "random_erasing.ratio.*\n.*finite"),
        ({"cutout": 0}, "cutout"),
        ({"flip": "sometimes"}, "flip"),
    ],
)
def test_impossible_recipes_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AugmentRecipe.model_validate(options)


def test_what_cannot_be_done_with_these_data_is_refused() -> None:
    with pytest.raises(UsageError, match="mean and std are not known"):
        Augment(AugmentRecipe(), "cpu")
    for name in ("mixup", "cutmix"):
        with pytest.raises(UsageError, match=rf"{name} mixes classes.*Remove augment\.{name}"):
            Augment(AugmentRecipe(mean=MEAN, std=STD, **{name: {}}), "cpu")


def test_statistics_are_measured_by_channel() -> None:
    images = torch.zeros(4, 2, 2, 3, dtype=torch.uint8)
    images[:2, ..., 0] = 200
    images[..., 1] = 50
    images[0, 0, 0, 2] = 255
    assert measure_mean_std(images) == ((100.0, 50.0, 15.9375), (100.0, 1.0, round(255 * (15 / 256) ** 0.5, 4)))
    large = some(64, 32, 32)
    mean, std = measure_mean_std(large)
    assert mean == pytest.approx(large.double().mean(dim=(0, 1, 2)).tolist(), abs=1e-4)
    assert std == pytest.approx(large.double().std(dim=(0, 1, 2)).tolist(), rel=1e-4)
