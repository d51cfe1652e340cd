"""Resolves `augment.where: auto`: by what the doctor measured with this recipe, else by the kind of the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from headway.core.errors import UsageError
from headway.core.profile import Profile
from headway.core.recipe import LoadedRecipe
from headway.data.augment_recipe import HOST_AUGMENTATIONS, AugmentPlace
from headway.data.dataset import Dataset
from headway.data.decode import resolve_backend
from headway.data.loader_spec import LoaderSpec
from headway.data.tiers import Tier
from headway.setup.input_wording import TIER_PHRASES
from headway.setup.recipe import TrainRecipe

LOG = logging.getLogger("headway.setup")

KEY = "augment.where"
"""The key that this file resolves."""

WORTH = 1.03
"""Gain below which a move counts as noise."""

PLACES: Mapping[str, AugmentPlace] = {f"{KEY}=host": "host", f"{KEY}=device": "device"}
"""Overrides of the doctor's knobs, and their places."""


class PlaceChoice(NamedTuple):
    """A place for the augmentations that host and device can do, and the reason."""

    where: AugmentPlace
    reason: str


def has_place(recipe: TrainRecipe) -> bool:
    """Returns True if the recipe asks for something that host and device can do."""
    return recipe.data.crop.is_random or bool(recipe.augment.list_augmentations() & HOST_AUGMENTATIONS)


def choose_augment_place(loaded: LoadedRecipe[TrainRecipe], device_type: str, train: Dataset | None) -> PlaceChoice:
    """Chooses the place of flip, translate and crop on a device of this type; a place that the recipe names stays.

    The doctor's profile of the recipe decides (RECIPE.profile.json beside it): the place that was measured to be
    faster, else the one that the examined run had. If the loader was the limit, by decoding, a GPU that keeps the
    decoded set crops it too. A profile counts if its verdict is confirmed, and its device is of this type.

    Args:
        train: the training set; None: there is none to crop.
    """
    recipe = loaded.recipe
    if recipe.augment.where != "auto":
        return PlaceChoice(recipe.augment.where, f"{KEY} says so")
    # On a CPU the loader flips and shifts in the pass that decodes; a GPU has time to spare.
    usual = PlaceChoice("host", "the device is a CPU")
    if device_type != "cpu":
        usual = PlaceChoice("device", "the device has time for it")
    path = find_profile(loaded)
    if path is None or not has_place(recipe):
        return usual
    try:
        profile = Profile.read(path)
    except UsageError as error:
        LOG.warning(f"{error} {KEY} follows the device.")
        return usual
    doubt = _find_doubt(profile, device_type)
    if doubt:
        return PlaceChoice(usual.where, f"{usual.reason}; {path.name} {doubt}")
    is_decoding = profile.verdict.stage in ("decode", "augment")
    if is_decoding and device_type == "cuda" and train is not None and can_crop_on_device(recipe, train):
        return PlaceChoice("device_crops", f"the loader was the limit in {path.name}")
    for knob in profile.knobs:
        place = PLACES.get(knob.override)
        if place is not None and knob.measured and knob.gain >= WORTH:
            return PlaceChoice(place, f"{knob.gain:.2f} times the images/s, as the doctor measured in {path.name}")
    if profile.augment_where is None:
        return PlaceChoice(usual.where, f"{usual.reason}; {path.name} names no faster place")
    return PlaceChoice(profile.augment_where, f"{path.name} names no faster place")


def can_crop_on_device(recipe: TrainRecipe, train: Dataset) -> bool:
    """Returns True if a device that keeps the decoded set can make its random crops, with the host's bytes."""
    options = recipe.data
    if not options.crop.is_random or options.image_transform is not None or options.cache not in ("auto", "device"):
        return False
    spec = LoaderSpec(
        batch=1, seed=0, size=options.size, channels=options.channels, crop=options.crop, crop_on="device",
        progressive=options.progressive, scaled=options.scaled,
    )  # fmt: skip
    return spec.fits_device_tier(train.description, resolve_backend(options.decoder))


def warn_about_crops(recipe: TrainRecipe, tier: Tier) -> None:
    """Warns if the recipe asks for crops on a device that does not keep the training set."""
    if recipe.augment.where == "device_crops" and tier.name != "device":
        what = f"{KEY}: device_crops needs a GPU that keeps the decoded training set, which {TIER_PHRASES[tier.name]}"
        LOG.warning(f"{what} here: the loader crops.")


def find_profile(loaded: LoadedRecipe[TrainRecipe]) -> Path | None:
    """Returns the doctor's profile beside the recipe's file; None if there is no such file."""
    if loaded.path is None:
        return None
    path = loaded.path.with_suffix(".profile.json")
    return path if path.is_file() else None


def _find_doubt(profile: Profile, device_type: str) -> str:
    """Returns why a profile does not count, as the end of a sentence; empty: it counts."""
    measured_on = "cpu" if profile.machine.get("device") == "cpu" else "cuda"
    if measured_on != device_type:
        return f"is of {'a CPU' if measured_on == 'cpu' else 'a GPU'}"
    return "" if profile.verdict.confirmed else "was not confirmed"
