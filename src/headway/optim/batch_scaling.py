"""Numbers of a recipe that follow the batch: the learning rate, and the length of the run."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.core.errors import RecipeError
from headway.core.recipe import RecipePart


class BatchScaledRecipe(RecipePart):
    """A number that suits one batch, and how it follows another.

    Linear: k times the batch, k times the learning rate (Goyal et al. 2017, arXiv 1706.02677). Square root: it keeps
    the variance of a step, which goes as lr^2 / batch (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017,
    arXiv 1705.08741).
    """

    base: float = Field(gt=0, allow_inf_nan=False)
    """The number for a batch of `per`."""
    per: int = Field(ge=1)
    """Global batch that `base` was found for."""
    scale: Literal["linear", "sqrt", "none"] = "linear"
    """Times batch / per (`linear`), times its square root (`sqrt`), or `base` whatever the batch (`none`)."""

    def compute_factor(self, batch: int) -> float:
        """What the base is multiplied by for a batch."""
        ratio = batch / self.per
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.scale]

    def compute_value(self, batch: int) -> float:
        """The number for a batch."""
        return self.base * self.compute_factor(batch)

    def explain(self, batch: int) -> str:
        """How it came about, in numbers."""
        ratio = f"{batch:,} / {self.per:,}"
        text = {"linear": f" x {ratio}", "sqrt": f" x sqrt({ratio})", "none": ", whatever the batch"}[self.scale]
        return f"{self.base:g}{text}"


def _find_tag(value: Any) -> str:
    return "mapping[scaled]" if isinstance(value, dict | BatchScaledRecipe) else "float"


Scalable = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("float")]
    | Annotated[BatchScaledRecipe, Tag("mapping[scaled]")],
    Discriminator(_find_tag),
]
"""A number above 0, or {base, per, scale}. The tags are those that a recipe's errors leave out of a key."""


def require_number(value: float | BatchScaledRecipe, where: str) -> float:
    """A number that has been resolved.

    Raises:
        RecipeError: it still follows a batch.
    """
    if isinstance(value, BatchScaledRecipe):
        what = f"it follows the batch ({value.base:g} per {value.per:,}), and no batch is known here"
        raise RecipeError(what, where=where, fix="Give a number: BatchScaledRecipe(...).compute_value(batch).")
    return value
