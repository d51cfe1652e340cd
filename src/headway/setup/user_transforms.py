"""Imports the recipe's transforms of the user's own: of one image, and of a batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.core.errors import RecipeError, UserCodeError
from headway.core.user_code import import_user_object
from headway.data.workers.image_transform import ImageTransform
from headway.data.workers.user_failure import find_user_place


def build_image_transform(path: str, base: Path, size: tuple[int, int, int]) -> ImageTransform:
    """Builds the transform of training images that `data.image_transform` names, and tries it on noise.

    Args:
        base: folder that a file's path is relative to.
        size: (height, width, channels) of the images.

    Raises:
        RecipeError: the path names nothing, or not a function that returns a transform.
        UserCodeError: the user's code failed, or the transform's result is not of the form of its input.
    """
    where = "data.image_transform"
    make = import_user_object(path, base=base, what=where)
    try:
        made = make()
    except Exception as error:
        what = f"{path!r} failed: {type(error).__name__}: {error}"
        raise UserCodeError(what, where=where) from error
    if not callable(made) or isinstance(made, type):
        what = f"{path!r} returned a {type(made).__name__}, which cannot be called with an image"
        raise RecipeError(what, where=where, fix="Let it return the transform: a function, or an object of its class.")
    transform = ImageTransform(made, keeps_form=True)
    try:
        transform.try_out(size)
    except Exception as error:
        what = f"the transform of {path!r} failed: {type(error).__name__}: {error}"
        raise UserCodeError(what, where=f"{where}, {find_user_place(error)}") from error
    return transform


def import_batch_transform(path: str, base: Path) -> Callable[..., Any]:
    """Imports the function that `transform` names.

    Raises:
        RecipeError: the path names nothing, or nothing that can be called.
    """
    transform: Callable[..., Any] = import_user_object(path, base=base, what="transform")
    if not callable(transform):
        raise RecipeError(f"{path!r} cannot be called", where="transform", fix="Name a function.")
    return transform
