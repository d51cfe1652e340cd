"""The `callbacks` and `early_stopping` parts of a recipe."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from headway.core.recipe import RecipePart


class CallbackRecipe(RecipePart):
    """Your own object that a run calls at certain moments. An import path alone stands for `{factory: PATH}`."""

    factory: str
    """Import path of a class or function that returns the object, `package.module:Name` or `file.py:Name` beside the
    recipe; or of the object itself. It has one or more of the methods on_start, on_step, on_evaluate, on_epoch and
    on_end, each with one argument, a headway.training.callback_context.CallbackContext."""
    args: dict[str, Any] = {}
    """Keyword arguments of the factory, for example {every_steps: 100}."""


def expand_callback(value: Any) -> Any:
    """Returns `{factory: PATH}` for an import path, and every other value unchanged."""
    return {"factory": value} if isinstance(value, str) else value


class EarlyStoppingRecipe(RecipePart):
    """Ends a run that no longer improves (Prechelt 1998, "Early Stopping - But When?"). All ranks end in the same
    step."""

    metric: str = "auto"
    """Metric of the evaluations that has to improve, or `loss`. auto: the primary metric of the task, by which the best
    weights are kept."""
    patience_epochs: float = Field(gt=0, allow_inf_nan=False)
    """Epochs without an improvement after which the run ends, at an evaluation."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Smallest change that counts as an improvement; it has to be exceeded."""
