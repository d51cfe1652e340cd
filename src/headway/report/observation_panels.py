"""Panels of the recipe's section `observe`: layers, activations, gradient noise scale, divergence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.comm.gradient_noise import predict_sample_ratio
from headway.core import row_file
from headway.core.row_file import RowTable
from headway.core.run_folder import RunFolder
from headway.observe.activations import INPUT_SUFFIX
from headway.page import panel
from headway.page.panel import Panel
from headway.report.thinning import MAX_POINTS, round_value, split_into_points

SECTION = "Large batches"
# Layers that are drawn as lines.
DRAWN_LAYERS = 8
# Layers in which several runs are compared.
COMPARED_LAYERS = 6

Numbers = NDArray[np.float64]


def build_panels(run: RunFolder, train: Sequence[dict[str, Any]], beside: Sequence[RunFolder] = ()) -> list[Panel]:
    """Builds the panels of a run's observations.

    Args:
        train: Training records of the run.
        beside: Other runs to compare layer rates with.
    """
    return [
        *_build_layer_panels(run),
        *_build_layer_comparison([run, *beside]),
        *_build_activation_panels(run),
        *_build_noise_panel(train),
    ]


def build_divergence_cards(records: Sequence[dict[str, Any]]) -> list[Panel]:
    """Builds a card for each message about the divergence of the run."""
    divergences = [record for record in records if record["kind"] == "divergence"]
    cards = [("diverges", f"step {record['step']:,}", record["what"]) for record in divergences]
    return [panel.cards("divergence", "The run diverges", cards, section="Training", order=190)] if cards else []


def _build_layer_panels(run: RunFolder) -> list[Panel]:
    table = row_file.read_rows(run.rows_path("layers"))
    if table is None or not len(table.steps):
        return []
    epochs, values = _thin_out(run, table)
    name, rates, words = _select_rates(values)
    labels = _shorten_names(table.names)
    wide: dict[str, Any] = {"section": SECTION, "width": "full", "x_label": "epoch", "y_label": "layer", "log": True}
    # As many logging steps as `_thin_out` merges into one column.
    together = -(-len(table.steps) // MAX_POINTS)
    put = f" Each column is the median of {together} logging steps." if together > 1 else ""
    # Columns of the table are |w|, |g|, |dw| and the local rate.
    moved = _divide(values[:, :, 2], values[:, :, 0])
    # Evenly spaced over the depth, with the first and the last layer. A network with fewer layers shows each once.
    few = sorted({round(place) for place in np.linspace(0, len(labels) - 1, min(DRAWN_LAYERS, len(labels)))})
    return [
        panel.grid(
            "layer-rates",
            f"{name.capitalize()} of each layer",
            epochs,
            [(label, _round_values(rates[:, place])) for place, label in enumerate(labels)],
            z_label=name,
            order=280,
            note=f"{words}{put}",
            **wide,
        ),
        panel.lines(
            "layer-rates-lines",
            f"{name.capitalize()} of some layers",
            [(labels[place], epochs, _round_values(rates[:, place])) for place in few],
            x_label="epoch",
            y_label=name,
            # A logarithmic axis needs a number above 0.
            log_y=bool((rates[np.isfinite(rates)] > 0).any()),
            section=SECTION,
            order=281,
            note="The same numbers for a few layers, from first to last.",
        ),
        panel.lines(
            "layer-norms-lines",
            "Norm of the weights of some layers",
            [(labels[place], epochs, _round_values(values[:, place, 0])) for place in few],
            x_label="epoch",
            y_label="|w|",
            log_y=bool((values[:, few, 0] > 0).any()),
            section=SECTION,
            order=282,
            note="If a line keeps rising, the layer's steps are too large for its weight decay.",
        ),
        panel.grid(
            "layer-steps",
            "Relative step of each layer, |dw| / |w|",
            epochs,
            [(label, _round_values(moved[:, place])) for place, label in enumerate(labels)],
            z_label="|dw| / |w|",
            order=283,
            note="Share of a layer that one step replaces. A row that is much lighter or darker than the others learns "
            f"at another pace; a row that jumps is the first to diverge.{put}",
            **wide,
        ),
    ]


def _select_rates(values: Numbers) -> tuple[str, Numbers, str]:
    """Selects (name, [time, layer], note) of the local rates; |w| / |g| if the optimizer has no rate per layer."""
    if np.isfinite(values[:, :, 3]).any():
        note = "Learning rate of each layer, with the schedule and the trust ratio."
        return "local learning rate", values[:, :, 3], note
    note = (
        "LARS would step each layer at eta x lr x |w| / |g|. If rows differ by powers of ten, one learning rate is "
        "too large for some layers and too small for others."
    )
    return "|w| / |g|", _divide(values[:, :, 0], values[:, :, 1]), note


def _build_layer_comparison(runs: Sequence[RunFolder]) -> list[Panel]:
    """Builds a chart per layer with a line per run."""
    tables = [(run, table) for run in runs if (table := row_file.read_rows(run.rows_path("layers"))) is not None]
    if len(tables) < 2:
        return []
    # By name: networks of different depths share some of their layers.
    shared = [name for name in tables[0][1].names if all(name in table.names for _, table in tables)]
    if not shared:
        return []
    chosen = [shared[place] for place in sorted({round(x) for x in np.linspace(0, len(shared) - 1, COMPARED_LAYERS)})]
    # One kind of number for all runs: local rates only if every optimizer has them.
    lines: list[tuple[str, list[float], Numbers, tuple[str, ...]]] = []
    has_rates = [bool(np.isfinite(table.values[:, :, 3]).any()) for _, table in tables]
    name = "local learning rate" if all(has_rates) else "|w| / |g|"
    for run, table in tables:
        epochs, values = _thin_out(run, table)
        rates = values[:, :, 3] if all(has_rates) else _divide(values[:, :, 0], values[:, :, 1])
        batch = run.read_recipe_tree()["batch"]
        lines.append((f"batch {batch:,} ({run.folder.resolve().name})", epochs, rates, table.names))
    out = []
    for place, (layer, label) in enumerate(zip(chosen, _shorten_names(chosen), strict=True)):
        series = [(title, epochs, _round_values(rates[:, names.index(layer)])) for title, epochs, rates, names in lines]
        known = [value for _, _, values in series for value in values if value is not None and value > 0]
        out.append(
            panel.lines(
                f"compared-{place}",
                f"{label}: {name} by run",
                series,
                x_label="epoch",
                y_label=name,
                log_y=bool(known),
                section=SECTION,
                order=285 + place,
                note="" if place else "Comparison of the runs, layer by layer (You et al. 2017, figure 2).",
            )
        )
    return out


def _build_activation_panels(run: RunFolder) -> list[Panel]:
    table = row_file.read_rows(run.rows_path("activations"))
    if table is None or not len(table.steps):
        return []
    epochs, values = _thin_out(run, table)
    out = []
    normed = {name.removesuffix(INPUT_SUFFIX) for name in table.names if name.endswith(INPUT_SUFFIX)}
    # Pairs of before and after a batch norm come first, so that each pair stands in one row.
    order = sorted(
        range(len(table.names)), key=lambda place: table.names[place].removesuffix(INPUT_SUFFIX) not in normed
    )
    for number, place in enumerate(order):
        name = table.names[place]
        low, lower, middle, upper, high = (_round_values(values[:, place, column]) for column in range(5))
        words = (
            "before batch norm" if name.endswith(INPUT_SUFFIX) else "after batch norm" if name in normed else "outputs"
        )
        out.append(
            panel.lines(
                f"activations-{number:02d}",
                f"{name.removesuffix(INPUT_SUFFIX)}: {words}",
                [("median", epochs, middle)],
                bands=[(0, low, high), (0, lower, upper)],
                x_label="epoch",
                y_label="value",
                section=SECTION,
                order=275,
                note=""
                if place
                else "The line is the median; the bands hold 15 to 85 % and 2 to 98 % of the values of one training "
                "batch in training mode.",
            )
        )
    return out


def _build_noise_panel(train: Sequence[dict[str, Any]]) -> list[Panel]:
    estimates = [record for record in train if "noise_scale" in record]
    known = [record["noise_scale"] for record in estimates if record["noise_scale"] is not None]
    if not known:
        return []
    epochs, batches = [r["epoch"] for r in estimates], [r["batch"] for r in estimates]
    scale = [r["noise_scale"] for r in estimates]
    low, high = ([r[f"noise_scale_{end}"] for r in estimates] for end in ("low", "high"))
    # An interval without an upper end is filled up to the edge of the chart, and the note says so.
    top = 10 * max(*known, *batches)
    least = max(1.0, min(*known, *batches) / 10)
    bounds = [(max(a or least, least), top if b is None else b) for a, b in zip(low, high, strict=True)]
    note = describe_noise_scale(estimates[-1])
    if any(end >= top for _, end in bounds):
        note += f" If the band reaches the edge, the interval has no upper end, or one above {_format_samples(top)}."
    return [
        panel.lines(
            "noise-scale",
            "Gradient noise scale (critical batch)",
            [("critical batch", epochs, scale), ("batch of the run", epochs, [float(batch) for batch in batches])],
            bands=[(0, [a for a, _ in bounds], [b for _, b in bounds])],
            x_label="epoch",
            y_label="samples",
            y_range=(least, top),
            log_y=True,
            section=SECTION,
            order=270,
            width="full",
            note=note,
        )
    ]


def describe_noise_scale(record: dict[str, Any]) -> str:
    """Describes the meaning of a record's noise scale for its batch."""
    batch, scale, low, high = (record[key] for key in ("batch", "noise_scale", "noise_scale_low", "noise_scale_high"))
    low = low or 0.0
    ends = f"[{_format_samples(low)}, {'no upper end' if high is None else _format_samples(high)}]"
    if high is None and low <= batch:
        return (
            f"At the end: batch {batch:,}. The critical batch is not known yet: its 95 % interval is {ends}. For a "
            "narrower one, lower observe.noise_every_steps or train longer."
        )
    if scale is None:
        # Noise drowns the gradient: only a lower bound is known.
        return (
            f"At the end: batch {batch:,}. The gradient is below its noise, so the critical batch is too large to "
            f"measure, at least {_format_samples(low)}: a larger batch costs hardly any more samples."
        )
    # Samples to the same loss grow by (1 + 2 B / C) / (1 + B / C) when the batch doubles; steps are half of that.
    more = predict_sample_ratio(batch, scale) - 1
    cost, fewer = round(100 * more), round(100 * (1 - (1 + more) / 2))
    return (
        f"At the end: batch {batch:,}; critical batch about {_format_samples(scale)} {ends}, 95 % interval. Twice the "
        f"batch would take {cost} % more samples and {fewer} % fewer steps to the same loss, each at its best learning "
        "rate (McCandlish et al. 2018)."
    )


def _format_samples(value: float) -> str:
    """Formats a number of samples to two digits: no interval is narrow enough for more."""
    if value < 1:
        return f"{value:.1g}"
    digits = 1 - math.floor(math.log10(value))
    return f"{round(value, digits):,.0f}"


def _thin_out(run: RunFolder, table: RowTable) -> tuple[list[float], Numbers]:
    """Merges logging steps to at most MAX_POINTS (epochs, values [time, n, m]), by the median over neighbours."""
    samples = run.read_provenance(samples=int)["samples"]
    parts = split_into_points(len(table.steps))
    middle = _ignore_empty(lambda: np.stack([np.nanmedian(table.values[part], axis=0) for part in parts]))
    epochs = [float(table.positions[part[-1]]) / samples for part in parts]
    return epochs, middle.astype(np.float64)


def _ignore_empty(compute: Callable[[], Numbers]) -> Numbers:
    """Computes without warnings: the median of no values is NaN here, which is expected."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        return compute()


def _divide(one: Numbers, other: Numbers) -> Numbers:
    return _ignore_empty(lambda: one / other)


def _round_values(values: Numbers) -> list[float | None]:
    """Rounds values; None if one is not finite."""
    return [round_value(value) if math.isfinite(value) else None for value in values.tolist()]


def _shorten_names(names: Sequence[str]) -> list[str]:
    """Removes `.weight`, which nearly all names end with, unless two names would become equal."""
    short = [name.removesuffix(".weight") for name in names]
    return short if len(set(short)) == len(short) else list(names)
