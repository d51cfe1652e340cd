"""Pictures of the statements, as SVG files of docs/images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench._accuracy.results import Results
from bench._decks.statements import NOISE_SHARE, RESULTS
from bench._drawing import FOLDER, Axis, draw


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


def write_pictures() -> None:
    """Writes the pictures of the statements into docs/images."""
    for name, text in draw_statements().items():
        (FOLDER / f"statement-{name}.svg").write_text(text, encoding="utf-8")
