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


def choose_augment_place(loaded: LoadedRecipe[TrainRecipe], device_type: str) -> PlaceChoice:
    """Chooses the place of flip and translate on a device of this type; a place that the recipe names stays.

    The doctor's profile of the recipe decides (RECIPE.profile.json beside it): the place that was measured to be
    faster, else the one that the examined run had. It counts if its verdict is confirmed, and its device of this type.
    """
    recipe = loaded.recipe.augment
    if recipe.where != "auto":
        return PlaceChoice(recipe.where, f"{KEY} says so")
    # On a CPU the loader flips and shifts in the pass that decodes; a GPU has time to spare.
    usual = PlaceChoice("host", "the device is a CPU")
    if device_type != "cpu":
        usual = PlaceChoice("device", "the device has time for it")
    path = find_profile(loaded)
    if path is None or not recipe.list_augmentations() & HOST_AUGMENTATIONS:
        return usual
    try:
        profile = Profile.read(path)
    except UsageError as error:
        LOG.warning(f"{error} {KEY} follows the device.")
        return usual
    doubt = _find_doubt(profile, device_type)
    if doubt:
        return PlaceChoice(usual.where, f"{usual.reason}; {path.name} {doubt}")
    for knob in profile.knobs:
        place = PLACES.get(knob.override)
        if place is not None and knob.measured and knob.gain >= WORTH:
            return PlaceChoice(place, f"{knob.gain:.2f} times the images/s, as the doctor measured in {path.name}")
    if profile.augment_where is None:
        return PlaceChoice(usual.where, f"{usual.reason}; {path.name} names no faster place")
    return PlaceChoice(profile.augment_where, f"{path.name} names no faster place")


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
