"""Progressive resolution: training begins with small images, which take less time, and ends with large ones.

Sources: Touvron et al. 2019, "Fixing the train-test resolution discrepancy" (arXiv 1906.06423); Tan and Le 2021,
"EfficientNetV2" (arXiv 2104.00298), which strengthens the augmentation with the size too; FFCV's and Composer's
ImageNet recipes, for the linear ramp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field, model_validator

from headway.core.errors import UsageError
from headway.core.recipe import RecipePart

MAX_LISTED_SIZES = 8
"""Most sizes that `describe_sizes` lists; of more, it lists the first and the last ones."""


class ProgressiveRecipe(RecipePart):
    """The size of training images grows along a line, from `start` to `data.size`. Evaluation is at `data.size`."""

    start: int = Field(default=160, ge=1)
    """Length of the shorter side at the beginning, in pixels."""
    from_epoch: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Epoch at which the size begins to grow."""
    until_epoch: float = Field(gt=0, allow_inf_nan=False)
    """Epoch from which images have their full size."""
    step: int = Field(default=32, ge=1)
    """Sides in between are multiples of this many pixels. Choose few sizes: a compiled network and the convolution
    library need time for each new one."""

    @model_validator(mode="after")
    def _check_range(self) -> ProgressiveRecipe:
        if self.until_epoch <= self.from_epoch:
            raise ValueError(
                f"the size would grow from epoch {self.from_epoch:g} until {self.until_epoch:g}: "
                "set until_epoch to more than from_epoch"
            )
        return self


def compute_progressive_size(recipe: ProgressiveRecipe, full_size: tuple[int, int], epoch: float) -> tuple[int, int]:
    """Computes the size (height, width) of the training images at an epoch.

    Args:
        recipe: first size and growth.
        full_size: (height, width) at the end.
        epoch: epoch of the step's first position. May be a fraction.

    Returns:
        the full size from `until_epoch` on. Before it, sides in the full size's proportions, rounded to the nearest
        multiple of `step` (halves up) and never larger than at the end.

    Raises:
        UsageError: `start` is not less than the shorter side of the full size.
    """
    shorter_side = min(full_size)
    if recipe.start >= shorter_side:
        what = f"progressive resolution from {recipe.start} to images whose shorter side is {shorter_side}"
        raise UsageError(what, where="data.progressive.start", fix=f"Set it to less than {shorter_side}.")
    if epoch >= recipe.until_epoch:
        return full_size
    # The shorter side grows linearly, and the longer one keeps the aspect ratio.
    progress = max(0.0, epoch - recipe.from_epoch) / (recipe.until_epoch - recipe.from_epoch)
    size_ratio = (recipe.start + (shorter_side - recipe.start) * progress) / shorter_side
    height, width = (
        min(side, max(1, math.floor(side * size_ratio / recipe.step + 0.5)) * recipe.step) for side in full_size
    )
    return height, width


def list_sizes(
    recipe: ProgressiveRecipe, full_size: tuple[int, int], epochs: float
) -> list[tuple[int, tuple[int, int]]]:
    """Returns (first epoch, size) of each size in a run of so many epochs."""
    sizes: list[tuple[int, tuple[int, int]]] = []
    # A whole epoch has one size, so only the beginnings of epochs count.
    for epoch in range(math.ceil(epochs)):
        size = compute_progressive_size(recipe, full_size, epoch)
        if not sizes or sizes[-1][1] != size:
            sizes.append((epoch, size))
    return sizes


def describe_sizes(sizes: Sequence[tuple[int, tuple[int, int]]]) -> str:
    """Returns a sentence about the result of `list_sizes`."""
    entries = [f"{height}x{width} from epoch {epoch}" for epoch, (height, width) in sizes]
    # A ramp in small steps would fill the screen.
    if len(entries) > MAX_LISTED_SIZES:
        entries = [
            *entries[: MAX_LISTED_SIZES // 2],
            f"{len(entries) - MAX_LISTED_SIZES} more",
            *entries[-(MAX_LISTED_SIZES // 2) :],
        ]
    return f"Training images are {', '.join(entries)}."


def expand_size(size: int | tuple[int, int]) -> tuple[int, int]:
    """Returns (height, width): one number stands for both."""
    return size if isinstance(size, tuple) else (size, size)
