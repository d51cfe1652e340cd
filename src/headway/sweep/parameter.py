"""One parameter of a sweep: a range or a choice, and its value as a pure function of a uniform number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from headway.core.recipe import RecipePart
from headway.core.recipe_yaml import dump_in_line

KINDS = ("linear", "log", "integer", "log_integer", "choice")
"""Keys that say which values a parameter takes; each parameter has one of them."""

DIGITS = 4
"""Significant digits of a number that is drawn. The next digit is far below the differences that a score shows."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
# Up to here a float64 holds every whole number.
Whole = Annotated[int, Field(ge=-(2**53), le=2**53)]


class ParameterRecipe(RecipePart):
    """A key of the recipe that a sweep varies: one of `linear`, `log`, `integer`, `log_integer` and `choice`."""

    linear: tuple[Finite, Finite] | None = None
    """Range (lowest, highest) of a number: every part of the range is equally likely."""
    log: tuple[Finite, Finite] | None = None
    """Range (lowest, highest) of a number above 0 whose order of magnitude is unknown, such as a learning rate: 0.001
    to 0.01 is as likely as 0.01 to 0.1."""
    integer: tuple[Whole, Whole] | None = None
    """Range (lowest, highest) of a whole number; both ends belong to it."""
    log_integer: tuple[Whole, Whole] | None = None
    """Range (lowest, highest) of a whole number above 0, of which small ones are tried as densely in proportion as
    large ones: 8 to 16 is as likely as 16 to 32."""
    choice: Annotated[tuple[Any, ...], Field(min_length=1)] | None = None
    """Values of any kind, all equally likely: names, true and false, lists, null, or whole parts such as
    {name: cosine, warmup_epochs: 2}."""
    points: int | None = Field(default=None, ge=2, le=1000)
    """Number of values that `method: grid` takes of a range, from end to end, at equal distances (of the logarithm, for
    `log`). Whole numbers need none: unset, a grid takes them all. Other methods draw from the whole range."""
    when: dict[str, Any] = {}
    """Conditions: values, or lists of values, that other parameters must have, for example {optimizer.name: sgd}. A
    trial in which they do not hold leaves this key as the recipe has it. A condition on a parameter that is itself left
    out does not hold."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_bare_value(cls, value: Any) -> Any:
        # A list is no short form: of two numbers, it could be a range as well as a choice.
        if isinstance(value, list):
            raise ValueError(
                f"write {{choice: {dump_in_line(value)}}} for these values, or {{log: [LOW, HIGH]}} for a range"
            )
        if value is not None and not isinstance(value, dict | ParameterRecipe):
            fix = f"Write {{choice: [{dump_in_line(value)}, ...]}} for several values"
            raise ValueError(f"a fixed value belongs into the recipe. {fix}")
        return value

    @model_validator(mode="after")
    def _check_kind(self) -> ParameterRecipe:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            what = f"{' and '.join(given)} exclude each other: keep one" if given else "it has no values"
            raise ValueError(f"{what}. Write for example {{log: [0.001, 1.0]}} or {{choice: [true, false]}}")
        if self.choice is not None:
            self._check_choice(self.choice)
        else:
            self._check_range(given[0])
        return self

    def _check_choice(self, values: tuple[Any, ...]) -> None:
        if self.points is not None:
            raise ValueError("points are for ranges, and a grid takes each value of a choice: remove points")
        for index, value in enumerate(values):
            if any(is_same(value, earlier) for earlier in values[:index]):
                raise ValueError(f"choice has {dump_in_line(value)} twice. Remove one")

    def _check_range(self, kind: str) -> None:
        low, high = getattr(self, kind)
        ends = dump_in_line([low, high])
        if low >= high:
            fix = "Write the lowest first" if low > high else "Set the value in the recipe, or widen the range"
            raise ValueError(f"{kind} is [lowest, highest], and {ends} is empty. {fix}")
        if kind.startswith("log") and low <= 0:
            fix = f"Begin above 0, or write {'integer' if kind == 'log_integer' else 'linear'}: {ends}"
            raise ValueError(f"{kind} is a range of numbers above 0, and this one is {ends}. {fix}")
        if math.isinf(high - low):
            raise ValueError(f"{kind} is a range of more than 1.8e308, which no number holds. Narrow it")

    @model_serializer(mode="wrap")
    def _drop_unused_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # A resolved space shows what each parameter has, not the four kinds that it is not.
        tree: dict[str, Any] = handler(self)
        return {key: value for key, value in tree.items() if value is not None and value != {}}

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the range; (0, number of values - 1) for a choice."""
        if self.choice is not None:
            return 0, len(self.choice) - 1
        low, high = getattr(self, self.kind)
        return low, high

    def compute_value(self, uniform: float) -> Any:
        """Returns the value for a number in [0, 1): the quantile function of this parameter, rounded.

        A number of `log` is rounded to 4 significant digits, one of `linear` to 4 decimals of the range's width (0.1234
        for a range of 0 to 1), and never to outside the range: the recipes of trials are readable, and machines whose
        logarithms differ in the last bit agree.
        """
        low, high = self.bounds
        match self.kind:
            case "choice":
                assert self.choice is not None
                return self.choice[int(uniform * len(self.choice))]
            case "integer":
                return min(int(low) + math.floor(uniform * (high - low + 1)), int(high))
            case "log_integer":
                # Half a step more at each end, so that n has a share of about 1 / n, the ends included.
                value = _interpolate_logs(low - 0.5, high + 0.5, uniform)
                return max(int(low), min(round(value), int(high)))
            case "log":
                return self.round(_interpolate_logs(low, high, uniform))
            case _:
                return self.round(low + (high - low) * uniform)

    def round(self, value: float) -> float:
        """Rounds a number of `linear` or `log` as `compute_value` does."""
        low, high = self.bounds
        if self.kind == "log":
            # More digits for a range that is narrow in proportion, such as 0.998 to 0.999.
            more = math.ceil(-math.log10(min(1.0, (high - low) / low)))
            rounded = float(f"{value:.{min(17, DIGITS + more)}g}")
        else:
            rounded = round(value, DIGITS - math.ceil(math.log10(high - low)))
        return max(low, min(rounded, high))

    def list_grid(self) -> Sequence[Any]:
        """Returns the values that a grid takes, in ascending order; those of a choice as they are written.

        Empty for a range of numbers without `points`.
        """
        if self.choice is not None:
            return self.choice
        low, high = self.bounds
        is_whole, is_log = self.kind.endswith("integer"), self.kind.startswith("log")
        if self.points is None:
            return range(int(low), int(high) + 1) if is_whole else ()
        steps = [index / (self.points - 1) for index in range(self.points)]
        values = [_interpolate_logs(low, high, step) if is_log else low + (high - low) * step for step in steps]
        # The ends as they are written; whole numbers that round to the same one occur once.
        inner: list[Any] = [round(value) if is_whole else self.round(value) for value in values[1:-1]]
        return list(dict.fromkeys([getattr(self, self.kind)[0], *inner, getattr(self, self.kind)[1]]))

    def includes(self, value: Any) -> bool:
        """Returns True if a condition may ask for this value: one of a choice, or a whole number of the range."""
        if self.choice is not None:
            return any(is_same(value, one) for one in self.choice)
        low, high = self.bounds
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        return self.kind.endswith("integer") and is_whole and low <= value <= high


def is_same(one: Any, other: Any) -> bool:
    """Compares two values of a recipe; true is not 1."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _interpolate_logs(low: float, high: float, share: float) -> float:
    return math.exp(math.log(low) + (math.log(high) - math.log(low)) * share)
