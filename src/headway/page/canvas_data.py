"""Models of the data of panels that are drawn on a canvas: parallel coordinates and paths."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Annotated, final

from pydantic import Field, model_validator

from headway.page.panel import Scale
from headway.page.panel_model import PanelModel


@final
class TickData(PanelModel):
    """Named place on an axis."""

    at: float
    label: str


class _AxisData(PanelModel):
    """Axis of a drawing on a canvas."""

    label: str
    scale: Scale
    categories: list[str] = []
    ticks: list[TickData] = []
    missing: str = "none"
    missing_is_high: bool = False

    def check_numbers(self, numbers: Iterable[float | None]) -> None:
        """Raises ValueError if a number has no place on the axis."""
        for number in numbers:
            if number is None:
                continue
            if self.scale == "log" and number <= 0:
                raise ValueError(f"axis {self.label!r} is logarithmic and has no place for {number:g}")
            if self.scale == "category" and not (number == int(number) and 0 <= number < len(self.categories)):
                raise ValueError(f"axis {self.label!r} has {len(self.categories)} categories, and none is {number:g}")


@final
class AxisData(_AxisData):
    """Axis of parallel coordinates. A None is a line that lacks the value."""

    values: list[float | None]

    @model_validator(mode="after")
    def _check_values(self) -> AxisData:
        self.check_numbers(self.values)
        return self


@final
class PathAxisData(_AxisData):
    """Axis of paths: a list of numbers per line."""

    values: list[list[float | None]]

    @model_validator(mode="after")
    def _check_values(self) -> PathAxisData:
        self.check_numbers(chain.from_iterable(self.values))
        return self


class _RankedData(PanelModel):
    """Lines with names and ranks."""

    names: list[str]
    ranks: list[Annotated[int, Field(ge=1)] | None]

    @model_validator(mode="after")
    def _check_ranks(self) -> _RankedData:
        if len(self.ranks) != len(self.names):
            raise ValueError(f"{len(self.names)} names need as many ranks, and there are {len(self.ranks)}")
        return self


@final
class ParallelData(_RankedData):
    """Parallel coordinates: each line goes through its value on every axis."""

    axes: list[AxisData]

    @model_validator(mode="after")
    def _check_axes(self) -> ParallelData:
        for axis in self.axes:
            if len(axis.values) != len(self.names):
                raise ValueError(f"axis {axis.label!r} has {len(axis.values)} values for {len(self.names)} names")
        return self

    def is_empty(self) -> bool:
        return not self.names or not self.axes


@final
class PathsData(_RankedData):
    """Lines or points over one or several x, all with the same y."""

    x: list[PathAxisData]
    y: PathAxisData

    @model_validator(mode="after")
    def _check_lengths(self) -> PathsData:
        lengths = [len(row) for row in self.y.values]
        if len(lengths) != len(self.names):
            raise ValueError(f"y has {len(lengths)} rows for {len(self.names)} names")
        for axis in self.x:
            if [len(row) for row in axis.values] != lengths:
                raise ValueError(f"axis {axis.label!r} needs as many numbers in each row as y")
        return self

    def is_empty(self) -> bool:
        return not self.x or not any(self.y.values)
