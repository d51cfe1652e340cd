"""Preview of a schedule, drawn with blocks on a terminal and with charts on a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.core.recipe import format_value
from headway.core.text_format import pluralise
from headway.page import panel, renderer
from headway.page.panel import Panel
from headway.report.schedule_preview import SchedulePoint, SchedulePreview

# Each character is one eighth of a line higher than the one before.
BLOCKS = " \u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
# The same for a terminal without block characters.
ASCII_BLOCKS = " ..::##"
# Lines of a drawing.
HEIGHT = 8
# Columns to the left of a drawing.
MARGIN = 10
# Turns that are listed on a terminal; of more, the first and the last.
MAX_TURNS = 14
# Sections of a recipe that determine the schedule.
SCHEDULE_KEYS = ("batch", "batch_growth", "epochs", "optimizer", "schedule")


def format_preview(preview: SchedulePreview, width: int, *, blocks: bool = True) -> str:
    """Formats charts of learning rate and batch, and a table of every turn.

    Args:
        width: Columns of the terminal.
        blocks: True if the terminal can show block characters.
    """
    columns, shades = max(20, width - MARGIN - 2), BLOCKS if blocks else ASCII_BLOCKS
    points, turns = [_find_point(preview, column, columns) for column in range(columns)], preview.list_turns()
    # Turns count for the scale, too: the peak may lie between two columns.
    highest = max(point.lr for point in (*points, *turns))
    lines = [_format_headline(preview), ""]
    lines += ["learning rate", *_draw_bars([point.lr for point in points], highest, shades)]
    lines += [*_draw_axis(preview.epochs, columns), ""]
    if rmsprop := [point.lr_rmsprop for point in points if point.lr_rmsprop is not None]:
        lines += ["learning rate of RMSprop", *_draw_bars(rmsprop, max(rmsprop), shades)]
        lines += [*_draw_axis(preview.epochs, columns), ""]
    if preview.plan.grows:
        lines += ["batch", *_draw_bars([point.batch for point in points], preview.largest_batch, shades)]
        lines += [*_draw_axis(preview.epochs, columns), ""]
    rows = [_format_point(turn) for turn in turns]
    if len(rows) > MAX_TURNS:
        half = MAX_TURNS // 2
        rows = [*rows[:half], ("",) * 5 + (f"... {len(rows) - 2 * half} more",), *rows[-half:]]
    header = ("step", "epoch", "learning rate", "momentum", "batch", "")
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(5)]
    for row in (header, *rows):
        cells = [cell.rjust(size) for cell, size in zip(row, widths, strict=False)]
        lines.append("  ".join([*cells, row[5]]).rstrip())
    return "\n".join(lines)


def _format_headline(preview: SchedulePreview) -> str:
    steps = pluralise(preview.steps, "step")
    macro = (
        f", {preview.internal.steps_per_update} of them a macro-batch" if preview.internal.steps_per_update > 1 else ""
    )
    return f"{preview.loaded.recipe.name}: {steps}{macro}, {preview.epochs:.4g} epochs of {preview.samples:,} samples"


def _format_point(point: SchedulePoint) -> tuple[str, ...]:
    momentum = "none" if point.momentum is None else f"{point.momentum:g}"
    rate = f"{point.lr:.5g}" + ("" if point.lr_rmsprop is None else f" + {point.lr_rmsprop:.3g} of RMSprop")
    return (f"{point.step:,}", f"{point.epoch:.2f}", rate, momentum, f"{point.batch:,}", point.what)


def _find_point(preview: SchedulePreview, column: int, columns: int) -> SchedulePoint:
    middle = (2 * column + 1) * preview.total_positions // (2 * columns)
    return preview.compute_point(max(0, preview.plan.count_steps(0, middle + 1) - 1))


def _draw_bars(values: Sequence[float], top: float, shades: str) -> list[str]:
    """Draws columns of blocks that stand on zero; `top` is HEIGHT lines high."""
    # A column is counted in levels, of which each line shows as many as there are shades.
    levels = len(shades) - 1
    heights = [round(value / top * HEIGHT * levels) if top else 0 for value in values]
    lines = []
    for line in reversed(range(HEIGHT)):
        label = f"{top:.4g}" if line == HEIGHT - 1 else "0" if line == 0 else ""
        drawn = "".join(shades[min(levels, max(0, height - line * levels))] for height in heights)
        lines.append(f"{label:>{MARGIN}} {drawn}".rstrip())
    return lines


def _draw_axis(epochs: float, columns: int) -> list[str]:
    """Draws five labels of the epoch axis."""
    out = [" "] * (columns + 12)
    for quarter in range(5):
        # The first label is flush left, the last flush right, and those between are centred.
        label = f"{epochs * quarter / 4:.3g}"
        place = round((columns - 1) * quarter / 4) - (len(label) // 2 if 0 < quarter < 4 else 0)
        place -= len(label) - 1 if quarter == 4 else 0
        out[place : place + len(label)] = label
    return [f"{'epoch':>{MARGIN}} {''.join(out).rstrip()}"]


def render_preview(preview: SchedulePreview) -> str:
    """Renders the same as one HTML file with charts."""
    recipe = preview.loaded.recipe
    return renderer.render(
        _build_panels(preview),
        title=f"{recipe.name}: schedule",
        subtitle="Computed from the recipe, before the run",
        sections=("Schedule", "Steps"),
    )


def _build_panels(preview: SchedulePreview) -> list[Panel]:
    recipe, points, turns = preview.loaded.recipe, preview.sample_curve(), preview.list_turns()
    epochs = [point.epoch for point in points]
    highest = max(turns, key=lambda turn: turn.lr)
    largest = preview.largest_batch
    cards = [
        ("steps", f"{preview.steps:,}", f"{preview.epochs:.4g} epochs of {preview.samples:,} samples"),
        ("highest learning rate", f"{highest.lr:.5g}", f"at epoch {highest.epoch:.4g}"),
        ("last learning rate", f"{turns[-1].lr:.5g}", f"at step {turns[-1].step:,}"),
        ("largest batch", f"{largest:,}", f"from {turns[0].batch:,}" if preview.plan.grows else "throughout"),
    ]
    rates: list[float | None] = [point.lr for point in points]
    # These fall by a factor each time: on a linear axis the last rates would look like zero.
    falls = ("step", "multi_step", "exponential")
    curves: tuple[tuple[str, str, str, list[float | None], tuple[float, float] | None], ...] = (
        ("lr", "Learning rate", "learning rate", rates, panel.choose_y_range(rates)),
        ("lr-log", "Learning rate, logarithmic", "learning rate", rates, None),
        ("lr-rmsprop", "Learning rate of RMSprop", "learning rate", [point.lr_rmsprop for point in points], None),
        ("momentum", "Momentum", "momentum", [point.momentum for point in points], (0.0, 1.0)),
        ("batch", "Batch", "samples per step", [point.batch for point in points], (0.0, 1.05 * largest)),
    )
    lines = [
        panel.lines(
            name,
            title,
            [(label, epochs, values)],
            x_label="epoch",
            y_label=label,
            section="Schedule",
            order=200 + place,
            y_range=bounds,
            log_y=name == "lr-log",
        )
        for place, (name, title, label, values, bounds) in enumerate(curves)
        if None not in values and (name != "lr-log" or recipe.schedule.name in falls)
    ]
    columns = ("step", "epoch", "learning rate", "momentum", "batch", "change")
    origins = preview.loaded.origins
    leaves = [leaf for leaf in preview.loaded.list_leaves() if leaf[0].partition(".")[0] in SCHEDULE_KEYS]
    rows = [(key, format_value(value), origins.get(key, "default")) for key, value in leaves]
    wide: dict[str, Any] = {"section": "Steps", "width": "full"}
    return [
        panel.cards("length", "Run", cards, section="Schedule", order=100, note=" ".join(preview.warnings)),
        *lines,
        panel.table("turns", "Changes", columns, [_format_point(turn) for turn in turns], order=300, **wide),
        panel.table("recipe", "Recipe", ("key", "value", "origin"), rows, order=310, **wide),
    ]
