"""Clocks of single layers of a run: their mean times, the parts of a step that they stand for, and their panels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from headway.core import row_file
from headway.core.run_folder import RunFolder
from headway.core.text_format import pluralise
from headway.observe.layer_times import NETWORK
from headway.page import panel
from headway.page.panel import Panel

SECTION = "Time"
# Layers of the chart; the table has all.
DRAWN_LAYERS = 40


@final
@dataclass(frozen=True)
class LayerClocks:
    """Mean times of the modules of a network over the logging steps of a run.

    Attributes:
        names: names of the modules, in the order of their first calls.
        counts: [n], number of the measured steps in which each module was called.
        forward_s, backward_s: [n], seconds of a step that calls it; a module's own, without the modules inside it.
        weights: [n], weights of each module itself, without biases.
        step_s: seconds of the optimizer's step; NaN if it made none.
        steps: number of steps that were measured.
        device: `cpu`, or the name of a GPU.
    """

    names: tuple[str, ...]
    counts: NDArray[np.int64]
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    weights: NDArray[np.float64]
    step_s: float
    steps: int
    device: str

    @property
    def shares(self) -> NDArray[np.float64]:
        """Share of the measured steps in which each module was called, [n]."""
        return self.counts / self.steps

    def list_parts(self, optimizer_s: float) -> dict[str, tuple[float, str]]:
        """Returns (seconds, note) of the parts of a step that these clocks stand for.

        A layer is a module with weights, and the modules without weights that run after it, such as norms.

        Args:
            optimizer_s: seconds of a step in the loop's stage `optimizer`.
        """
        weighted = np.flatnonzero(self.weights > 0)
        layers = np.searchsorted(weighted, np.arange(len(self.names)), side="right")
        # What runs before the first weights belongs to the first layer.
        layers = np.maximum(layers, 1)
        # What a module computes around those inside it has no place between two layers.
        is_around = np.array([self._has_inner(name) for name in self.names])
        last = max(1, len(weighted))
        first, output = (layers == 1) & ~is_around & (last > 1), (layers == last) & ~is_around
        rest = ~(first | output)
        clock = "CUDA events" if self.device != "cpu" else "clocks of the layers"
        on = f"{clock}, mean of {pluralise(self.steps, 'logging step')}"
        hidden = f"{on}; all layers between the first and the last, and what modules compute around others"
        places = {
            "layer 1": (first, f"{on}; the first layer"),
            "layer 2": (rest, hidden),
            "layer 3": (output, f"{on}; the last layer"),
        }
        # Scaled to the mean step: some steps do not call all modules.
        forward, backward = self.forward_s * self.shares, self.backward_s * self.shares
        parts = {f"back-propagation, {name}": (backward[mask].sum(), said) for name, (mask, said) in places.items()}
        parts |= {f"activation, {name}": (forward[mask].sum(), said) for name, (mask, said) in places.items()}
        parts["output"] = parts.pop("activation, layer 3")
        if np.isfinite(self.step_s):
            # On a GPU the step's events may be longer than the time in which the host launches it.
            around = max(0.0, optimizer_s - self.step_s)
            parts["optimizer"] = (around, "the loop's clock: optimizer, without the step: loss scale, clipping, logs")
            said = f"{on}; optimizer.step, which reads the gradients and writes the weights in one pass"
            parts["update of the weights"] = (self.step_s, said)
        return {name: (float(seconds), said) for name, (seconds, said) in parts.items()}

    def _has_inner(self, name: str) -> bool:
        inner = "" if name == NETWORK else f"{name}."
        return any(one.startswith(inner) for one in self.names if one != name)


def read_layer_clocks(run: RunFolder, device: str) -> LayerClocks | None:
    """Reads the clocks of a run; None if it has none."""
    table = row_file.read_rows(run.rows_path("layer_times"))
    if table is None or not len(table.steps):
        return None
    values = table.values.astype(np.float64)
    counts = np.isfinite(values[:, :, 0]).sum(axis=0)
    # The rows of a module may have been cut by a resume.
    kept = np.flatnonzero(counts)
    names, counts = tuple(table.names[place] for place in kept), counts[kept]
    means = np.nansum(values[:, kept], axis=0) / counts[:, None]
    step = row_file.read_rows(run.rows_path("optimizer_times"))
    taken = np.zeros(0) if step is None else step.values.astype(np.float64)
    # fp16 skips a step whose gradients are infinite, and that has no time.
    taken = taken[np.isfinite(taken)]
    step_s = float(taken.mean()) if len(taken) else float("nan")
    return LayerClocks(names, counts, means[:, 0], means[:, 1], means[:, 2], step_s, len(table.steps), device)


def build_panels(clocks: LayerClocks) -> list[Panel]:
    """Builds the bars of the slowest layers, and the table of all."""
    total = (clocks.forward_s + clocks.backward_s) * clocks.shares
    drawn = sorted(np.argsort(-total, kind="stable")[:DRAWN_LAYERS])
    stacks = [
        (word, [_round_ms(times[place]) for place in drawn])
        for word, times in (("forward", clocks.forward_s), ("backward", clocks.backward_s))
    ]
    note = f"Mean of {pluralise(clocks.steps, 'logging step')}, each module without those inside it."
    if clocks.counts.min(initial=clocks.steps) < clocks.steps:
        note += " A module that some steps do not call has the mean of those that do; the table counts them."
    if len(drawn) < len(total):
        note += f" The {len(drawn)} slowest of {len(total)}, in the order of their calls."
    if clocks.device == "cpu":
        note += " The clocks themselves take some microseconds a module."
    whole = max(float(total.sum()), 1e-12)
    rows = [
        (name, f"{count:,}", f"{_round_ms(forward):g}", f"{_round_ms(backward):g}", f"{share / whole:.1%}")
        for name, count, forward, backward, share in zip(
            clocks.names, clocks.counts, clocks.forward_s, clocks.backward_s, total, strict=True
        )
    ]
    more: dict[str, Any] = {"section": SECTION, "width": "full"}
    columns, names = (
        ("module", "steps", "forward, ms", "backward, ms", "share"),
        [clocks.names[place] for place in drawn],
    )
    given: dict[str, Any] = {"x_label": "ms per step", "order": 335, "note": note, **more}
    return [
        panel.bars("layer-times", "Time of each layer", names, stacks, **given),
        panel.table("layer-times-table", "Time of each layer in numbers", columns, rows, order=336, **more),
    ]


def _round_ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.3g}")
