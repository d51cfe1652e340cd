"""Pictures of what a bench has measured, as SVG files of docs/images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from bench._arms import ROOT

FOLDER = ROOT / "docs/images"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 560, 320, 84, 28, 16, 52
# Readable on light and on dark pages.
FONT = 'font-family="sans-serif" font-size="13"'
INK, DOTS, LINE = "#808080", "#009688", "#ef6c00"


@final
@dataclass(frozen=True)
class Axis:
    """An axis of a picture, with its label and the values that have marks. Logarithmic, unless `linear`."""

    label: str
    marks: Sequence[float]
    linear: bool = False

    def place(self, value: float) -> float:
        """Returns the place of a value, from 0 to 1."""
        low, high = (self._scale(end) for end in (min(self.marks), max(self.marks)))
        return (self._scale(value) - low) / (high - low)

    def _scale(self, value: float) -> float:
        return value if self.linear else math.log(value)


Points = Sequence[tuple[float, float]]


def draw(
    x_axis: Axis, y_axis: Axis, points: Points, law: Points, legend: tuple[str, str], *, legend_x: int = 282
) -> str:
    """Draws measured points, and a law as a line.

    Args:
        legend: of the points, and of the line.
        legend_x: its left end, where it covers no point.
    """
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + x_axis.place(x) * (right - LEFT), bottom - y_axis.place(y) * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {FONT}>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="{INK}"/>',
    ]
    for mark in x_axis.marks:
        at = place(mark, y_axis.marks[0])[0]
        parts.append(_write(at, bottom + 18, f"{mark:g}", "middle"))
    for mark in y_axis.marks:
        at = place(x_axis.marks[0], mark)[1]
        parts += [_write(LEFT - 8, at + 4, f"{mark:g}", "end")]
        parts += [f'<path d="M{LEFT} {at:.1f}H{right}" stroke="{INK}" stroke-opacity="0.25"/>']
    parts.append(_write((LEFT + right) / 2, HEIGHT - 10, x_axis.label, "middle"))
    middle = (TOP + bottom) / 2
    parts.append(_write(16, middle, y_axis.label, "middle", f' transform="rotate(-90 16 {middle:g})"'))
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in (place(*point) for point in law))
    parts.append(f'<path d="M{line}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for point in points:
        x, y = place(*point)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{DOTS}"/>')
    for row, (text, colour) in enumerate(zip(legend, (DOTS, LINE), strict=True)):
        at = TOP + 14 + 18 * row
        parts.append(f'<circle cx="{legend_x}" cy="{at - 4}" r="4" fill="{colour}"/>')
        parts.append(_write(legend_x + 12, at, text, "start"))
    return "\n".join([*parts, "</svg>\n"])


def _write(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{INK}"{more}>{text}</text>'
