"""Verdict: what the gate found, with the reasons for which an export is refused."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

GatePrecision = Literal["fp32", "bf16", "int8"]
"""Precision that an export states. `fp32` may change no answer, the others may lose as much as the gate allows."""
PixelSource = Literal["pixels", "files"]
"""Start of both pipelines: from the same uint8 pixels, or each from the file, with its own decoder and resize."""

METRICS = {"class": "accuracy", "multi": "label_accuracy", "value": "absolute_error", "own": "outputs"}
"""The metric that the gate compares, by the kind of the labels."""


@dataclass(frozen=True, kw_only=True)
class Flip:
    """An answer that differs.

    Attributes:
        sample: index in the data set.
        answers: number of the class, of the run and of the export; for several labels, that of the label twice.
        gap: how far the run's two best answers lie apart, in probability.
    """

    sample: int
    answers: tuple[int, int]
    gap: float


@dataclass(frozen=True, kw_only=True)
class GroupDrop:
    """The drop among the samples of one class, of those that have, or have not, one label, or of one number."""

    name: str
    samples: int
    points: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The findings of the gate about one export.

    Attributes:
        precision: what the export states.
        source: where both pipelines started.
        metric: name of the metric.
        samples: number of samples compared.
        reference, value: the metric of the run and of the export; NaN if they could not be computed.
        drop: how much worse the export is: percentage points of accuracy, for numbers per cent of the run's error.
        bound: upper 95 % bound of `drop`.
        allowed: the largest drop that passes.
        flips: number of answers that differ.
        near: flips that are allowed, as the run's two best answers lie close together.
        worst: the class, or the number, with the largest drop; None if no class has enough samples.
        difference: the largest difference of an output.
        pixel_difference: mean difference of the pixels in levels from 0 to 255, from files; otherwise NaN.
        largest_pixel_difference: likewise.
        faults: reasons to refuse the export; empty if it passes.
    """

    precision: GatePrecision
    source: PixelSource
    metric: str
    samples: int
    reference: float = math.nan
    value: float = math.nan
    drop: float = math.nan
    bound: float = math.nan
    allowed: float = 0.0
    flips: int = 0
    near: tuple[Flip, ...] = ()
    worst: GroupDrop | None = None
    difference: float = math.nan
    pixel_difference: float = math.nan
    largest_pixel_difference: float = math.nan
    faults: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """True if the export may be used."""
        return not self.faults

    def to_json(self) -> dict[str, Any]:
        """Returns the attributes by name, and `passed`. Numbers that are not finite become None, as in JSON."""
        found = {"passed": self.passed} | asdict(self)
        return {name: _make_plain(value) for name, value in found.items()}

    def describe(self) -> str:
        """Returns the verdict in one line, for the terminal; the reasons follow if it is refused."""
        unit = "% of it" if self.metric == METRICS["value"] else "points"
        parts = [f"{self.precision} from {'the same pixels' if self.source == 'pixels' else 'files'}"]
        if not math.isnan(self.value):
            parts += [
                f"{self.metric} {self.value:.8f}, the run {self.reference:.8f}",
                f"drop {self.drop:.2f} {unit} (upper 95 % bound {self.bound:.2f})",
            ]
        if self.metric in (METRICS["class"], METRICS["multi"]):
            near = f", {len(self.near)} of them near a tie" if self.near else ""
            parts.append(f"{self.flips} flips{near}")
        if not math.isnan(self.difference):
            parts.append(f"largest difference {self.difference:.2g}")
        if not math.isnan(self.pixel_difference):
            most = f"{self.largest_pixel_difference:g} at most"
            parts.append(f"pixels differ by {self.pixel_difference:.2g} levels, {most}")
        parts.append(f"{self.samples:,} samples")
        lines = ["; ".join(parts) + (": passed" if self.passed else ": REJECTED"), *self.faults]
        if self.passed and self.precision != "fp32" and self.bound > self.allowed:
            few = f"{self.samples:,} samples are too few to tell whether it loses more than {self.allowed:g} {unit}"
            lines.append(f"{few}; judge it on more with --data")
        return "\n".join(lines)


def _make_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, tuple | list):
        return [_make_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _make_plain(one) for name, one in value.items()}
    return value
