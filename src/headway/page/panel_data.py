"""Models of the data of each kind of panel, and the check before a panel is drawn."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Generic, Literal, TypeVar, final, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from headway.core.errors import HeadwayError, suggest_nearest
from headway.core.value_errors import describe_error
from headway.page.canvas_data import ParallelData, PathsData
from headway.page.panel import Panel, PanelKind
from headway.page.panel_model import PanelModel

# Cells listed beside a matrix: as many as fit there without scrolling.
MAX_LISTED_CELLS = 12
# Charts that plotly draws, and those with many lines, which are drawn on a canvas: SVG would take seconds.
PLOTLY_KINDS = ("lines", "points", "bars", "matrix", "surface", "grid")
CANVAS_KINDS = ("parallel", "paths")
# Cells that are set flush right: `1,234`, `5e-4`, `93.1 %`, `12 ms`, `-`.
NUMERIC_CELL = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)?( ?[%\w/]{1,9})?|-?")

T = TypeVar("T", bound=BaseModel)


def _check_data_uri(uri: str) -> str:
    # The page loads nothing from outside: every image is part of it.
    # `\Z` and not `$`, which would allow a line break at the end.
    if not re.match(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/]+={0,2}\Z", uri):
        raise ValueError(f"an image must be a data:image/...;base64 URI, not {uri[:40]!r}")
    return uri


@final
class CardData(PanelModel):
    """One number in large type, with its label and a note."""

    label: str
    value: str
    note: str = ""


@final
class CardsData(PanelModel):
    """A row of cards."""

    cards: list[CardData]

    def is_empty(self) -> bool:
        return not self.cards


@final
class SeriesData(PanelModel):
    """One line. A None in y is a gap."""

    name: str
    x: list[float]
    y: list[float | None]

    @model_validator(mode="after")
    def _check_lengths(self) -> SeriesData:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y: give as many of both")
        return self


@final
class BandData(PanelModel):
    """Shaded range around one line, with a bound per point of the line. A None is a gap."""

    of: Annotated[int, Field(ge=0)]
    """Index of the series whose x the bounds belong to."""
    low: list[float | None]
    high: list[float | None]


@final
class RuleData(PanelModel):
    """Named line across a whole chart."""

    name: str
    at: float


@final
class LinesData(PanelModel):
    """Lines over common axes."""

    x_label: str
    y_label: str
    series: list[SeriesData]
    bands: list[BandData] = []
    y_range: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False
    rules: list[RuleData] = []
    """Horizontal lines at some y."""

    @model_validator(mode="after")
    def _check_range(self) -> LinesData:
        if self.y_range and (self.y_range[0] >= self.y_range[1] or (self.log_y and self.y_range[0] <= 0)):
            raise ValueError("y_range must ascend, and be above 0 on a logarithmic axis")
        if self.log_y and any(rule.at <= 0 for rule in self.rules):
            raise ValueError("a logarithmic axis has no rules at 0 or below")
        return self

    @model_validator(mode="after")
    def _check_bands(self) -> LinesData:
        for band in self.bands:
            # Checked before it is used as an index below.
            if band.of >= len(self.series):
                raise ValueError(f"a band belongs to series {band.of}, and there are {len(self.series)}")
            points = len(self.series[band.of].x)
            if (len(band.low), len(band.high)) != (points, points):
                name = self.series[band.of].name
                bounds = f"{len(band.low)} low and {len(band.high)} high bounds for {points} points"
                raise ValueError(f"the band of series {name!r} has {bounds}")
        return self

    def is_empty(self) -> bool:
        return all(y is None for series in self.series for y in series.y)


@final
class MarkData(PanelModel):
    """Named point of a chart or on a surface."""

    name: str
    x: float
    y: float


@final
class PointSeriesData(PanelModel):
    """Points of one colour."""

    name: str
    points: list[MarkData]


@final
class PointsData(PanelModel):
    """Scatter plot: series of named points over common axes."""

    x_label: str
    y_label: str
    series: list[PointSeriesData]
    log_x: bool = False

    @model_validator(mode="after")
    def _check_log_axis(self) -> PointsData:
        if self.log_x and any(point.x <= 0 for series in self.series for point in series.points):
            raise ValueError("a logarithmic axis has no points at 0 or below")
        return self

    def is_empty(self) -> bool:
        return not any(series.points for series in self.series)


@final
class StackData(PanelModel):
    """One part of every bar."""

    name: str
    values: list[float]


@final
class BarsData(PanelModel):
    """Horizontal stacked bars. A logarithmic axis has no sums: there each bar has one part."""

    x_label: str
    names: list[str]
    stacks: list[StackData]
    log_x: bool = False
    rules: list[RuleData] = []
    """Lines across all bars."""

    @model_validator(mode="after")
    def _check_values(self) -> BarsData:
        for stack in self.stacks:
            if len(stack.values) != len(self.names):
                raise ValueError(f"stack {stack.name!r} has {len(stack.values)} values for {len(self.names)} names")
        return self

    @model_validator(mode="after")
    def _check_log_axis(self) -> BarsData:
        # Logarithms have no sum: parts of a bar cannot be stacked on such an axis.
        if not self.log_x:
            return self
        if any(value < 0 for stack in self.stacks for value in stack.values):
            raise ValueError("a logarithmic axis has no bars below 0")
        if any(rule.at <= 0 for rule in self.rules):
            raise ValueError("a logarithmic axis has no rules at 0 or below")
        for index, name in enumerate(self.names):
            if sum(stack.values[index] > 0 for stack in self.stacks) > 1:
                raise ValueError(f"bar {name!r} has several parts, and a logarithmic axis cannot stack them")
        return self

    def is_empty(self) -> bool:
        if self.log_x:
            return not any(value > 0 for stack in self.stacks for value in stack.values)
        return not self.names or not self.stacks


@final
class MatrixData(PanelModel):
    """Square of values from 0 up, with the same names along both sides."""

    x_label: str
    y_label: str
    names: list[str]
    values: list[list[Annotated[float, Field(ge=0)]]]
    """Rows are y, columns are x: both labels agree on the diagonal."""

    @model_validator(mode="after")
    def _check_square(self) -> MatrixData:
        side = len(self.names)
        if len(self.values) != side or any(len(row) != side for row in self.values):
            raise ValueError(f"{side} names need {side} rows of {side} values")
        return self

    def is_empty(self) -> bool:
        return not self.names

    def list_largest_cells(self) -> list[tuple[str, str, str]]:
        """Lists the largest cells off the diagonal, as (row name, column name, value); zeros are left out."""
        # A page without a matrix needs no numpy.
        import numpy as np

        cells = np.array(self.values)
        # The diagonal of a confusion matrix holds the correct predictions.
        np.fill_diagonal(cells, 0)
        flat = cells.ravel()
        # A partition finds the smallest cell of the list in linear time; a matrix may have a million cells.
        smallest_listed = np.partition(flat, -min(MAX_LISTED_CELLS, flat.size))[-min(MAX_LISTED_CELLS, flat.size)]
        candidates = np.flatnonzero((flat >= smallest_listed) & (flat > 0))
        # Stable, so that equal cells keep the order of reading, and a page does not change from one writing to the
        # next.
        largest = candidates[np.argsort(-flat[candidates], kind="stable")][:MAX_LISTED_CELLS].tolist()
        cell_indices = [divmod(index, len(self.names)) for index in largest]
        return [(self.names[y], self.names[x], format(self.values[y][x], ",.6g")) for y, x in cell_indices]


@final
class SurfaceData(PanelModel):
    """Heights over a grid: rows are y, None is a gap."""

    x_label: str
    y_label: str
    z_label: str
    x: list[float]
    y: list[float]
    z: list[list[float | None]]
    log_z: bool = False
    marks: list[MarkData] = []
    path: bool = False
    """A line joins the marks, for example the checkpoints of a run."""

    @model_validator(mode="after")
    def _check_heights(self) -> SurfaceData:
        if len(self.z) != len(self.y) or any(len(row) != len(self.x) for row in self.z):
            raise ValueError(f"{len(self.y)} y and {len(self.x)} x need {len(self.y)} rows of {len(self.x)} heights")
        if any(previous >= following for axis in (self.x, self.y) for previous, following in pairwise(axis)):
            raise ValueError("x and y must ascend")
        return self

    def is_empty(self) -> bool:
        return all(height is None for row in self.z for height in row)


@final
class GridData(PanelModel):
    """Heat map: a row of values per name over ascending x. A None is a gap."""

    x_label: str
    y_label: str
    z_label: str
    x: list[float]
    names: list[str]
    values: list[list[float | None]]
    log: bool = False
    """Colours by powers of ten."""
    columns: list[str] = []
    """Names of the columns, if x only counts them."""
    texts: list[list[str]] = []
    """Text of each cell, in rows of one text per x; empty: nothing."""

    @model_validator(mode="after")
    def _check_texts(self) -> GridData:
        if self.columns and len(self.columns) != len(self.x):
            raise ValueError(f"there are {len(self.columns)} columns for {len(self.x)} x")
        if self.texts and [len(row) for row in self.texts] != [len(self.x)] * len(self.names):
            raise ValueError(f"{len(self.names)} names and {len(self.x)} x need as many rows of as many texts")
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> GridData:
        if len(self.values) != len(self.names) or any(len(row) != len(self.x) for row in self.values):
            raise ValueError(f"{len(self.names)} names and {len(self.x)} x need as many rows of as many values")
        if any(previous >= following for previous, following in pairwise(self.x)):
            raise ValueError("x must ascend")
        return self

    def is_empty(self) -> bool:
        return all(value is None for row in self.values for value in row)


@final
class ImageData(PanelModel):
    """One image as a base64 data URI, with its caption."""

    src: Annotated[str, AfterValidator(_check_data_uri)]
    caption: str
    note: str = ""


@final
class ImagesData(PanelModel):
    """Images side by side, or `whole`: one below the other, at their own width."""

    images: list[ImageData]
    whole: bool = False

    def is_empty(self) -> bool:
        return not self.images


@final
class TableData(PanelModel):
    """Rows of texts, one per column."""

    columns: list[str]
    rows: list[list[str]]

    @model_validator(mode="after")
    def _check_cells(self) -> TableData:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(f"row {index} has {len(row)} cells for {len(self.columns)} columns")
        return self

    def is_empty(self) -> bool:
        return not self.rows

    def find_numeric_columns(self) -> list[bool]:
        """Tells for each column whether all cells are numbers, with or without a unit: those are set flush right."""
        return [all(NUMERIC_CELL.fullmatch(row[i].strip()) for row in self.rows) for i in range(len(self.columns))]


@final
class TextData(PanelModel):
    """Text that is shown unchanged."""

    text: str

    def is_empty(self) -> bool:
        return not self.text.strip()


@final
class _Document(BaseModel, Generic[T]):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    name: Annotated[str, Field(min_length=1)]
    title: str
    kind: str
    data: T
    order: int
    note: str
    width: Literal["full", "half"]
    section: str


DOCUMENT_BY_KIND: dict[str, Any] = {
    "cards": _Document[CardsData], "lines": _Document[LinesData], "points": _Document[PointsData],
    "bars": _Document[BarsData], "matrix": _Document[MatrixData], "surface": _Document[SurfaceData],
    "grid": _Document[GridData], "parallel": _Document[ParallelData], "paths": _Document[PathsData],
    "images": _Document[ImagesData], "table": _Document[TableData], "text": _Document[TextData],
}  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True)
class CheckedPanel:
    """Checked panel, ready for the template.

    Attributes:
        document: The panel, with its data as the model of its kind.
        json: The panel as JSON that is safe inside a script element; empty if no script draws it.
        is_empty: There is nothing to draw.
        anchor: Id of its HTML element.
    """

    document: Any
    json: str
    is_empty: bool
    anchor: str


def check_panel(panel: Panel) -> CheckedPanel:
    """Checks a panel and prepares it for the page.

    Raises:
        HeadwayError: the kind is unknown, or the data do not fit it. The message names the panel.
    """
    if panel.kind not in DOCUMENT_BY_KIND:
        raise HeadwayError(
            f"panel {panel.name!r} has the unknown kind {panel.kind!r}",
            fix=suggest_nearest(str(panel.kind), get_args(PanelKind)),
        )
    # By way of JSON, as stored panels are read: strict models take a list for a tuple there, but not in Python.
    document_json = panel.to_json()
    try:
        document = DOCUMENT_BY_KIND[panel.kind].model_validate_json(document_json)
    except ValidationError as error:
        # The first error is enough for the author of the panel.
        problem = describe_error(error.errors(include_url=False)[0])
        raise HeadwayError(f"panel {panel.name!r} ({panel.kind}): {problem}") from error
    is_empty = document.data.is_empty()
    # Cards, images, tables and texts are plain HTML: only charts need their data as JSON.
    is_chart = panel.kind in (*PLOTLY_KINDS, *CANVAS_KINDS) and not is_empty
    return CheckedPanel(
        document=document,
        json=_escape_for_script(document_json) if is_chart else "",
        is_empty=is_empty,
        # An id holds no white space.
        anchor="-".join(document.name.split()),
    )


def _escape_for_script(text: str) -> str:
    """Escapes JSON so that it cannot end its script element, or open a comment there. `<` occurs only inside texts."""
    # The escape is valid in any JSON text, and the browser's parser turns it back.
    return text.replace("<", "\\u003c")
