"""Pictures of the statements, and of the error by batch, as SVG files of docs/images."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from bench._accuracy.batch_error import BATCHES, ErrorCurve
from bench._accuracy.results import Results
from bench._arms import ROOT
from bench._decks.statements import NOISE_SHARE, RESULTS

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


def draw_statements() -> dict[str, str]:
    """Draws all statements from the kept measurements; pictures by name."""
    found = {one["name"]: one for one in Results(RESULTS).all()}
    return {
        "variance": _draw_variance(found["variance"]),
        "linear": _draw_steps(found["linear"]),
        "norm": _draw_norm(found["norm"]),
        "root": _draw_root(found["root"]),
        "noise": _draw_noise(found["noise"]),
    }


def _pair(one: Mapping[str, Any], key: str = "y") -> list[tuple[float, float]]:
    return list(zip(one["x"], one[key], strict=True))


def _draw_variance(one: Mapping[str, Any]) -> str:
    points = _pair(one)
    (first, variance) = points[0]
    law = [(x, variance * first / x) for x, _ in points]
    axes = Axis("batch m", one["x"]), Axis("variance of its gradient", (0.01, 0.1, 1, 10))
    return draw(*axes, points, law, (f"measured: slope {one['value']:.3f}", "1 / m"))


def _draw_steps(one: Mapping[str, Any]) -> str:
    points = _pair(one)[::-1]
    (rate, away) = points[0]
    law = [(x, away * (x / rate) ** 2) for x, _ in points]
    axes = (
        Axis("learning rate of the small steps", sorted(one["x"])),
        Axis("distance", (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)),
    )
    return draw(*axes, points, law, (f"measured: slope {one['value']:.3f}", "square of the rate"))


def _draw_norm(one: Mapping[str, Any]) -> str:
    low, high = math.floor(min(one["x"])), math.ceil(max(one["x"]))
    marks = tuple(range(low, high + 1, 2)) if (high - low) % 2 == 0 else tuple(range(low, high + 2, 2))
    axes = Axis("equation", marks, linear=True), Axis("batch norm", marks, linear=True)
    ends = [(one, one) for one in (marks[0], marks[-1])]
    return draw(*axes, _pair(one), ends, (f"largest difference {one['value']:.0e}", "equal"))


def _draw_root(one: Mapping[str, Any]) -> str:
    axes = (
        Axis("times the batch, k", one["x"]),
        Axis("covariance of a step, relative", (0.5, 1, 2, 4, 8, 16, 32)),
    )
    points = [*_pair(one), *_pair(one, "linear")]
    law = [(x, 1.0) for x in one["x"]]
    return draw(*axes, points, law, ("measured: k times the rate above", "1: sqrt(k) times the rate"))


def _draw_noise(one: Mapping[str, Any]) -> str:
    axes = Axis("batch", one["x"]), Axis("covariance by the noise", (0.01, 0.0625, 0.4))
    law = [(x, NOISE_SHARE**2) for x in one["x"]]
    return draw(*axes, _pair(one), law, ("measured", "1 / 16, whatever the batch"))


def draw_errors(curve: ErrorCurve) -> str:
    """Draws the errors of `bench.large_batch --error`: each seed, and the means as a line."""
    found = {batch: errors for batch in BATCHES if (errors := curve.list_errors(batch))}
    points = [(batch, error) for batch, errors in found.items() for error in errors]
    means = [(batch, statistics.fmean(errors)) for batch, errors in found.items()]
    axes = Axis("batch", BATCHES), Axis("evaluation error, %", range(20, 101, 20), linear=True)
    return draw(*axes, points, means, ("one seed", "mean of the seeds"), legend_x=LEFT + 16)


def write_errors(results: Results) -> None:
    """Writes the picture of the error by batch into docs/images."""
    (FOLDER / "error-by-batch.svg").write_text(draw_errors(ErrorCurve(results.all())), encoding="utf-8")


def write_pictures() -> None:
    """Writes the pictures of the statements into docs/images."""
    for name, text in draw_statements().items():
        (FOLDER / f"statement-{name}.svg").write_text(text, encoding="utf-8")
