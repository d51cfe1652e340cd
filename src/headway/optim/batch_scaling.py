"""Recipe values that follow the batch: the learning rate and the length of the run."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from headway.core.errors import RecipeError
from headway.core.recipe import RecipePart


class BatchScaledRecipe(RecipePart):
    """A number for one batch, and the rule that scales it to another.

    Linear: k times the batch, k times the learning rate (Goyal et al. 2017, arXiv 1706.02677). Square root: keeps the
    variance of a step, which is proportional to lr^2 / batch (Krizhevsky 2014, arXiv 1404.5997; Hoffer et al. 2017,
    arXiv 1705.08741).
    """

    base: float = Field(gt=0, allow_inf_nan=False)
    """The number for a batch of `per`."""
    per: int = Field(ge=1)
    """Global batch for which `base` was tuned."""
    scale: Literal["linear", "sqrt", "none"] = "linear"
    """`linear`: base * batch / per; `sqrt`: base * sqrt(batch / per); `none`: base for every batch."""

    def compute_factor(self, batch: int) -> float:
        """Returns the factor on `base` for a batch."""
        ratio = batch / self.per
        # For `sqrt`, lr^2 / batch stays the same; for `linear`, lr / batch.
        return {"linear": ratio, "sqrt": math.sqrt(ratio), "none": 1.0}[self.scale]

    def compute_value(self, batch: int) -> float:
        """Returns the number for a batch."""
        return self.base * self.compute_factor(batch)

    def explain(self, batch: int) -> str:
        """Returns the computation in numbers, for example `0.1 x 8,192 / 256`."""
        ratio = f"{batch:,} / {self.per:,}"
        text = {"linear": f" x {ratio}", "sqrt": f" x sqrt({ratio})", "none": ", whatever the batch"}[self.scale]
        return f"{self.base:g}{text}"


def _find_tag(value: Any) -> str:
    # Python code may pass a finished BatchScaledRecipe.
    return "mapping[scaled]" if isinstance(value, dict | BatchScaledRecipe) else "float"


Scalable = Annotated[
    Annotated[float, Field(gt=0, allow_inf_nan=False), Tag("float")]
    | Annotated[BatchScaledRecipe, Tag("mapping[scaled]")],
    Discriminator(_find_tag),
]
"""A number above 0, or {base, per, scale}. The form of the tags tells error messages to leave them out of a key."""


def require_number(value: float | BatchScaledRecipe, where: str) -> float:
    """Returns `value` if it is a number. Raises RecipeError if it still follows the batch.

    Args:
        where: its key, for the error.
    """
    # Only a run knows its batch, and replaces the mapping before it builds an optimizer.
    if isinstance(value, BatchScaledRecipe):
        what = f"it follows the batch ({value.base:g} per {value.per:,}), and no batch is known here"
        raise RecipeError(what, where=where, fix="Give a number: BatchScaledRecipe(...).compute_value(batch).")
    return value
